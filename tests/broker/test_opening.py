"""A broker opened from its configuration: the state anchored when it stops."""

import shutil
from pathlib import Path

import pytest

from sealane.daemon.broker.opening import HEADS_NAME, STORE_NAME, opened_broker
from sealane.daemon.config import BrokerConfig
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import VerificationError


async def test_orderly_stop_leaves_nothing_that_could_be_undone(tmp_path: Path) -> None:
    key = tmp_path / "kek"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    config = BrokerConfig(policy_file="/unused", key_file=str(key), allow_unsigned_policy=True)

    async def start(*, commit: bool) -> int:
        arguments = {"node": "b", "state": tmp_path, "metrics": Metrics(), "tcti": ""}
        async with opened_broker(config, **arguments) as opened:  # type: ignore[arg-type]
            before = _head(tmp_path)
            shutil.copy(tmp_path / STORE_NAME, tmp_path / "older")
            shutil.copy(tmp_path / f"{STORE_NAME}-wal", tmp_path / "older-wal")
            if commit:
                await opened.service.registry.tenant_key("t", 0)
        return _head(tmp_path) - before

    assert await start(commit=False) == 0
    assert await start(commit=True) == 1
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"older{suffix}", tmp_path / f"{STORE_NAME}{suffix}")
    with pytest.raises(VerificationError) as caught:
        await start(commit=False)
    assert caught.value.reason == "broker.store.rolled_back"


def _head(state: Path) -> int:
    return int((state / HEADS_NAME).read_text())
