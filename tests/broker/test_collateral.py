"""The collateral directory: loading, reloading, and refusal of older collateral."""

import dataclasses
import datetime as dt
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from control_plane import Site, daemon, short_directory, wait_for_log
from sealane.crypto.evidence.collateral import vendor_roots
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import collateral
from sealane.daemon.broker.collateral import CollateralKeeper
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import Compare
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UnavailableError, UsageError
from vendors.authority import NOW
from vendors.intel import FMSPC, NEXT_UPDATE, Intel, intel


@pytest.fixture(scope="module")
def vendor() -> Intel:
    return intel()


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    store = SqliteStore(tmp_path / "broker.sqlite")
    registry = await Registry.open(store, WrappingKey(bytes(32)), node="b")
    yield registry
    await registry.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


def keeper(
    vendor: Intel, files: Path | None, registry: Registry, metrics: Metrics | None = None
) -> CollateralKeeper:
    roots = dataclasses.replace(vendor_roots(), intel=vendor.root.certificate)
    return CollateralKeeper(files, registry=registry, metrics=metrics or Metrics(), roots=roots)


async def test_what_lies_in_the_directory_is_used(
    vendor: Intel, files: Path, registry: Registry
) -> None:
    kept = keeper(vendor, files, registry)
    assert not kept.current().tcb_infos
    (files / "bundle.json").write_bytes(vendor.collateral())
    (files / "nonsense").write_bytes(b"x")
    (files / ".draft").write_bytes(b"x")
    (files / "folder").mkdir()
    await kept.load(now=NOW)
    assert set(kept.current().tcb_infos) == {FMSPC}


async def test_metrics_tell_what_ends_first(vendor: Intel, files: Path, registry: Registry) -> None:
    metrics = Metrics()
    kept = keeper(vendor, files, registry, metrics)

    def values() -> list[float | None]:
        names = ("refusals", "next_update_timestamp_seconds")
        return [metrics.registry.get_sample_value(f"sealane_broker_collateral_{n}") for n in names]

    await kept.load(now=NOW)
    assert values() == [0, 0]
    (files / "bundle.json").write_bytes(vendor.collateral())
    (files / "nonsense").write_bytes(b"x")
    await kept.load(now=NOW)
    assert values() == [1, NEXT_UPDATE.timestamp()]
    soon = NOW + dt.timedelta(hours=1)
    (files / "bundle.json").write_bytes(vendor.collateral(list_end=soon))
    await kept.load(now=NOW)
    assert values() == [1, soon.timestamp()]


async def test_marks_are_every_brokers(vendor: Intel, files: Path, registry: Registry) -> None:
    path = files / "bundle.json"
    first, second = (keeper(vendor, files, registry) for _ in range(2))
    path.write_bytes(vendor.collateral(number=5))
    await first.load(now=NOW)
    path.write_bytes(vendor.collateral(number=4))
    for kept in (first, second):
        await kept.load(now=NOW)
        assert not kept.current().revocation_lists
        assert not kept.current().tcb_infos
    path.write_bytes(vendor.collateral(number=5))
    await first.load(now=NOW)
    assert first.current().tcb_infos


async def test_marks_are_stored_before_what_they_cover_is_used(
    vendor: Intel, files: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeper(vendor, files, registry)
    (files / "bundle.json").write_bytes(vendor.collateral())

    async def away(*_: object) -> int | None:
        raise UnavailableError("broker.store.unavailable", "the store does not answer")

    monkeypatch.setattr(registry, "commit", away)
    with pytest.raises(UnavailableError):
        await kept.load(now=NOW)
    assert not kept.current().tcb_infos


async def test_marks_that_another_broker_raises_in_between_are_read_again(
    vendor: Intel, files: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files / "bundle.json"
    first, second = (keeper(vendor, files, registry) for _ in range(2))
    honest, calls = registry.commit, 0

    async def overtaken(compares: Sequence[Compare], puts: dict[str, bytes]) -> int | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            path.write_bytes(vendor.collateral(number=6))
            await second.load(now=NOW)
        return await honest(compares, puts)

    monkeypatch.setattr(registry, "commit", overtaken)
    path.write_bytes(vendor.collateral(number=5))
    await first.load(now=NOW)
    # It lost the race with older collateral than the other broker's.
    assert not first.current().revocation_lists
    stored = await registry.collateral.get("marks")
    assert stored is not None
    assert {v for k, v in stored.record.marks.items() if k.endswith("/number")} == {6}


async def test_a_directory_that_cant_be_read_is_named(
    vendor: Intel, files: Path, registry: Registry
) -> None:
    kept = keeper(vendor, files / "missing", registry)
    with pytest.raises(UsageError, match=r"collateral\.unreadable"):
        await kept.load(now=NOW)


async def test_files_are_counted(
    vendor: Intel, files: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collateral, "FILES_MAX", 1)
    for name in ("a", "b"):
        (files / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=r"collateral\.count"):
        await keeper(vendor, files, registry).load(now=NOW)


async def test_without_a_directory_only_the_roots_are_known(registry: Registry) -> None:
    kept = CollateralKeeper(None, registry=registry, metrics=Metrics())
    await kept.load(now=NOW)
    assert kept.current().roots == vendor_roots()
    assert await registry.collateral.get("marks") is None


def test_a_broker_reads_its_collateral_at_start_and_on_sighup() -> None:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({})
        files = root / "collateral"
        files.mkdir()
        (files / "nonsense").write_bytes(b"x")
        path = site.broker_config()
        path.write_text(path.read_text() + f'collateral_dir = "{files}"\n')
        with daemon(path) as running:
            (files / "nonsense").unlink()
            running.process.send_signal(signal.SIGHUP)
            wait_for_log(running.process, path, "reloaded")
            lines = running.log_lines()
    refused = [line for line in lines if line["event"] == "collateral_refused"]
    assert [(line["file"], line["reason"]) for line in refused] == [
        ("nonsense", "attestation.collateral.certificate")
    ]
    loaded = [line for line in lines if line["event"] == "collateral_loaded"]
    assert [(line["files"], line["refused"]) for line in loaded] == [(1, 1), (0, 0)]
