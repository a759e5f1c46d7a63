"""Retention of the audit log: whole segments go, and a record of the log says which."""

import asyncio
import contextlib
import datetime as dt
from pathlib import Path

import pytest
from google.protobuf import empty_pb2

from broker.audit_logs import KEY, SMALL, Keeper, files, numbers, opened, records, verified
from sealane.crypto.audit import GENESIS, Head, verify_log
from sealane.daemon.broker import audit, audit_retention, policy_servicer
from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.audit_retention import Retention, beginning_after
from sealane.daemon.broker.audit_segments import Segment
from sealane.daemon.broker.policy_servicer import AuditLogServicer
from sealane.errors import UnavailableError, VerificationError

FEW = Retention(bytes_max=5000)
"""Some three segments."""
NOW = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)


async def fill(log: AuditLog, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await log.record("k", subject="s", outcome="done", number=number)


def segments(*, count: int = 5) -> list[Segment]:
    """Return segments of ten records and a hundred bytes, one a day, the first at NOW."""
    return [
        Segment(
            path=Path(f"{n}"),
            before=Head(sequence=10 * n, digest=bytes([n]) * 32) if n else GENESIS,
            started=NOW + n * DAY,
            identity=(0, n),
            size=100,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("retention", "forwarded", "through"),
    [
        (Retention(), None, 0),
        (Retention(age=3 * DAY), None, 20),
        (Retention(age=DAY / 100), None, 40),
        (Retention(age=9 * DAY), None, 0),
        (Retention(bytes_max=500), None, 0),
        (Retention(bytes_max=499), None, 10),
        (Retention(bytes_max=250), None, 30),
        (Retention(bytes_max=1), None, 40),
        (Retention(age=9 * DAY, bytes_max=250), None, 30),
        (Retention(bytes_max=1), 29, 20),
        (Retention(bytes_max=1), 30, 30),
        (Retention(bytes_max=1), 0, 0),
    ],
)
def test_whole_segments_are_retired(
    retention: Retention, forwarded: int | None, through: int
) -> None:
    now = NOW + 5 * DAY + dt.timedelta(hours=1)
    found = beginning_after(segments(), retention, now=now, forwarded=forwarded)
    assert found.sequence == through
    assert found in [segment.before for segment in segments()]


async def test_everything_is_kept_by_default(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL)
    await fill(log, 40)
    await log.close()
    assert numbers(tmp_path) == [*range(40)]
    assert verified(tmp_path).beginning == GENESIS


async def test_retired_log_verifies_and_goes_on(tmp_path: Path) -> None:
    for start in range(3):
        log = await opened(tmp_path, SMALL, FEW)
        await fill(log, 20, 20 * start)
        await log.close()
    assert len(files(tmp_path)) in {3, 4}
    found = numbers(tmp_path)
    assert found == [*range(60 - len(found), 60)]
    reader = verified(tmp_path)
    assert reader.beginning.sequence > 0
    assert reader.head == await Keeper(tmp_path / "head").read()


async def test_beginning_without_its_retirement_is_refused(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL, FEW)
    await fill(log, 40)
    await log.close()
    paths = files(tmp_path)
    lines = [line for path in paths for line in path.read_bytes().splitlines()]
    verify_log(lines, signer=KEY.public_key())
    second = [line for path in paths[1:] for line in path.read_bytes().splitlines()]
    for attacked in (lines[1:], second):
        with pytest.raises(VerificationError) as caught:
            verify_log(attacked, signer=None)
        assert caught.value.reason == "audit.beginning.missing"
    paths[0].unlink()
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path, SMALL, FEW)
    assert caught.value.reason == "audit.beginning.missing"


async def test_nothing_is_retired_that_was_not_forwarded(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL, FEW)
    log.forwarded = 0
    await fill(log, 40)
    assert numbers(tmp_path) == [*range(40)]
    log.forwarded = log.head.sequence
    await fill(log, 10, 40)
    await log.close()
    assert 0 not in numbers(tmp_path)
    verified(tmp_path)


async def test_export_that_runs_keeps_the_segments_it_reads(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL)
    await fill(log, 20)
    await log.close()
    log = await opened(tmp_path, SMALL, FEW)
    head = log.head
    parts = AuditLogServicer(log).ExportAudit(empty_pb2.Empty(), None)  # type: ignore[arg-type]
    exported = (await anext(parts)).lines
    await fill(log, 40, 20)
    await log.inspect()
    assert numbers(tmp_path) == [*range(60)]
    exported += b"".join([part.lines async for part in parts])
    assert verify_log(exported.splitlines(), signer=KEY.public_key()).head == head
    await log.inspect()
    assert 0 not in numbers(tmp_path)
    await log.close()
    verified(tmp_path)


async def test_retirement_that_was_interrupted_is_finished_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = audit.remove_segments

    def interrupted(retired: list[Segment]) -> None:
        remove(retired[:1])

    with monkeypatch.context() as patch:
        patch.setattr(audit, "remove_segments", interrupted)
        log = await opened(tmp_path, SMALL)
        await fill(log, 40)
        await log.close()
        log = await opened(tmp_path, SMALL, FEW)
        await fill(log, 10, 40)
        await log.close()
    before = files(tmp_path)
    assert before[0].name != "audit.jsonl"
    assert len(before) > 4
    await (await opened(tmp_path, SMALL)).close()
    assert len(files(tmp_path)) < len(before)
    verified(tmp_path)


class SilentKeeper(Keeper):
    """Doesn't answer while `is_silent`."""

    is_silent = False

    async def keep(self, head: Head) -> None:
        if self.is_silent:
            raise UnavailableError("broker.store.timeout", "silent")
        await super().keep(head)


async def test_segments_stay_until_the_store_knows_of_their_retirement(tmp_path: Path) -> None:
    await (await opened(tmp_path, SMALL)).close()
    keeper = SilentKeeper(tmp_path / "head")
    log = await AuditLog.open(
        tmp_path / "audit.jsonl", keeper=keeper, signing_key=KEY, cutting=SMALL, retention=FEW
    )
    recorded = 0
    while len(log._segments) < 3:
        await fill(log, 1, recorded)
        recorded += 1
    # The store answers for the last record before the cut that retires, and not for the cut.
    append = log._append_segment

    def silenced() -> None:
        append()
        keeper.is_silent = log._pending[-1].beginning != GENESIS

    log._append_segment = silenced  # type: ignore[method-assign]
    while not keeper.is_silent:
        with contextlib.suppress(UnavailableError):
            await fill(log, 1, recorded)
        recorded += 1
    await log.inspect()
    assert numbers(tmp_path) == [*range(recorded)]
    keeper.is_silent = False
    await fill(log, 1, recorded)
    await log.inspect()
    assert 0 not in numbers(tmp_path)
    await log.close()
    verified(tmp_path)


async def test_files_that_can_not_be_removed_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(tmp_path, SMALL, FEW)

    def refused(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        await fill(log, 40)
        await log.close()
    assert numbers(tmp_path) == [*range(40)]
    await (await opened(tmp_path, SMALL)).close()
    assert 0 not in numbers(tmp_path)
    verified(tmp_path)


async def retired_log(directory: Path) -> None:
    log = await opened(directory, SMALL, FEW)
    await fill(log, 40)
    await log.close()
    assert 0 not in numbers(directory)


@pytest.mark.parametrize("sequence", [0, 3])
async def test_restored_store_goes_on_with_a_log_that_was_retired(
    tmp_path: Path, sequence: int
) -> None:
    digest = bytes([sequence]) * 32
    await retired_log(tmp_path)
    before = verified(tmp_path)
    await Keeper(tmp_path / "head").keep(Head(sequence=sequence, digest=digest))
    log = await opened(tmp_path)
    recovered = records(files(tmp_path)[-1])[-1]
    assert recovered.kind == "audit.recovered"
    assert recovered.detail == {
        "stored_head_retired": True,
        "torn_bytes": 0,
        "unacknowledged_records": before.head.sequence - before.beginning.sequence,
    }
    await log.close()
    verified(tmp_path)


@pytest.mark.parametrize("segment", [0, 1, -1])
async def test_restored_store_refuses_a_retired_log_that_was_changed(
    tmp_path: Path, segment: int
) -> None:
    await retired_log(tmp_path)
    await Keeper(tmp_path / "head").keep(GENESIS)
    path = files(tmp_path)[segment]
    changed = path.read_bytes().replace(b'"subject":"s"', b'"subject":"x"', 1)
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path)
    assert caught.value.reason == "audit.chain.broken"


async def test_start_removes_nothing_before_the_store_knows(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL, FEW)
    await fill(log, 8)
    known = log.head
    log._remove_retired = lambda: None  # type: ignore[method-assign]
    await fill(log, 32, 8)
    await log.close()
    # As after a death behind the cut, and then nobody lets the store know.
    keeper = SilentKeeper(tmp_path / "head")
    await keeper.keep(known)
    keeper.is_silent = True
    before = files(tmp_path)
    with pytest.raises(UnavailableError):
        await AuditLog.open(tmp_path / "audit.jsonl", keeper=keeper, signing_key=KEY)
    assert files(tmp_path) == before
    await (await opened(tmp_path)).close()
    assert 0 not in numbers(tmp_path)
    verified(tmp_path)


@pytest.mark.parametrize("hours", [0, 9999, -2])
async def test_clock_that_was_set_retires_nothing_by_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    log = await opened(tmp_path, SMALL, Retention(age=dt.timedelta(0)))
    was_set = dt.timedelta(hours=hours)

    def shifted() -> dt.datetime:
        return dt.datetime.now(dt.UTC) + was_set

    monkeypatch.setattr(audit, "utc_now", shifted)
    monkeypatch.setattr(audit_retention, "utc_now", shifted)
    await fill(log, 40)
    assert (0 in numbers(tmp_path)) == (hours != 0)
    await log.close()
    verified(tmp_path)


async def test_export_that_takes_too_long_keeps_nothing_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(tmp_path, SMALL)
    await fill(log, 20)
    await log.close()
    log = await opened(tmp_path, SMALL, FEW)
    monkeypatch.setattr(policy_servicer, "EXPORT_SECONDS", 0.05)
    parts = AuditLogServicer(log).ExportAudit(empty_pb2.Empty(), None)  # type: ignore[arg-type]
    await anext(parts)
    await asyncio.sleep(0.1)
    with pytest.raises(UnavailableError) as late:
        await anext(parts)
    assert late.value.reason == "audit.export.late"
    await fill(log, 40, 20)
    await log.inspect()
    assert 0 not in numbers(tmp_path)
    await log.close()
