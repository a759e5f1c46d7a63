"""Unwritten, zeroed and deallocated sectors read the same on every back end."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import VolumeQueue
from target.pair import COMPARE_FAILURE, data, make_world
from target.third_party import PAGE, SECTORS, read, third_party_world

Session: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[VolumeQueue]]
"""A queue of a host; for a third party, with an attachment of its own."""

KINDS: Final = ("file", "inline", "emulated", "memory", "third-party", "third-party-metadata")
CONTENT: Final = data(SECTORS * PAGE)
"""More than leaf pages of one set tell of, out of place."""


@contextlib.asynccontextmanager
async def back_end(kind: str, directory: Path) -> AsyncIterator[Session]:
    """Yield an empty volume of at least SECTORS sectors."""
    match kind:
        case "file" | "inline":
            async with make_world(directory / "store", store_kind=kind) as world:
                yield world.queue
        case "emulated" | "memory":
            async with make_world(None, store_kind=kind) as world:
                yield world.queue
        case _:
            metadata = kind == "third-party-metadata"
            async with third_party_world(directory, metadata=metadata) as made:
                await made.create()
                yield made.attached


def content(lba: int, sectors: int) -> bytes:
    return CONTENT[lba * PAGE : (lba + sectors) * PAGE]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command and the sectors that it sets, to zeros or to CONTENT."""

    name: str
    run: Callable[[VolumeQueue], Awaitable[None]]
    zeros: tuple[range, ...] = ()
    written: tuple[range, ...] = ()


STEPS: Final = (
    Step(name="nothing was written", run=lambda queue: queue.flush(), zeros=(range(SECTORS),)),
    Step(name="deallocate the unwritten", run=lambda queue: queue.deallocate([(7, 90)])),
    Step(
        name="write",
        run=lambda queue: queue.write(3, content(3, 200)),
        written=(range(3, 203),),
    ),
    Step(
        name="write zeroes",
        run=lambda queue: queue.write_zeroes(10, 2),
        zeros=(range(10, 12),),
    ),
    Step(
        name="write zeroes and deallocate",
        run=lambda queue: queue.write_zeroes(12, 80, deallocate=True),
        zeros=(range(12, 92),),
    ),
    Step(
        name="deallocate ranges",
        run=lambda queue: queue.deallocate([(100, 1), (102, 60), (250, 6)]),
        zeros=(range(100, 101), range(102, 162), range(250, 256)),
    ),
    Step(
        name="write over zeros",
        run=lambda queue: queue.write(11, content(11, 3), is_forced=True),
        written=(range(11, 14),),
    ),
    Step(
        name="compare and write on zeros",
        run=lambda queue: queue.compare_and_write(100, bytes(PAGE), content(100, 1)),
        written=(range(100, 101),),
    ),
    Step(
        name="deallocate everything",
        run=lambda queue: queue.deallocate([(0, SECTORS)]),
        zeros=(range(SECTORS),),
    ),
    Step(
        name="write again",
        run=lambda queue: queue.write(60, content(60, 100)),
        written=(range(60, 160),),
    ),
)


@pytest.mark.parametrize("kind", KINDS)
async def test_sectors_are_zeros_or_what_was_written_last(kind: str, tmp_path: Path) -> None:
    expected = bytearray(SECTORS * PAGE)
    async with back_end(kind, tmp_path) as session:
        async with session() as queue:
            for step in STEPS:
                await step.run(queue)
                for sectors in step.zeros:
                    expected[sectors.start * PAGE : sectors.stop * PAGE] = bytes(
                        len(sectors) * PAGE
                    )
                for sectors in step.written:
                    expected[sectors.start * PAGE : sectors.stop * PAGE] = content(
                        sectors.start, len(sectors)
                    )
                assert await read(queue, 0, SECTORS) == expected, step.name
                await queue.verify(0, SECTORS)
        async with session() as queue:
            assert await read(queue, 0, SECTORS) == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_conditions_are_of_what_is_stored(kind: str, tmp_path: Path) -> None:
    async with back_end(kind, tmp_path) as session, session() as queue:
        await queue.write(5, content(5, 2))
        await queue.compare(4, bytes(PAGE) + content(5, 2))
        await queue.compare_and_write(5, content(5, 1), content(6, 1))
        for failing in (
            queue.compare(5, content(5, 1)),
            queue.compare(4, content(4, 1)),
            queue.compare_and_write(5, content(5, 1), content(7, 1)),
            queue.compare_and_write(4, content(4, 1), content(7, 1)),
        ):
            with pytest.raises(NvmeStatusError) as caught:
                await failing
            assert caught.value.status & 0x7FF == COMPARE_FAILURE
        assert await read(queue, 4, 3) == bytes(PAGE) + 2 * content(6, 1)
