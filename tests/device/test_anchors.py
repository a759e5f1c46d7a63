"""Anchors: states accepted after crashes, and manipulated states refused."""

import asyncio
import contextlib
import errno
import hmac
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from patience import PATIENCE_SECONDS
from sealane.crypto.encoding import fields
from sealane.daemon.device.anchors.anchor import (
    CATALOGUE,
    CHANGES_MAX,
    NUMBER_STEP_MAX,
    Anchor,
    Anchored,
    Change,
    volume_record,
)
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.daemon.device.anchors.file_anchor import FileAnchor
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from small_disk import fill, small_disk
from software_tpm import SoftwareTpm, software_tpm

DEVICE = UUID(int=7)
INDEX = 0x01805EA2
NAME = volume_record(UUID(int=1))
FIRST = Anchored(number=1, blob=b"r" * 16)


def later(anchor: Anchor, blob: bytes = b"H" * 16) -> Change:
    """Return the next state of the record."""
    number = anchor.records[NAME].number
    return Change(name=NAME, expected=number, record=Anchored(number=number + 1, blob=blob))


def state(anchor: Anchor) -> Anchored:
    return anchor.records[NAME]


class Crash(BaseException):
    """A power failure."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(tmp_path / "tpm") as tpm:
        yield tpm


class Host:
    """A machine with a record file, and a TPM if the anchor uses one."""

    def __init__(self, path: Path, machine: SoftwareTpm | None) -> None:
        self.path = path
        self.machine = machine
        self._connections: list[Any] = []

    async def initialise(self, **other: Any) -> Any:
        """Create an anchor with one record."""
        anchor = self._make("initialise", **other)
        await anchor.advance([Change(name=NAME, expected=0, record=FIRST)])
        return anchor

    def open(self, **other: Any) -> Any:
        return self._make("open", **other)

    def _make(self, how: str, **arguments: Any) -> Any:
        options = {"device_id": DEVICE, **arguments}
        if self.machine is None:
            options.pop("index", None)
            return getattr(FileAnchor, how)(self.path, **options)
        from sealane.daemon.device.anchors.tpm_anchor import TpmAnchor
        from sealane.daemon.node.tpm import Tpm

        self.close()
        self._connections.append(Tpm(self.machine.tcti))
        return getattr(TpmAnchor, how)(
            self._connections[-1], self.path, **{"index": INDEX, **options}
        )

    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()


@pytest.fixture(params=["file", "tpm2"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    tpm = request.getfixturevalue("machine") if request.param == "tpm2" else None
    host = Host(tmp_path / "anchor", tpm)
    yield host
    host.close()


@pytest.fixture
def tpm_host(machine: SoftwareTpm, tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "anchor", machine)
    yield host
    host.close()


# All kinds


async def test_what_was_anchored_last_is_found_again(host: Host) -> None:
    anchor: Anchor = await host.initialise()
    assert anchor.records == {NAME: FIRST}
    for n in range(3):
        await anchor.advance([later(anchor, bytes([n]) * 128)])
    catalogue = Anchored(number=7, blob=b"c")
    both = [later(anchor), Change(name=CATALOGUE, expected=0, record=catalogue)]
    await anchor.advance(both)
    expected = {NAME: Anchored(number=5, blob=b"H" * 16), CATALOGUE: catalogue}
    assert anchor.records == expected
    await anchor.close()
    for _ in range(3):
        anchor = host.open()
        assert anchor.records == expected
        await anchor.close()


async def test_record_that_went_is_gone_and_its_number_stays_taken(host: Host) -> None:
    anchor = await host.initialise()
    await anchor.advance([Change(name=NAME, expected=1, record=Anchored(number=9, blob=b"9"))])
    await anchor.advance([Change(name=NAME, expected=9, record=None)])
    await anchor.close()
    anchor = host.open()
    assert (anchor.records, anchor.floor) == ({}, 9)
    # Under any name, nothing with such an old number is anchored again.
    for name in (NAME, volume_record(UUID(int=2)), CATALOGUE):
        for number in (1, 9):
            again = Change(name=name, expected=0, record=Anchored(number=number, blob=b"old"))
            with pytest.raises(UsageError, match=r"anchor\.order"):
                await anchor.advance([again])
    newer = Anchored(number=10, blob=b"new")
    await anchor.advance([Change(name=NAME, expected=0, record=newer)])
    await anchor.close()
    anchor = host.open()
    assert (anchor.records, anchor.floor) == ({NAME: newer}, 9)


async def test_numbers_cannot_be_used_up(host: Host) -> None:
    anchor = await host.initialise()
    for name, expected in ((NAME, 1), (CATALOGUE, 0)):
        far = Anchored(number=expected + NUMBER_STEP_MAX + 1, blob=b"far")
        with pytest.raises(UsageError, match=r"anchor\.range"):
            await anchor.advance([Change(name=name, expected=expected, record=far)])
    far = Anchored(number=1 + NUMBER_STEP_MAX, blob=b"far")
    await anchor.advance([Change(name=NAME, expected=1, record=far)])


async def test_change_of_another_state_is_refused_and_its_repetition_harmless(host: Host) -> None:
    anchor = await host.initialise()
    change = later(anchor)
    for _ in range(2):
        await anchor.advance([change])
    other = Change(name=NAME, expected=1, record=Anchored(number=2, blob=b"other"))
    beside = Change(name=CATALOGUE, expected=0, record=FIRST)
    with pytest.raises(UsageError, match=r"anchor\.order"):
        await anchor.advance([beside, other])
    # All or none.
    assert anchor.records == {NAME: change.record}
    await anchor.close()


async def test_too_many_changes_at_once_are_refused(host: Host) -> None:
    anchor = await host.initialise()
    names = [volume_record(UUID(int=n)) for n in range(2, CHANGES_MAX + 3)]
    changes = [Change(name=name, expected=0, record=FIRST) for name in names]
    for refused in (changes, [], [later(anchor), later(anchor)]):
        with pytest.raises(UsageError, match=r"anchor\.range"):
            await anchor.advance(refused)
    await anchor.advance(changes[:-1])
    await anchor.close()


def test_device_that_was_never_initialised_is_refused(host: Host) -> None:
    with pytest.raises(VerificationError, match=r"anchor\.missing"):
        host.open()


async def test_device_is_initialised_once(host: Host) -> None:
    await (await host.initialise()).close()
    with pytest.raises(UsageError, match=r"anchor\.exists"):
        await host.initialise()
    assert state(host.open()) == FIRST


async def test_removed_record_is_refused(host: Host) -> None:
    await (await host.initialise()).close()
    host.path.unlink()
    with pytest.raises(VerificationError, match=r"anchor\.missing"):
        host.open()


async def test_record_of_another_device_is_refused(host: Host) -> None:
    await (await host.initialise()).close()
    with pytest.raises(VerificationError, match=r"anchor\.record"):
        host.open(device_id=UUID(int=8))


@pytest.mark.parametrize("number", [2, 4, 10])
async def test_record_of_another_format_is_refused_by_number(tmp_path: Path, number: int) -> None:
    path = tmp_path / "anchor"
    await FileAnchor.initialise(path, device_id=DEVICE).close()
    content = fields(f"sealane anchor v{number}", DEVICE.bytes)
    path.write_bytes(content + hmac.digest(b"sealane file anchor", content, "sha256"))
    with pytest.raises(UsageError, match=rf"format {number}, and this release reads 3") as caught:
        FileAnchor.open(path, device_id=DEVICE)
    assert caught.value.reason == "anchor.format"


async def test_truncated_or_changed_record_is_refused(host: Host) -> None:
    await (await host.initialise()).close()
    good = host.path.read_bytes()
    cases = [good[:-1], good + b"\0", b"", bytes(1000), good[:8]]
    cases += [bytes(b ^ (n == at) for n, b in enumerate(good)) for at in range(0, len(good), 11)]
    for case in cases:
        host.path.write_bytes(case)
        with pytest.raises(VerificationError, match=r"anchor\.record"):
            host.open()


async def test_forged_file_is_no_record_of_any_other_shape(tmp_path: Path) -> None:
    """An adversary who can write a development anchor's file can compute its check, too."""
    path = tmp_path / "anchor"
    await FileAnchor.initialise(path, device_id=DEVICE).close()
    good = path.read_bytes()[:-32]
    cases = [b"", good[:-1], good + bytes(4), good[:-20]]
    begin = ("sealane anchor v3", DEVICE.bytes)
    number = bytes(7) + b"\1"
    records = (
        bytes(9),
        b"\x09catalogue" + bytes(7),
        b"\x09catalogue" + number,
        b"\x09catalogue" + number + b"\x20m",
        b"\x09catalogue" + number + b"\x01mb",
        b"\x01\xff" + number + b"\x00b",
    )
    cases += [fields(*begin, bytes(8), bytes(8), record) for record in records]
    cases += [fields(*begin, bytes(7), bytes(8)), fields(*begin, bytes(8), bytes(7))]
    cases.append(fields(*begin, bytes(8)))
    for content in cases:
        path.write_bytes(content + hmac.digest(b"sealane file anchor", content, "sha256"))
        with pytest.raises(VerificationError, match=r"anchor\.record"):
            FileAnchor.open(path, device_id=DEVICE)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_anchor_without_space_is_not_lost_and_goes_on_when_there_is_some(
    host: Host, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        host.path = disk / "anchor"
        anchor = await host.initialise()
        fill(disk / "others")
        with pytest.raises(UnavailableError) as caught:
            await anchor.advance([later(anchor)])
        assert caught.value.reason == "anchor.space"
        assert anchor.records == {NAME: FIRST}
        lost: list[Error] = []
        anchors = DeviceAnchors(anchor, timeout_seconds=PATIENCE_SECONDS, lost=lost.append)
        waiting = asyncio.ensure_future(anchors.advance(NAME, 5, b"new"))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        (disk / "others").unlink()
        await waiting
        await anchors.close()
        assert not lost
        assert host.open().records == {NAME: Anchored(number=5, blob=b"new")}
        host.close()


async def test_anchor_has_one_owner(host: Host) -> None:
    anchor = await host.initialise()
    with pytest.raises(UnavailableError, match=r"anchor\.in_use"):
        FileAnchor.open(host.path, device_id=DEVICE)
    await anchor.close()


async def test_anchor_that_failed_is_opened_again_before_use(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor = await host.initialise()
    change = later(anchor)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("sealane.daemon.device.anchors.record_file.write_durably", fail)
        with pytest.raises(UnavailableError, match=r"anchor\.failed"):
            await anchor.advance([change])
    with pytest.raises(UnavailableError, match=r"anchor\.failed"):
        await anchor.advance([change])
    with pytest.raises(UnavailableError, match=r"anchor\.failed"):
        state(anchor)
    await anchor.close()
    assert state(host.open()) == FIRST


@pytest.mark.parametrize(
    ("number", "blob"), [(0, b"b"), (1 << 64, b"b"), (1, b""), (1, bytes(129))]
)
def test_record_that_does_not_fit_is_refused(number: int, blob: bytes) -> None:
    with pytest.raises(UsageError, match=r"anchor\.range"):
        Anchored(number=number, blob=blob)


@pytest.mark.parametrize("name", ["", "volume/", "volume/" + "0" * 36, "catalogue/x", "Catalogue"])
def test_record_of_no_kind_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"anchor\.range"):
        Change(name=name, expected=0, record=FIRST)


@pytest.mark.parametrize("expected", [-1, 1, 2])
def test_number_that_does_not_grow_is_refused(expected: int) -> None:
    with pytest.raises(UsageError, match=r"anchor\.order"):
        Change(name=NAME, expected=expected, record=FIRST)


# tpm2


async def crash_before_increment(anchor: Any, change: Change) -> None:
    """Advance, and lose power once the record is durable."""

    def crash() -> int:
        raise Crash

    anchor._counter.increment = crash
    with pytest.raises(Crash):
        await anchor.advance([change])
    await anchor.close()


async def test_crash_between_record_and_increment_is_no_alarm(tpm_host: Host) -> None:
    anchor = await tpm_host.initialise()
    told = later(anchor)
    await anchor.advance([told])
    before, untold = tpm_host.path.read_bytes(), later(anchor)
    await crash_before_increment(anchor, untold)
    # Either may be opened, because the later one was never reported as anchored.
    after = tpm_host.path.read_bytes()
    for content, expected in ((after, untold), (before, told)):
        with software_copy(tpm_host):
            tpm_host.path.write_bytes(content)
            anchor = tpm_host.open()
            assert state(anchor) == expected.record
            await anchor.close()


@contextlib.contextmanager
def software_copy(host: Host) -> Iterator[None]:
    """Undo everything in the block, including changes of the TPM."""
    machine = host.machine
    assert machine is not None
    host.close()
    machine.stop()
    saved = {p: p.read_bytes() for p in machine.directory.iterdir() if p.is_file()}
    machine.start()
    yield
    host.close()
    machine.stop()
    for path, content in saved.items():
        path.write_bytes(content)
    machine.start()


@pytest.mark.parametrize("depth", [1, 2, 5])
async def test_older_record_is_refused(tpm_host: Host, depth: int) -> None:
    anchor, records = await tpm_host.initialise(), []
    for _ in range(6):
        records.append(tpm_host.path.read_bytes())
        await anchor.advance([later(anchor)])
    newest = state(anchor)
    await anchor.close()
    good = tpm_host.path.read_bytes()
    tpm_host.path.write_bytes(records[-depth])
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()
    tpm_host.path.write_bytes(good)
    assert state(tpm_host.open()) == newest


async def test_record_kept_from_before_opening_is_refused_after_advancing(tpm_host: Host) -> None:
    anchor = await tpm_host.initialise()
    kept = tpm_host.path.read_bytes()
    await anchor.close()
    anchor = tpm_host.open()
    await anchor.advance([later(anchor)])
    await anchor.close()
    tpm_host.path.write_bytes(kept)
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()


async def test_record_that_was_never_told_can_not_fork_the_device(tpm_host: Host) -> None:
    """Keep the record of a lost increment; let the device go on without it; then restore it."""
    anchor = await tpm_host.initialise()
    before = tpm_host.path.read_bytes()
    await crash_before_increment(anchor, later(anchor, b"lost" * 4))
    kept = tpm_host.path.read_bytes()
    tpm_host.path.write_bytes(before)
    anchor = tpm_host.open()
    assert state(anchor) == FIRST
    told = later(anchor, b"told" * 4)
    await anchor.advance([told])  # same number as the kept record
    await anchor.close()
    good = tpm_host.path.read_bytes()
    tpm_host.path.write_bytes(kept)
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()
    tpm_host.path.write_bytes(good)
    assert state(tpm_host.open()) == told.record


def crash_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Lose power after so many writes and increments."""
    from sealane.daemon.device.anchors import record_file
    from sealane.daemon.device.anchors.tpm_counter import TpmCounter

    real_write, real_increment = record_file.write_durably, TpmCounter.increment
    left = [steps]

    def step() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Crash

    def write(path: Path, content: bytes) -> None:
        step()
        real_write(path, content)

    def increment(counter: Any) -> int:
        step()
        return real_increment(counter)

    patch.setattr(record_file, "write_durably", write)
    patch.setattr(TpmCounter, "increment", increment)


async def test_crash_at_any_step_of_opening_is_no_alarm(tpm_host: Host) -> None:
    anchor = await tpm_host.initialise()
    told = later(anchor)
    await anchor.advance([told])
    await anchor.close()
    for survives in range(6):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
            crash_after(survives, patch)
            tpm_host.open().release()
            assert survives >= 2
    assert state(tpm_host.open()) == told.record


async def test_other_tpm_is_refused(tpm_host: Host, tmp_path: Path) -> None:
    """Even one whose counter has the right value."""
    await (await tpm_host.initialise()).close()
    good = tpm_host.path.read_bytes()
    with software_tpm(tmp_path / "other") as other:
        other_host = Host(tmp_path / "other-anchor", other)
        await (await other_host.initialise()).close()
        other_host.path.write_bytes(good)
        with pytest.raises(VerificationError, match=r"anchor\.record"):
            other_host.open()
        other_host.close()


async def test_cleared_tpm_is_refused(tpm_host: Host) -> None:
    from tpm2_pytss.constants import ESYS_TR

    await (await tpm_host.initialise()).close()
    tpm_host._connections[-1].call(lambda e: e.clear(ESYS_TR.LOCKOUT))
    with pytest.raises(VerificationError, match=r"anchor\.record"):
        tpm_host.open()


async def test_deleted_counter_is_refused_and_made_anew_is_too_far(tpm_host: Host) -> None:
    anchor = await tpm_host.initialise()
    await anchor.advance([later(anchor)])
    await anchor.close()
    tpm_host._connections[-1].call(lambda e: e.nv_undefine_space(e.tr_from_tpmpublic(INDEX)))
    with pytest.raises(VerificationError, match=r"counter\.missing"):
        tpm_host.open()
    from sealane.daemon.device.anchors.tpm_counter import TpmCounter

    TpmCounter(tpm_host._connections[-1], index=INDEX).increment()
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()


async def test_record_ahead_of_its_counter_is_refused(tpm_host: Host) -> None:
    """The TPM's state was rolled back, which a hypervisor can do with a virtual TPM."""
    await (await tpm_host.initialise()).close()
    with software_copy(tpm_host):
        anchor = tpm_host.open()
        for _ in range(3):
            await anchor.advance([later(anchor)])
        await anchor.close()
    record = tpm_host.path.read_bytes()
    for _ in range(2):
        with pytest.raises(VerificationError, match=r"anchor\.counter"):
            tpm_host.open()
    assert tpm_host.path.read_bytes() == record


async def test_somebody_else_who_counts_is_noticed(tpm_host: Host) -> None:
    from sealane.daemon.device.anchors.tpm_counter import TpmCounter

    anchor = await tpm_host.initialise()
    TpmCounter(tpm_host._connections[-1], index=INDEX).increment()
    with pytest.raises(VerificationError, match=r"anchor\.counter"):
        await anchor.advance([later(anchor)])
    with pytest.raises(UnavailableError, match=r"anchor\.failed"):
        await anchor.advance([later(anchor)])
    await anchor.close()


async def test_anchor_survives_a_power_cut_of_the_machine(tpm_host: Host) -> None:
    anchor = await tpm_host.initialise()
    await anchor.advance([later(anchor)])
    await anchor.close()
    tpm_host.close()
    assert tpm_host.machine is not None
    tpm_host.machine.restart()
    assert state(tpm_host.open()).number == 2
