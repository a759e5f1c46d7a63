"""Anchors: what is accepted after crashes, and what is refused after somebody helped."""

import contextlib
import hmac
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from sealane.daemon.anchors.anchor import Anchor, Anchored
from sealane.daemon.anchors.file_anchor import FileAnchor
from sealane.errors import UnavailableError, UsageError, VerificationError
from software_tpm import SoftwareTpm, software_tpm

DEVICE = UUID(int=7)
INDEX = 0x01805EA2
FIRST = Anchored(epoch=1, commit_number=0, root=b"r" * 16, head=b"h" * 16)


def later(state: Anchored, head: bytes = b"H" * 16) -> Anchored:
    return replace(state, commit_number=state.commit_number + 1, head=head)


class Crash(BaseException):
    """The power goes."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(tmp_path / "tpm") as tpm:
        yield tpm


class Host:
    """A machine with one record file, and a TPM if the anchor has one."""

    def __init__(self, path: Path, machine: SoftwareTpm | None) -> None:
        self.path = path
        self.machine = machine
        self._connections: list[Any] = []

    def initialise(self, state: Anchored = FIRST, **other: Any) -> Any:
        return self._make("initialise", state=state, **other)

    def open(self, **other: Any) -> Any:
        return self._make("open", **other)

    def _make(self, how: str, **arguments: Any) -> Any:
        options = {"device_id": DEVICE, **arguments}
        if self.machine is None:
            options.pop("index", None)
            return getattr(FileAnchor, how)(self.path, **options)
        from sealane.daemon.anchors.tpm_anchor import TpmAnchor
        from sealane.daemon.tpm import Tpm

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


def test_what_was_anchored_last_is_found_again(host: Host) -> None:
    anchor: Anchor = host.initialise()
    assert anchor.state == FIRST
    state = FIRST
    for n in range(5):
        state = replace(later(state), epoch=n + 1, root=bytes([n]) * 32)
        anchor.advance(state)
    assert anchor.state == state
    anchor.close()
    for _ in range(3):
        anchor = host.open()
        assert anchor.state == state
        anchor.close()


def test_older_state_is_not_anchored(host: Host) -> None:
    anchor = host.initialise(replace(FIRST, epoch=3, commit_number=3))
    for epoch, number in ((3, 2), (2, 9)):
        with pytest.raises(UsageError, match=r"anchor\.order"):
            anchor.advance(replace(FIRST, epoch=epoch, commit_number=number))
    anchor.advance(replace(FIRST, epoch=4, commit_number=0))
    anchor.close()


def test_device_that_was_never_initialised_is_refused(host: Host) -> None:
    with pytest.raises(VerificationError, match=r"anchor\.missing"):
        host.open()


def test_device_is_initialised_once(host: Host) -> None:
    host.initialise().close()
    with pytest.raises(UsageError, match=r"anchor\.exists"):
        host.initialise()
    assert host.open().state == FIRST


def test_removed_record_is_refused(host: Host) -> None:
    host.initialise().close()
    host.path.unlink()
    with pytest.raises(VerificationError, match=r"anchor\.missing"):
        host.open()


def test_record_of_another_device_is_refused(host: Host) -> None:
    host.initialise().close()
    with pytest.raises(VerificationError, match=r"anchor\.record"):
        host.open(device_id=UUID(int=8))


def test_truncated_or_changed_record_is_refused(host: Host) -> None:
    host.initialise().close()
    good = host.path.read_bytes()
    cases = [good[:-1], good + b"\0", b"", bytes(1000), good[:8]]
    cases += [bytes(b ^ (n == at) for n, b in enumerate(good)) for at in range(0, len(good), 11)]
    for case in cases:
        host.path.write_bytes(case)
        with pytest.raises(VerificationError, match=r"anchor\.record"):
            host.open()


def test_forged_file_is_no_record_of_any_other_shape(tmp_path: Path) -> None:
    """Whoever writes the file of a development anchor can compute its check, too."""
    path = tmp_path / "anchor"
    FileAnchor.initialise(path, device_id=DEVICE, state=FIRST).close()
    good = path.read_bytes()[:-32]
    for content in (b"", good[:-1], good + bytes(4), good[:-20]):
        path.write_bytes(content + hmac.digest(b"sealane file anchor", content, "sha256"))
        with pytest.raises(VerificationError, match=r"anchor\.record"):
            FileAnchor.open(path, device_id=DEVICE)


def test_anchor_has_one_owner(host: Host) -> None:
    anchor = host.initialise()
    with pytest.raises(UnavailableError, match=r"anchor\.in_use"):
        FileAnchor.open(host.path, device_id=DEVICE)
    anchor.close()


def test_anchor_that_failed_is_opened_again_before_use(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor = host.initialise()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sealane.daemon.anchors.anchor.write_durably", full)
        with pytest.raises(UnavailableError, match=r"anchor\.failed"):
            anchor.advance(later(FIRST))
    for use in (lambda: anchor.advance(later(FIRST)), lambda: anchor.state):
        with pytest.raises(UnavailableError, match=r"anchor\.failed"):
            use()
    anchor.close()
    assert host.open().state == FIRST


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"commit_number": 1 << 64},
        {"root": b""},
        {"head": bytes(65)},
    ],
)
def test_state_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"anchor\.range"):
        replace(FIRST, **change)


# tpm2


def crash_before_increment(anchor: Any, state: Anchored) -> None:
    """Advance, and lose power once the record is durable."""

    def crash() -> int:
        raise Crash

    anchor._counter.increment = crash
    with pytest.raises(Crash):
        anchor.advance(state)
    anchor.close()


def test_crash_between_record_and_increment_is_no_alarm(tpm_host: Host) -> None:
    anchor = tpm_host.initialise()
    told = later(FIRST)
    anchor.advance(told)
    before = tpm_host.path.read_bytes()
    crash_before_increment(anchor, later(told))
    # Either may be opened: nobody was told that the later one is anchored.
    after = tpm_host.path.read_bytes()
    for content, state in ((after, later(told)), (before, told)):
        with software_copy(tpm_host):
            tpm_host.path.write_bytes(content)
            anchor = tpm_host.open()
            assert anchor.state == state
            anchor.close()


@contextlib.contextmanager
def software_copy(host: Host) -> Iterator[None]:
    """Let what happens inside not have happened, also to the TPM."""
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
def test_older_record_is_refused(tpm_host: Host, depth: int) -> None:
    anchor, state, records = tpm_host.initialise(), FIRST, []
    for _ in range(6):
        records.append(tpm_host.path.read_bytes())
        state = later(state)
        anchor.advance(state)
    anchor.close()
    good = tpm_host.path.read_bytes()
    tpm_host.path.write_bytes(records[-depth])
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()
    tpm_host.path.write_bytes(good)
    assert tpm_host.open().state == state


def test_record_kept_from_before_opening_is_refused_after_advancing(tpm_host: Host) -> None:
    anchor = tpm_host.initialise()
    kept = tpm_host.path.read_bytes()
    anchor.close()
    anchor = tpm_host.open()
    anchor.advance(later(FIRST))
    anchor.close()
    tpm_host.path.write_bytes(kept)
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()


def test_record_that_was_never_told_can_not_fork_the_device(tpm_host: Host) -> None:
    """Keep the record of a lost increment; let the device go on from before it; bring it back."""
    anchor = tpm_host.initialise()
    before = tpm_host.path.read_bytes()
    crash_before_increment(anchor, later(FIRST, b"lost" * 4))
    kept = tpm_host.path.read_bytes()
    tpm_host.path.write_bytes(before)
    anchor = tpm_host.open()
    assert anchor.state == FIRST
    told = later(FIRST, b"told" * 4)
    anchor.advance(told)  # its commit number is that of the kept record
    anchor.close()
    good = tpm_host.path.read_bytes()
    tpm_host.path.write_bytes(kept)
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()
    tpm_host.path.write_bytes(good)
    assert tpm_host.open().state == told


def crash_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Let so many writes and increments happen, then lose power."""
    from sealane.daemon.anchors import anchor
    from sealane.daemon.anchors.tpm_counter import TpmCounter

    real_write, real_increment = anchor.write_durably, TpmCounter.increment
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

    patch.setattr(anchor, "write_durably", write)
    patch.setattr(TpmCounter, "increment", increment)


def test_crash_at_any_step_of_opening_is_no_alarm(tpm_host: Host) -> None:
    anchor = tpm_host.initialise()
    told = later(FIRST)
    anchor.advance(told)
    anchor.close()
    for survives in range(6):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
            crash_after(survives, patch)
            tpm_host.open().close()
            assert survives >= 2
    assert tpm_host.open().state == told


def test_other_tpm_is_refused(tpm_host: Host, tmp_path: Path) -> None:
    """Also one whose counter has the right value."""
    tpm_host.initialise().close()
    good = tpm_host.path.read_bytes()
    with software_tpm(tmp_path / "other") as other:
        other_host = Host(tmp_path / "other-anchor", other)
        other_host.initialise().close()
        other_host.path.write_bytes(good)
        with pytest.raises(VerificationError, match=r"anchor\.record"):
            other_host.open()
        other_host.close()


def test_cleared_tpm_is_refused(tpm_host: Host) -> None:
    from tpm2_pytss.constants import ESYS_TR

    tpm_host.initialise().close()
    tpm_host._connections[-1].call(lambda e: e.clear(ESYS_TR.LOCKOUT))
    with pytest.raises(VerificationError, match=r"anchor\.record"):
        tpm_host.open()


def test_deleted_counter_is_refused_and_made_anew_is_too_far(tpm_host: Host) -> None:
    anchor = tpm_host.initialise()
    anchor.advance(later(FIRST))
    anchor.close()
    tpm_host._connections[-1].call(lambda e: e.nv_undefine_space(e.tr_from_tpmpublic(INDEX)))
    with pytest.raises(VerificationError, match=r"counter\.missing"):
        tpm_host.open()
    from sealane.daemon.anchors.tpm_counter import TpmCounter

    TpmCounter(tpm_host._connections[-1], index=INDEX).increment()
    with pytest.raises(VerificationError, match=r"anchor\.rolled_back"):
        tpm_host.open()


def test_record_ahead_of_its_counter_is_refused(tpm_host: Host) -> None:
    """A TPM whose own state was rolled back, as a hypervisor can with a virtual one."""
    tpm_host.initialise().close()
    with software_copy(tpm_host):
        anchor = tpm_host.open()
        for _ in range(3):
            anchor.advance(later(anchor.state))
        anchor.close()
    record = tpm_host.path.read_bytes()
    for _ in range(2):
        with pytest.raises(VerificationError, match=r"anchor\.counter"):
            tpm_host.open()
    assert tpm_host.path.read_bytes() == record


def test_somebody_else_who_counts_is_noticed(tpm_host: Host) -> None:
    from sealane.daemon.anchors.tpm_counter import TpmCounter

    anchor = tpm_host.initialise()
    TpmCounter(tpm_host._connections[-1], index=INDEX).increment()
    with pytest.raises(VerificationError, match=r"anchor\.counter"):
        anchor.advance(later(FIRST))
    with pytest.raises(UnavailableError, match=r"anchor\.failed"):
        anchor.advance(later(FIRST))
    anchor.close()


def test_anchor_survives_a_power_cut_of_the_machine(tpm_host: Host) -> None:
    anchor = tpm_host.initialise()
    anchor.advance(later(FIRST))
    anchor.close()
    tpm_host.close()
    assert tpm_host.machine is not None
    tpm_host.machine.restart()
    assert tpm_host.open().state == later(FIRST)
