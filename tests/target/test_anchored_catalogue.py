"""An anchored list of volumes: crashes raise no alarm, rolled-back directories do."""

import contextlib
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from device.memory_anchor import MemoryAnchor
from sealane.daemon.device import directory as device_module
from sealane.daemon.device.anchored_catalogue import AnchoredCatalogue
from sealane.daemon.device.anchors.anchor import CATALOGUE, FAILED, Change, volume_record
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.daemon.device.catalogue import STORE_SUFFIX, Catalogue
from sealane.daemon.device.directory import DEVICE_NAME, DeviceFile
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from target.store_device import open_device

A, B = uuid.UUID(int=1), uuid.UUID(int=2)


class Crash(BaseException):
    """A power failure."""


class Steps:
    """Counts durable steps: file changes, and the two ends of anchoring."""

    def __init__(self, survives: int) -> None:
        self.left = survives

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash


class CrashingAnchor(MemoryAnchor):
    """An anchor that loses power before or after a request, and then never answers."""

    steps = Steps(1 << 30)

    async def advance(self, changes: Sequence[Change]) -> None:
        try:
            self.steps.take()
            await super().advance(changes)
            self.steps.take()
        except Crash as error:
            raise UnavailableError(FAILED, "no power") from error


class Machine:
    """A directory and its anchor, opened by successive processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.anchor = CrashingAnchor()
        self.has_volumes: set[uuid.UUID] = set()

    def store(self, volume_id: uuid.UUID) -> Path:
        return self.directory / f"{volume_id}{STORE_SUFFIX}"

    async def open(self, *, is_believed: bool = False) -> AnchoredCatalogue:
        """Open as at a start, and discard files that aren't listed."""
        self.directory.mkdir(exist_ok=True)
        file = DeviceFile(self.directory)
        try:
            catalogue = AnchoredCatalogue(Catalogue(self.directory), file=file)
            await catalogue.adopt(DeviceAnchors(self.anchor), is_believed=is_believed)
            for volume_id in (await catalogue.scan()).unfinished:
                await self.discard(catalogue, volume_id)
        finally:
            file.release()
        self.has_volumes = {volume_id for volume_id, _ in (await catalogue.scan()).volumes}
        return catalogue

    async def create(self, catalogue: AnchoredCatalogue, volume_id: uuid.UUID) -> None:
        await catalogue.begin(volume_id, volume_id.bytes)
        self.store(volume_id).touch()
        await catalogue.finish(volume_id)

    async def remove(self, catalogue: AnchoredCatalogue, volume_id: uuid.UUID) -> None:
        await catalogue.begin_removal(volume_id)
        for settled in await catalogue.settle():
            await self.discard(catalogue, settled)

    async def discard(self, catalogue: AnchoredCatalogue, volume_id: uuid.UUID) -> None:
        self.store(volume_id).unlink(missing_ok=True)
        await catalogue.forget(volume_id)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "stores")


def crashing(patch: pytest.MonkeyPatch, steps: Steps) -> None:
    """Count every file change as a step."""
    for name in ("begin", "begin_replacement", "_rename", "forget", "drop_replacement"):
        real = getattr(Catalogue, name)

        def stepped(self: Catalogue, *arguments: object, _real: object = real) -> None:
            steps.take()
            _real(self, *arguments)  # type: ignore[operator]

        patch.setattr(Catalogue, name, stepped)
    write = device_module.write_durably

    def written(path: Path, content: bytes) -> None:
        steps.take()
        write(path, content)

    patch.setattr(device_module, "write_durably", written)


async def _work(machine: Machine, told: list[set[uuid.UUID]]) -> None:
    """Open, create A and B, remove A; `told` records what the tenant was told last."""
    catalogue = await machine.open(is_believed=machine.anchor.records == {})
    told.append(set(machine.has_volumes))
    for volume_id in (A, B):
        await machine.create(catalogue, volume_id)
        told.append({*told[-1], volume_id})
    await machine.remove(catalogue, A)
    told.append(told[-1] - {A})


async def test_crash_at_any_step_is_no_alarm_and_loses_nothing_that_was_told(
    tmp_path: Path,
) -> None:
    survives, was_cut = 0, True
    while was_cut:
        machine = Machine(tmp_path / str(survives))
        await machine.open(is_believed=True)
        steps, told, was_cut = Steps(survives), [], False
        with pytest.MonkeyPatch.context() as patch:
            crashing(patch, steps)
            patch.setattr(machine.anchor, "steps", steps)
            try:
                await _work(machine, told)
            except (Crash, UnavailableError):
                was_cut = True
        # Then crash again during recovery, at each of its steps.
        for again in range(8):
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
                crashing(patch, again_steps := Steps(again))
                patch.setattr(machine.anchor, "steps", again_steps)
                with contextlib.suppress(UnavailableError):
                    await machine.open()
        await machine.open()
        before = told[-1] if told else set()
        # The operation in progress at the power failure may have happened or not.
        after = [before, before | {A}] if before == set() else [before, before ^ {B}, before - {A}]
        assert machine.has_volumes in after, survives
        survives += 1
    assert survives > 15


async def _replace(machine: Machine, told: list[bytes]) -> None:
    """Open, and replace A's descriptor twice; `told` records what the tenant was told last."""
    catalogue = await machine.open()
    for content in (b"next", b"last"):
        await catalogue.replace(A, content)
        told.append(content)


async def test_crash_while_a_descriptor_is_replaced_leaves_the_old_one_or_the_new_one(
    tmp_path: Path,
) -> None:
    survives, was_cut = 0, True
    while was_cut:
        machine = Machine(tmp_path / str(survives))
        await machine.create(await machine.open(is_believed=True), A)
        steps, told, was_cut = Steps(survives), [A.bytes], False
        with pytest.MonkeyPatch.context() as patch:
            crashing(patch, steps)
            patch.setattr(machine.anchor, "steps", steps)
            try:
                await _replace(machine, told)
            except (Crash, UnavailableError):
                was_cut = True
        for again in range(6):
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
                crashing(patch, again_steps := Steps(again))
                patch.setattr(machine.anchor, "steps", again_steps)
                with contextlib.suppress(UnavailableError):
                    await machine.open()
        found = await (await machine.open()).scan()
        after = {A.bytes: b"next", b"next": b"last"}.get(told[-1], told[-1])
        assert found.volumes in ([(A, told[-1])], [(A, after)]), survives
        assert (found.replacements, found.strays) == ([], [])
        survives += 1
    assert survives > 8


async def test_a_descriptor_that_was_replaced_does_not_come_back(machine: Machine) -> None:
    catalogue = await machine.open(is_believed=True)
    await machine.create(catalogue, A)
    await catalogue.replace(A, b"next")
    path = machine.directory / f"{A}.volume"
    path.write_bytes(A.bytes)
    with pytest.raises(VerificationError, match=r"device\.anchor\.mismatch"):
        await machine.open()
    path.with_suffix(".volume.next").write_bytes(b"forged")
    with pytest.raises(VerificationError, match=r"device\.anchor\.mismatch"):
        await machine.open()


async def test_every_older_state_of_the_directory_is_refused(
    machine: Machine, tmp_path: Path
) -> None:
    kept: list[Path] = []

    def keep() -> None:
        kept.append(tmp_path / f"kept-{len(kept)}")
        shutil.copytree(machine.directory, kept[-1])

    catalogue = await machine.open(is_believed=True)
    keep()
    await machine.create(catalogue, A)
    keep()
    await machine.create(catalogue, B)
    keep()
    await machine.remove(catalogue, A)
    keep()
    # The same list, from before the last start.
    await machine.open()
    newest = tmp_path / "newest"
    shutil.copytree(machine.directory, newest)
    for copy in kept:
        shutil.rmtree(machine.directory)
        shutil.copytree(copy, machine.directory)
        with pytest.raises(VerificationError, match=r"device\.anchor\.mismatch"):
            await machine.open()
    shutil.rmtree(machine.directory)
    shutil.copytree(newest, machine.directory)
    await machine.open()
    assert machine.has_volumes == {B}


@pytest.mark.parametrize("how", ["changed", "removed", "renamed", "added", "storeless"])
async def test_list_that_was_changed_by_hand_is_refused(machine: Machine, how: str) -> None:
    catalogue = await machine.open(is_believed=True)
    await machine.create(catalogue, A)
    await machine.create(catalogue, B)
    path = machine.directory / f"{A}.volume"
    if how == "changed":
        path.write_bytes(b"other")
    elif how == "removed":
        path.unlink()
    elif how == "renamed":
        # Both look as if being removed; a crash explains one.
        for volume_id in (A, B):
            path = machine.directory / f"{volume_id}.volume"
            path.rename(path.with_suffix(".volume.unfinished"))
    elif how == "added":
        path.with_name(f"{uuid.UUID(int=3)}.volume").write_bytes(b"third")
        machine.store(uuid.UUID(int=3)).touch()
    else:
        machine.store(A).unlink()
    with pytest.raises(VerificationError, match=r"device\.anchor\.mismatch"):
        await machine.open()


async def test_device_without_its_anchor_record_is_refused(machine: Machine) -> None:
    await machine.open(is_believed=True)
    machine.anchor.records = {}
    with pytest.raises(VerificationError, match=r"device\.anchor\.mismatch"):
        await machine.open()


async def test_list_of_another_device_is_refused(machine: Machine) -> None:
    await machine.open(is_believed=True)
    path = machine.directory / DEVICE_NAME
    path.write_bytes(path.read_bytes().replace(b'"device_id":"', b'"device_id":"0', 1)[:-1] + b"}")
    with pytest.raises(VerificationError, match=r"device\.malformed"):
        await machine.open()
    path.unlink()
    with pytest.raises(VerificationError, match=r"device\.anchor\.mismatch"):
        await machine.open()


def test_device_of_a_later_format_is_refused_by_number(tmp_path: Path) -> None:
    content = b'{"format":2,"name":"00000000-0000-0000-0000-00000000000d"}'
    (tmp_path / DEVICE_NAME).write_bytes(content)
    with pytest.raises(UsageError, match=r"format 2, and this release reads 1: start") as caught:
        DeviceFile(tmp_path)
    assert caught.value.reason == "device.format"
    assert (tmp_path / DEVICE_NAME).read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"format":1}',
        b'{"format":"2"}',
        b'{"device_id":"00000000-0000-0000-0000-00000000000d"}',
        b'{"device_id":"x","openings":1}',
        b'{"device_id":1,"openings":1}',
        b'{"device_id":"00000000-0000-0000-0000-00000000000d","openings":-1}',
        b'{"device_id":"00000000-0000-0000-0000-00000000000d","openings":true}',
        b'{"device_id":"00000000-0000-0000-0000-00000000000d","openings":9007199254740991}',
        b'{"device_id":"00000000-0000-0000-0000-00000000000d","more":1,"openings":1}',
        b'{"device_id":"00000000-0000-0000-0000-00000000000d","openings":1} ',
        b'{"a":"' + b"x" * 256 + b'"}',
    ],
)
def test_file_that_names_no_device_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / DEVICE_NAME).write_bytes(content)
    with pytest.raises(VerificationError, match=r"device\.malformed"):
        DeviceFile(tmp_path)
    assert (tmp_path / DEVICE_NAME).read_bytes() == content


def test_directory_has_one_process(tmp_path: Path) -> None:
    file = DeviceFile(tmp_path)
    with pytest.raises(UnavailableError, match=r"anchor\.in_use"):
        DeviceFile(tmp_path)
    file.release()
    again = DeviceFile(tmp_path)
    assert again.device_id == file.device_id
    again.release()


async def test_volume_whose_anchor_is_in_doubt_goes_once_that_is_known(machine: Machine) -> None:
    catalogue = await machine.open(is_believed=True)
    await machine.create(catalogue, A)

    async def silent(changes: Sequence[Change]) -> None:
        raise UnavailableError("peer.unreachable", "gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.anchor, "advance", silent)
        patch.setattr(catalogue._open_anchors, "_timeout_seconds", 0.05)
        with pytest.raises(UnavailableError, match=r"anchor\.timeout"):
            await machine.create(catalogue, B)
        with pytest.raises(UnavailableError, match=r"anchor\.timeout"):
            await catalogue.settle()
        assert machine.store(B).exists()
    for _ in range(2):
        assert await catalogue.settle() == [B]
    await machine.discard(catalogue, B)
    assert await catalogue.settle() == []
    await machine.open()
    assert machine.has_volumes == {A}


async def test_list_whose_anchoring_was_not_answered_is_anchored_before_the_next_change(
    machine: Machine,
) -> None:
    catalogue = await machine.open(is_believed=True)
    for volume_id in (A, B):
        await machine.create(catalogue, volume_id)
    advance = machine.anchor.advance

    async def unanswered(changes: Sequence[Change]) -> None:
        await advance(changes)
        raise UnavailableError("peer.unreachable", "gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.anchor, "advance", unanswered)
        patch.setattr(catalogue._open_anchors, "_timeout_seconds", 0.05)
        with pytest.raises(UnavailableError, match=r"anchor\.timeout"):
            await catalogue.replace(A, b"next")
    assert await catalogue.settle() == []
    await catalogue.begin_removal(B)
    # Power fails before the list without B is anchored: nothing was removed.
    await machine.open()
    assert machine.has_volumes == {A, B}


async def test_anchor_of_a_volume_goes_with_it(machine: Machine) -> None:
    catalogue = await machine.open(is_believed=True)
    await machine.create(catalogue, A)
    await catalogue._open_anchors.advance(volume_record(A), 1, b"root")
    await machine.remove(catalogue, A)
    assert [*machine.anchor.records] == [CATALOGUE]


async def test_closed_device_has_no_secret(tmp_path: Path) -> None:
    async with open_device(tmp_path) as (device, _):
        secret, kept = device.tree_secret(A, generation=1), device._secret
        assert len(secret) == 32
        assert secret != device.tree_secret(A, generation=2)
    assert kept == bytes(32)
    with pytest.raises(UnavailableError, match=r"device\.closed"):
        device.tree_secret(A, generation=1)
    await device.close()


async def test_lost_device_says_why_once(tmp_path: Path) -> None:
    async with open_device(tmp_path) as (device, _):
        first: Error = VerificationError("device.fenced", "moved")
        device.lose(first)
        device.lose(UsageError("anchor.order", "later"))
        assert await device.wait_lost() is first
        assert await device.wait_lost() is first
