"""Segments of the audit log: one chain over all files, whatever ends the broker during a cut."""

import asyncio
import datetime as dt
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import empty_pb2

from broker.audit_logs import KEY, SMALL, Keeper, files, filled, numbers, opened, records, verified
from patience import PATIENCE_SECONDS
from sealane.crypto.audit import Chain, ChainReader, Head, Record, verify_log
from sealane.daemon.broker.audit import AuditLog, Cutting
from sealane.daemon.broker.audit_segments import open_segments
from sealane.daemon.broker.policy_servicer import AuditLogServicer
from sealane.daemon.runtime.reserve import RESERVE_BYTES, Reserve
from sealane.errors import UnavailableError, VerificationError
from sealane.transport.tasks import TaskOwner

TESTS = Path(__file__).parents[1]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def reason_of(caught: pytest.ExceptionInfo[VerificationError]) -> str:
    return caught.value.reason


async def test_log_is_cut_and_its_chain_goes_on(tmp_path: Path) -> None:
    await filled(tmp_path, 20, SMALL)
    paths = files(tmp_path)
    assert len(paths) > 3
    assert numbers(tmp_path) == [*range(20)]
    for former, path in itertools.pairwise(paths):
        start = records(path)[0]
        assert path.name == f"audit-{start.sequence:020}.jsonl"
        assert start.kind == "audit.segment"
        assert start.detail["former"] == former.name
        assert former.stat().st_size >= SMALL.bytes_max
        assert former.stat().st_blocks * 512 < RESERVE_BYTES
        assert path.stat().st_mode & 0o777 == 0o600
    reader = verified(tmp_path)
    assert reader.head == await Keeper(tmp_path / "head").read()
    # The first record of a segment authenticates all before it.
    reader = verify_log(
        [line for path in paths[:-1] for line in path.read_bytes().splitlines()]
        + paths[-1].read_bytes().splitlines()[:1],
        signer=KEY.public_key(),
    )
    assert reader.signed_sequence == reader.head.sequence - 1


async def test_log_of_one_file_is_the_first_segment(tmp_path: Path) -> None:
    path = await filled(tmp_path, 10)
    before = path.read_bytes()
    await filled(tmp_path, 10, SMALL)
    first, second, *_ = files(tmp_path)
    assert first == path
    assert first.read_bytes().startswith(before)
    assert records(second)[0].detail["former"] == "audit.jsonl"
    verified(tmp_path)


async def test_segment_of_an_age_is_cut_at_an_inspection(tmp_path: Path) -> None:
    log = await opened(tmp_path, Cutting(age=dt.timedelta(0)))
    await log.inspect()
    assert len(files(tmp_path)) == 1
    await log.record("k", subject="s", outcome="done")
    await log.record("k", subject="s", outcome="done")
    await log.inspect()
    assert len(files(tmp_path)) == 2
    # The first record of a segment alone is nothing to cut.
    await log.inspect()
    assert len(files(tmp_path)) == 2
    await log.close()
    verified(tmp_path)


async def test_records_at_once_are_in_order_over_a_cut(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL)
    for _ in range(5):
        await asyncio.gather(
            *(log.record("k", subject="s", outcome="done", number=n) for n in range(20))
        )
    await log.close()
    assert numbers(tmp_path) == 5 * [*range(20)]
    assert len(files(tmp_path)) > 3
    verified(tmp_path)


async def impatient(directory: Path) -> AuditLog:
    """Return a log that is one record short of a cut."""
    log = await AuditLog.open(
        directory / "audit.jsonl",
        keeper=Keeper(directory / "head"),
        signing_key=KEY,
        cutting=Cutting(bytes_max=1),
    )
    log._may_cut = False
    await log.record("k", subject="s", outcome="done", number=0)
    log._may_cut = True
    return log


async def test_caller_that_is_cancelled_or_waits_is_none_of_a_cut(tmp_path: Path) -> None:
    log = await impatient(tmp_path)
    prepare, may_go_on = log._prepare_segment, threading.Event()

    def slow() -> bool:
        may_go_on.wait(PATIENCE_SECONDS)
        return prepare()

    log._prepare_segment = slow  # type: ignore[method-assign]
    calls = TaskOwner()
    call = calls.start(log.record("k", subject="s", outcome="done", number=1), name="call")
    # Acknowledged, though the cut that it started can't go on.
    async with asyncio.timeout(PATIENCE_SECONDS):
        await call
    assert len(files(tmp_path)) == 1
    call = calls.start(log.record("k", subject="s", outcome="done", number=2), name="call")
    await asyncio.sleep(0)
    call.cancel()
    may_go_on.set()
    await asyncio.wait([call])
    await log._cut_ended()
    assert len(files(tmp_path)) == 2
    await asyncio.gather(
        *(log.record("k", subject="s", outcome="done", number=n) for n in range(3, 30))
    )
    await log._cut_ended()
    await log.inspect()
    await log.close()
    assert numbers(tmp_path) == [*range(30)]
    verified(tmp_path)


async def test_cut_without_the_store_fails_no_acknowledged_record(tmp_path: Path) -> None:
    log = await impatient(tmp_path)
    keep, append = log._keeper.keep, log._append_segment
    is_silent = False

    async def silent(head: Head) -> None:
        if is_silent:
            raise UnavailableError("broker.store.timeout", "silent")
        await keep(head)

    def silenced() -> None:
        nonlocal is_silent
        append()
        is_silent = True

    log._keeper.keep = silent  # type: ignore[method-assign]
    log._append_segment = silenced  # type: ignore[method-assign]
    await log.record("k", subject="s", outcome="done", number=1)
    await log._cut_ended()
    assert is_silent
    log._append_segment = append  # type: ignore[method-assign]
    is_silent = False
    await log.record("k", subject="s", outcome="done", number=2)
    await log.inspect()
    await log.close()
    assert numbers(tmp_path) == [0, 1, 2]
    verified(tmp_path)


async def test_cut_that_leaves_the_file_unknown_ends_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await impatient(tmp_path)

    def refused(path: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        await log.record("k", subject="s", outcome="done", number=1)
        await log._cut_ended()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await log.troubled()
    with pytest.raises(UnavailableError) as caught:
        await log.inspect()
    assert caught.value.reason == "audit.unwritable"
    await log.close()


async def test_export_has_the_records_of_all_segments(tmp_path: Path) -> None:
    await filled(tmp_path, 20, SMALL)
    log = await opened(tmp_path, SMALL)
    parts = AuditLogServicer(log).ExportAudit(empty_pb2.Empty(), None)  # type: ignore[arg-type]
    exported = b"".join([part.lines async for part in parts])
    reader = verify_log(exported.splitlines(), signer=KEY.public_key())
    assert reader.head == log.head
    assert exported == b"".join(path.read_bytes() for path in files(tmp_path))
    await log.close()


def _delete(paths: list[Path]) -> None:
    paths[1].unlink()


def _delete_first(paths: list[Path]) -> None:
    paths[0].unlink()


def _delete_last(paths: list[Path]) -> None:
    paths[-1].unlink()


def _truncate(paths: list[Path]) -> None:
    content = paths[1].read_bytes().splitlines(keepends=True)
    paths[1].write_bytes(b"".join(content[:-1]))


def _tear(paths: list[Path]) -> None:
    os.truncate(paths[1], paths[1].stat().st_size - 1)


def _swap(paths: list[Path]) -> None:
    first, second = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(second)
    paths[2].write_bytes(first)


def _rename(paths: list[Path]) -> None:
    paths[1].rename(paths[1].with_name(f"audit-{7:020}.jsonl"))


def _change_end(paths: list[Path]) -> None:
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-12] + b"x" + content[-11:])


ATTACKS = {
    _delete: "audit.truncated",
    _delete_first: "audit.beginning.missing",
    _delete_last: "audit.truncated",
    _truncate: "audit.truncated",
    _tear: "audit.truncated",
    _swap: "audit.truncated",
    _rename: "audit.truncated",
    _change_end: "audit.truncated",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_segments_that_were_tampered_with_are_refused(
    tmp_path: Path, attack: Callable[[list[Path]], None]
) -> None:
    await filled(tmp_path, 20, SMALL)
    attack(files(tmp_path))
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path, SMALL)
    assert reason_of(caught) == ATTACKS[attack]


@pytest.mark.parametrize("attack", [_delete, _delete_first, _truncate, _tear, _swap])
async def test_running_broker_notices_what_is_done_to_its_segments(
    tmp_path: Path, attack: Callable[[list[Path]], None]
) -> None:
    log = await opened(tmp_path, SMALL)
    for number in range(20):
        await log.record("k", subject="s", outcome="done", number=number)
        await log.inspect()
    # Different lengths, so that swapped contents differ in size.
    paths = files(tmp_path)
    if attack is _swap:
        paths = [*paths[:2], paths[0]]
    attack(paths)
    with pytest.raises(VerificationError) as caught:
        await log.inspect()
    assert reason_of(caught) == "audit.truncated"
    await log.close()


async def test_beginning_of_a_segment_is_signed(tmp_path: Path) -> None:
    await filled(tmp_path, 8, SMALL)
    second = files(tmp_path)[1]
    line = second.read_bytes().splitlines()[0]
    # The last record of all: no later one has its hash.
    second.write_bytes(line.replace(b'"former":"audit', b'"former":"AUDIT') + b"\n")
    lines = [*files(tmp_path)[0].read_bytes().splitlines(), *second.read_bytes().splitlines()]
    with pytest.raises(VerificationError) as caught:
        verify_log(lines, signer=KEY.public_key())
    assert reason_of(caught) == "audit.checkpoint.signature"
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path, SMALL)
    assert reason_of(caught) == "audit.checkpoint.signature"


async def test_what_begins_no_segment_is_refused(tmp_path: Path) -> None:
    path = await filled(tmp_path, 2)
    line = path.read_bytes().splitlines()[0]
    for change in (
        line.replace(b"lease.grant", b"audit.segment"),
        line.replace(b"lease.grant", b"audit.segment").replace(
            b'"number":0', b'"former":"x","retired_digest":"","retired_sequence":1'
        ),
        line.replace(b"lease.grant", b"audit.segment").replace(
            b'"number":0', b'"former":"x","retired_digest":"x","retired_sequence":0'
        ),
    ):
        with pytest.raises(VerificationError) as caught:
            ChainReader(None).read(change)
        assert reason_of(caught) == "audit.record.malformed"
    path.with_name(f"audit-{2:020}.jsonl").write_bytes(line + b"\n")
    with pytest.raises(VerificationError) as caught:
        await opened(tmp_path)
    assert reason_of(caught) == "audit.record.malformed"


async def test_without_space_for_a_segment_the_log_goes_on_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(tmp_path, SMALL)
    extend, attempts = Reserve.extend, []

    def full(reserve: Reserve, size: int, *, wholly: bool = False) -> bool:
        if size == 0:
            attempts.append(size)
            return False
        return extend(reserve, size, wholly=wholly)

    with monkeypatch.context() as patch:
        patch.setattr(Reserve, "extend", full)
        for number in range(20):
            await log.record("k", subject="s", outcome="done", number=number)
        assert names(tmp_path) == ["audit.jsonl", "head"]
        # One attempt until the next inspection.
        assert len(attempts) == 1
        assert not log.is_low
    await log.inspect()
    for number in range(20, 22):
        await log.record("k", subject="s", outcome="done", number=number)
    await log.close()
    assert len(files(tmp_path)) == 2
    assert numbers(tmp_path) == [*range(22)]
    verified(tmp_path)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from broker.audit_logs import SMALL, opened

CALLS = ("open", "fdopen", "fdatasync", "fsync", "rename", "ftruncate", "fstat")
left = int(sys.argv[2])
is_cutting = False

def killing(name):
    call = getattr(os, name)
    def counted(*arguments, **options):
        global left
        if is_cutting:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return counted

for name in CALLS:
    setattr(os, name, killing(name))

async def main():
    global is_cutting
    log = await opened(Path(sys.argv[1]), SMALL)
    cut = log._cut
    async def counted():
        global is_cutting
        is_cutting = True
        await cut()
        is_cutting = False
    log._cut = counted
    number = 0
    while len(log._segments) < 2:
        print(number, flush=True)
        await log.record("k", subject="s", outcome="done", number=number)
        number += 1
    print("cut", flush=True)

asyncio.run(main())
"""


async def test_broker_killed_at_any_step_of_a_cut_goes_on_with_one_chain(tmp_path: Path) -> None:
    steps = 0
    seen = set()
    while True:
        directory = tmp_path / str(steps)
        directory.mkdir()
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", KILLED, directory, str(steps)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
        acknowledged = [*range(int(ended.stdout.split()[-1]) + 1)]
        kept = await Keeper(directory / "head").read()
        seen.add(len(files(directory)))
        await (await opened(directory, SMALL)).close()
        for former in files(directory)[:-1]:
            assert former.stat().st_blocks * 512 < RESERVE_BYTES
        assert numbers(directory) == acknowledged
        assert verified(directory).head.sequence >= kept.sequence
        assert "audit.jsonl.new" not in names(directory)
        await filled(directory, 5, SMALL)
        assert numbers(directory) == [*acknowledged, *range(5)]
        verified(directory)
        steps += 1
    assert steps >= 6
    assert seen == {1, 2}


async def test_torn_line_of_the_last_segment_is_removed(tmp_path: Path) -> None:
    await filled(tmp_path, 8, SMALL)
    last = files(tmp_path)[-1]
    whole = last.read_bytes()
    last.write_bytes(whole + whole[:100])
    await (await opened(tmp_path, SMALL)).close()
    found = [Record.decode(line) for line in last.read_bytes().splitlines()]
    assert [r.detail.get("torn_bytes") for r in found if r.kind == "audit.recovered"] == [100]
    verified(tmp_path)


async def test_records_behind_the_head_may_be_in_several_segments(tmp_path: Path) -> None:
    await filled(tmp_path, 3)
    kept = await Keeper(tmp_path / "head").read()
    await filled(tmp_path, 12, SMALL)
    await Keeper(tmp_path / "head").keep(kept)
    assert len(files(tmp_path)) > 2
    log = await opened(tmp_path)
    assert records(files(tmp_path)[-1])[-1].kind == "audit.recovered"
    await log.close()
    verified(tmp_path)


async def test_start_far_behind_the_head_holds_few_records(tmp_path: Path) -> None:
    await filled(tmp_path, 3)
    kept = await Keeper(tmp_path / "head").read()
    chain = Chain(verified(tmp_path).head)
    now = dt.datetime.now(dt.UTC)
    lines = (
        chain.append(
            "k", subject="s", outcome="done", reason="", detail={"text": ["x" * 500] * 12}, now=now
        )
        for _ in range(1000)
    )
    with files(tmp_path)[0].open("ab") as file:
        file.writelines(lines)
    assert files(tmp_path)[0].stat().st_size > 5 << 20
    tracemalloc.start()
    recovered = open_segments(tmp_path / "audit.jsonl", kept, signer=KEY.public_key())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    recovered.file.close()
    assert recovered.head == chain.head
    assert peak < 1 << 20
