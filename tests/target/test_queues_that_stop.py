"""A queue that stops answers what is at the target, before its host learns of the end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from patience import PATIENCE_SECONDS
from sealane.errors import Error
from sealane.protocol.sector import SECTOR_BYTES
from target.pair import World, data, make_world

OLD, NEW = data(SECTOR_BYTES), data(SECTOR_BYTES)


@contextlib.asynccontextmanager
async def answers_held(world: World) -> AsyncIterator[asyncio.Event]:
    """Relay the back end; its target's answers pass while the event is set."""
    passes = asyncio.Event()
    passes.set()

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: asyncio.Event
    ) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while read := await reader.read(1 << 16):
                await opened.wait()
                writer.write(read)
                await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*world.target.address)
        always = asyncio.Event()
        always.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pump(reader, back, always))
            tasks.create_task(pump(there, writer, passes))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        traddr, trsvcid = server.sockets[0].getsockname()
        world.via = (traddr, trsvcid)
        yield passes
        passes.set()


async def unanswered(world: World, count: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while world.gateway.unanswered(world.attached) != count:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


async def test_a_command_at_the_target_is_answered_before_the_host_is_cut_off() -> None:
    async with (
        make_world(None) as world,
        answers_held(world) as passes,
        world.host() as host,
        asyncio.TaskGroup() as tasks,
    ):
        queue = await host.open_queue(1)
        await queue.write(0, OLD)
        await unanswered(world, 0)
        passes.clear()
        writing = tasks.create_task(queue.write(0, NEW))
        await unanswered(world, 1)
        suspending = tasks.create_task(world.attached.suspend())
        await asyncio.sleep(0.5)
        assert (writing.done(), suspending.done()) == (False, False)
        passes.set()
        # Otherwise the host would repeat it elsewhere, with this one still under way.
        await writing
        assert await suspending == ""
        with pytest.raises(Error):
            await queue.write(0, OLD)
        world.attached.resume()
        back = bytearray(SECTOR_BYTES)
        async with world.queue() as again:
            await again.read(0, back)
        assert back == NEW


async def test_a_suspended_volume_whose_target_is_away_keeps_its_journal() -> None:
    async with make_world(None) as world, world.host() as host:
        queue = await host.open_queue(1)
        await queue.write(0, NEW)
        world.via = ("127.0.0.1", 1)
        assert "connection" in await world.attached.suspend()
        world.via = None
        world.attached.resume()
        back = bytearray(SECTOR_BYTES)
        async with world.queue() as again:
            await again.read(0, back)
        assert back == NEW
        assert world.attached.statistics()["journal_bytes"] > 0
        assert await world.attached.suspend() == ""
        assert world.attached.statistics()["journal_bytes"] == 0
        world.attached.resume()
