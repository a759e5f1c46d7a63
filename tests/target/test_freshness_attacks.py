"""Reference tests 15, 18, 20 and 29 from host to drive, for stores out of place and in place.

The drive's owner rolls back, exchanges and tears stored blocks; the host behind the gateway reads
what was written last, or gets an error. Attacks on the store alone are tested in the engine.
"""

import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

import pytest

from sealane.cli.demo.adversary import block_start
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import VolumeQueue
from target.pair import SECTORS, World, make_world
from target.test_volume_jobs import ended

Kind: TypeAlias = Literal["file", "inline"]
KINDS: tuple[Kind, ...] = ("file", "inline")
LBA = 4
OLD, NEW = b"\x01" * 4096, b"\x02" * 4096


@dataclass(frozen=True)
class Drive:
    """A store's file, whose first page locates the rest (docs/formats/stores.md §2)."""

    path: Path
    unit: int
    leaf_pages: tuple[int, int]
    """Where the copies of the first set's leaf page begin."""
    blocks: int
    """Where slots, or blocks in place, begin."""

    @classmethod
    def of(cls, path: Path, kind: Kind) -> Self:
        with path.open("rb") as file:
            page = file.read(4096)
        blocks, entries, slots, log, _ = struct.unpack_from("<5Q", page, 64)
        unit = 4096 if kind == "file" else 4160
        leaves = -(-blocks // entries) + -(-slots // 32768)
        first = 3 + log + 2 * -(-leaves // 248)
        return cls(
            path=path,
            unit=unit,
            leaf_pages=(first * unit, (first + leaves) * unit),
            blocks=(first + 2 * leaves) * unit,
        )

    def read(self) -> bytes:
        """Return the whole file."""
        return self.path.read_bytes()

    def write(self, place: int, content: bytes) -> None:
        """Overwrite bytes behind the target's back."""
        with self.path.open("r+b") as file:
            file.seek(place)
            file.write(content)

    def changed(self, before: bytes, after: bytes) -> int:
        """Return the offset of the one block written since."""
        starts = range(self.blocks, len(after), self.unit)
        (place,) = (
            at for at in starts if before[at : at + self.unit] != after[at : at + self.unit]
        )
        return place


@contextlib.asynccontextmanager
async def volume(directory: Path, kind: Kind) -> AsyncIterator[tuple[World, VolumeQueue, Drive]]:
    async with make_world(directory / "store", store_kind=kind) as world, world.queue() as queue:
        assert world.path is not None
        yield world, queue, Drive.of(world.path, kind)


async def merged(world: World, drive: Drive) -> None:
    """Merge everything pending into leaf pages: a scrub's repair ends with a checkpoint."""
    drive.write(8, b"\xff")
    before = world.target.statistics(world.volume_id)["merges"]
    jobs = world.target.jobs(world.volume_id)
    await jobs.start("scrub", bytes_per_second=0)
    await ended(jobs)
    assert world.target.statistics(world.volume_id)["merges"] > before


@contextlib.asynccontextmanager
async def closed(world: World) -> AsyncIterator[None]:
    """Close the volume at the target within the block; its gateway waits."""
    await world.target.close_volume(world.volume_id)
    yield
    await world.target.open_volume(world.volume_id, sector_count=SECTORS)


async def read(queue: VolumeQueue, lba: int = LBA) -> bytes:
    content = bytearray(4096)
    await queue.read(lba, content)
    return bytes(content)


async def refused(world: World, queue: VolumeQueue) -> None:
    with pytest.raises(NvmeStatusError):
        await read(queue)
    await world.reason("sector.stale", at_target=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_15_sector_and_leaf_page_that_are_put_back_together_are_refused(
    tmp_path: Path, kind: Kind
) -> None:
    async with volume(tmp_path, kind) as (world, queue, drive):
        await queue.write(LBA, OLD)
        await merged(world, drive)
        older = drive.read()
        await queue.write(LBA, NEW)
        await merged(world, drive)
        await queue.flush()
        async with closed(world):
            newer = drive.read()
            for place in drive.leaf_pages:
                drive.write(place, older[place : place + drive.unit])
            drive.write(drive.blocks, older[drive.blocks :])
        await refused(world, queue)
        for place in drive.leaf_pages:
            drive.write(place, newer[place : place + drive.unit])
        drive.write(drive.blocks, newer[drive.blocks :])
        assert await read(queue) == NEW


@pytest.mark.parametrize("kind", KINDS)
async def test_18_older_sector_is_refused_while_the_newer_waits_to_be_merged(
    tmp_path: Path, kind: Kind
) -> None:
    async with volume(tmp_path, kind) as (world, queue, drive):
        empty = drive.read()
        await queue.write(LBA, OLD)
        with_old = drive.read()
        await queue.write(LBA, NEW)
        with_new = drive.read()
        assert world.target.statistics(world.volume_id)["merges"] == 0
        place, older = drive.changed(with_old, with_new), drive.changed(empty, with_old)
        drive.write(place, with_old[older : older + drive.unit])
        await refused(world, queue)
        drive.write(place, with_new[place : place + drive.unit])
        assert await read(queue) == NEW


@pytest.mark.parametrize("kind", KINDS)
async def test_20_changed_leaf_page_is_refused_when_it_is_fetched(
    tmp_path: Path, kind: Kind
) -> None:
    async with volume(tmp_path, kind) as (world, queue, drive):
        await queue.write(LBA, NEW)
        await queue.flush()
        await merged(world, drive)
        kept = drive.read()
        async with closed(world):
            for place in drive.leaf_pages:
                drive.write(place + 3000, bytes([kept[place + 3000] ^ 1]))
        await refused(world, queue)
        for place in drive.leaf_pages:
            drive.write(place, kept[place : place + drive.unit])
        assert await read(queue) == NEW


@pytest.mark.parametrize("kind", KINDS)
async def test_29_sectors_of_a_torn_write_are_each_of_one_version(
    tmp_path: Path, kind: Kind
) -> None:
    sectors = 16
    async with volume(tmp_path, kind) as (world, queue, drive):
        await queue.write(LBA, OLD * sectors)
        await queue.flush()
        before = drive.read()
        await queue.write(LBA, NEW * sectors)
        after = drive.read()
        async with closed(world):
            # Power is cut when every other block and half of one are written.
            image = bytearray(after)
            places = [
                at
                for at in range(drive.blocks, len(after), drive.unit)
                if before[at : at + drive.unit] != after[at : at + drive.unit]
            ]
            assert len(places) == sectors
            for at in places[::2]:
                image[at : at + drive.unit] = before[at : at + drive.unit]
            torn = places[1]
            image[torn : torn + 2048] = before[torn : torn + 2048]
            drive.write(0, bytes(image))
        found = []
        for lba in range(LBA, LBA + sectors):
            with contextlib.suppress(NvmeStatusError):
                found.append(await read(queue, lba))
        assert {*found} <= {OLD, NEW}
        # Out of place, the torn write was never logged; in place, half of its sectors are whole.
        assert len(found) == sectors if kind == "file" else found.count(NEW) == sectors // 2 - 1


def test_the_first_block_in_place_is_where_the_demo_has_it(tmp_path: Path) -> None:
    """Checked against the product's own computation."""
    path = tmp_path / "x"
    sizes = struct.pack("<5Q", 8192, 340, 0, 4096, 4096)
    path.write_bytes(b"SEALSTOR" + bytes(56) + sizes + bytes(4096))
    assert Drive.of(path, "inline").blocks == block_start(path, 0)
