"""The files with the authorities' certificates, and a step at a broker that can't write them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509

from brokers import Count, MemoryAudit, start_broker, succession_of
from sealane.daemon.broker.anchor_files import AUDIT_ANCHORS_NAME, TRUST_ANCHOR_NAME, AnchorFiles
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.runtime.clock import utc_now


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    store = SqliteStore(tmp_path / "store")
    _, _, registry = await start_broker(store, starts=Count(), heads=Count(), kek=bytes(32))
    yield registry
    await registry.close()


def written(path: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(path.read_bytes())


async def test_a_step_is_whole_though_a_file_cannot_be_written(
    registry: Registry, tmp_path: Path
) -> None:
    state, away = tmp_path / "state", tmp_path / "away"
    state.mkdir()
    files = AnchorFiles(state, registry.authorities)
    files.write()
    told: list[str] = []
    registry.authorities.on_change += [files.try_to_write, lambda: told.append("renew")]
    state.rename(away)
    steps = succession_of(registry, audit=MemoryAudit(), now=utc_now)
    await steps.announce()
    assert told == ["renew"]
    assert len(written(away / TRUST_ANCHOR_NAME)) == 1
    away.rename(state)
    files.try_to_write()
    for name in (TRUST_ANCHOR_NAME, AUDIT_ANCHORS_NAME):
        assert [*written(state / name)] == [*registry.authorities.anchors.certificates]


async def test_a_change_that_was_only_half_made_is_made_again(registry: Registry) -> None:
    def fail() -> None:
        raise RuntimeError

    registry.authorities.on_change.append(fail)
    steps = succession_of(registry, audit=MemoryAudit(), now=utc_now)
    with pytest.raises(RuntimeError):
        await steps.announce()
    registry.authorities.on_change.clear()
    assert await registry.refresh_authorities()
    assert not await registry.refresh_authorities()
