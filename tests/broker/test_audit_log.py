"""The audit file: durable before acknowledgement; repaired only where nothing was acknowledged."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from google.protobuf import empty_pb2

from broker.audit_logs import KEY, Keeper, filled, opened
from patience import PATIENCE_SECONDS
from sealane.crypto.audit import GENESIS, Head, Record, verify_log
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import audit_segments
from sealane.daemon.broker.audit import CHECKPOINT_RECORDS
from sealane.daemon.broker.audit_head import RegistryHead
from sealane.daemon.broker.policy_servicer import AuditLogServicer
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.runtime.reserve import RESERVE_BYTES, Reserve
from sealane.errors import UnavailableError, VerificationError


def records(path: Path) -> list[Record]:
    lines = path.read_bytes().splitlines()
    verify_log(lines, signer=KEY.public_key())
    return [Record.decode(line) for line in lines]


async def test_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    await filled(tmp_path)
    kinds = [r.kind for r in records(path)]
    assert kinds == 2 * (["lease.grant"] * 5 + ["audit.checkpoint"])
    assert path.stat().st_mode & 0o777 == 0o600


async def test_records_at_once_share_a_synchronization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def synchronize(descriptor: int) -> None:
        calls.append(descriptor)

    monkeypatch.setattr(os, "fdatasync", synchronize)
    log = await opened(tmp_path)
    await asyncio.gather(
        *(log.record("k", subject="s", outcome="done", number=n) for n in range(100))
    )
    await log.close()
    assert [r.detail.get("number") for r in records(log.path)][:100] == [*range(100)]
    assert len(calls) < 50


async def test_checkpoints_come_by_themselves(tmp_path: Path) -> None:
    path = await filled(tmp_path, CHECKPOINT_RECORDS + 3)
    kinds = [r.kind for r in records(path)]
    assert kinds.count("audit.checkpoint") == 2
    assert kinds[CHECKPOINT_RECORDS] == "audit.checkpoint"


@pytest.mark.parametrize("keep_bytes", [0, 1, -1, -2, -200])
async def test_log_cut_below_its_head_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    path = await filled(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:keep_bytes])
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path)
    assert caught.value.reason == "audit.truncated"


async def test_older_log_put_back_is_refused(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    older = path.read_bytes()
    await filled(tmp_path)
    path.write_bytes(older)
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path)
    assert caught.value.reason == "audit.truncated"


async def test_other_log_of_that_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    path, other = await filled(tmp_path / "a"), await filled(tmp_path / "b")
    path.write_bytes(other.read_bytes())
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path / "a")
    assert caught.value.reason == "audit.truncated"


async def test_torn_line_behind_the_head_is_removed_and_said(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:100])
    await (await opened(tmp_path)).close()
    recovered = records(path)[6]
    assert recovered.kind == "audit.recovered"
    assert recovered.detail == {"torn_bytes": 100, "unacknowledged_records": 0}


async def test_records_behind_the_head_stay_and_are_said(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    before = verify_log(path.read_bytes().splitlines()[:2], signer=None).head
    await Keeper(tmp_path / "head").keep(before)
    await (await opened(tmp_path)).close()
    recovered = records(path)[6]
    assert recovered.detail == {"torn_bytes": 0, "unacknowledged_records": 4}


async def test_long_tail_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await filled(tmp_path, 50)
    monkeypatch.setattr(audit_segments, "_BLOCK_BYTES", 100)
    await Keeper(tmp_path / "head").keep(Head(sequence=0, digest=bytes(32)))
    await (await opened(tmp_path)).close()
    assert records(path)[51].detail["unacknowledged_records"] == 51


async def test_log_that_cannot_be_written_refuses_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    for _ in range(2):
        with pytest.raises(UnavailableError) as caught:
            await log.record("k", subject="s", outcome="done")
        assert caught.value.reason == "audit.unwritable"
        # Even with space available again, the file's contents are unknown.
        monkeypatch.undo()
    await log.close()


def _no_space(*_: object, **__: object) -> bool:
    return False


async def test_refusals_never_use_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Reserve, "extend", _no_space)
        await log.record("k", subject="s", outcome="granted", number=1)
        await log.troubled()
        assert log.is_low
        for number in range(100):
            await log.record("call", subject="x", outcome="refused", number=number)
        await log.record("k", subject="operator", outcome="done", number=2)
        await log.inspect()
        assert log.is_low
    await log.inspect()
    assert not log.is_low
    await log.record("call", subject="x", outcome="refused", reason="r")
    await log.close()
    kinds = [r.kind for r in records(log.path)]
    assert kinds == ["k", "k", "audit.reserve", "call", "audit.checkpoint"]
    assert records(log.path)[2].detail == {"refusals_not_recorded": 100}


async def test_space_behind_the_log_is_set_aside(tmp_path: Path) -> None:
    log = await opened(tmp_path)
    await log.record("k", subject="s", outcome="done")
    found = log.path.stat()
    assert found.st_size < 1000
    assert found.st_blocks * 512 >= RESERVE_BYTES
    await log.close()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def _replace(path: Path) -> None:
    content = path.read_bytes()
    path.rename(path.with_suffix(".gone"))
    path.write_bytes(content)


def _change(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-12] + b"x" + content[-11:])


@pytest.mark.parametrize("attack", [_cut, _replace, _change])
async def test_running_broker_notices_what_is_done_to_its_log(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    log = await opened(tmp_path)
    for number in range(3):
        await log.record("k", subject="s", outcome="done", number=number)
        await log.inspect()
    attack(log.path)
    with pytest.raises(VerificationError) as caught:
        await log.inspect()
    assert caught.value.reason == "audit.truncated"
    await log.close()


async def test_export_of_a_log_that_was_cut_fails(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    log = await opened(tmp_path)
    os.truncate(path, len(path.read_bytes().splitlines(keepends=True)[0]))
    servicer = AuditLogServicer(log)
    parts = servicer.ExportAudit(empty_pb2.Empty(), None)  # type: ignore[arg-type]
    assert (await anext(parts)).lines
    with pytest.raises(VerificationError) as caught:
        await asyncio.wait_for(anext(parts), PATIENCE_SECONDS)
    assert caught.value.reason == "audit.truncated"
    await log.close()


async def test_head_is_kept_before_a_record_is_acknowledged(tmp_path: Path) -> None:
    log = await opened(tmp_path)
    await log.record("k", subject="s", outcome="done")
    assert (await Keeper(tmp_path / "head").read()).sequence == 1
    await log.close()


async def test_store_keeps_the_head_of_each_broker(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "broker.sqlite")
    registry = await Registry.open(store, WrappingKey(bytes(32)), node="b")
    first, second = RegistryHead(registry, instance=1), RegistryHead(registry, instance=2)
    assert await first.read() == GENESIS
    for sequence in (1, 2):
        await first.keep(Head(sequence=sequence, digest=bytes([sequence]) * 32))
    assert await first.read() == Head(sequence=2, digest=bytes([2]) * 32)
    assert await second.read() == GENESIS
    await registry.close()


async def test_an_operators_record_says_which_user_called(tmp_path: Path) -> None:
    log = await opened(tmp_path)
    with structlog.contextvars.bound_contextvars(uid=54_321):
        await log.record("node.revoked", subject="operator", outcome="done")
        await log.record("attest", subject="spiffe://a/node/b", outcome="granted")
    await log.record("node.restored", subject="operator", outcome="done")
    await log.close()
    found = {each.kind: each.detail.get("uid") for each in records(log.path)}
    assert found["node.revoked"] == 54_321
    assert found["attest"] is None
    assert found["node.restored"] is None
