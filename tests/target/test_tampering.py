"""Bytes changed in the store or on the wire between gateway and target."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from attacks.disk import read_slot
from patience import PATIENCE_SECONDS
from sealane.cli.demo.adversary import block_start
from sealane.daemon.gateway.back_end import VERIFICATION_LOSSES_MAX
from sealane.daemon.gateway.data_path import GatewaySettings
from sealane.transport.nvme.initiator import NvmeStatusError, VolumeQueue
from target.pair import (
    INTERNAL_ERROR,
    World,
    data,
    make_world,
)


@pytest.fixture
async def inline_world(tmp_path: Path) -> AsyncIterator[World]:
    """Yield a world whose stored sectors can be located, as on a drive."""
    async with make_world(tmp_path / "store", store_kind="inline") as made:
        yield made


def change(path: Path, at: int, content: bytes | bytearray) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def stored(path: Path, lba: int) -> bytes:
    return read_slot(path, lba).block


async def refused_read(queue: VolumeQueue, lba: int) -> int:
    back = bytearray(b"\x11" * 4096)
    with pytest.raises(NvmeStatusError) as caught:
        await queue.read(lba, back)
    assert caught.value.is_verification_failure
    assert back == b"\x11" * 4096
    return caught.value.status


async def test_flipped_bit_in_the_store_is_refused_by_its_tag(inline_world: World) -> None:
    world = inline_world
    assert world.path is not None
    async with world.queue() as queue:
        await queue.write(5, data(4096))
        block = bytearray(stored(world.path, 5))
        block[100] ^= 1
        change(world.path, block_start(world.path, 5), block)
        assert await refused_read(queue, 5) == 0x282
        await world.reason("sector.tag")
        await queue.read(6, bytearray(4096))


async def test_swapped_and_older_sectors_in_the_store_are_stale(inline_world: World) -> None:
    world = inline_world
    assert world.path is not None
    async with world.queue() as queue:
        await queue.write(5, data(4096))
        old = stored(world.path, 5)
        await queue.write(5, data(8192))
        five, six = stored(world.path, 5), stored(world.path, 6)
        change(world.path, block_start(world.path, 5), six + five)
        assert await refused_read(queue, 5) == 0x284
        change(world.path, block_start(world.path, 5), old + six)
        assert await refused_read(queue, 5) == 0x284
        await world.reason("sector.stale", at_target=True)
        change(world.path, block_start(world.path, 5), five)
        await queue.read(5, bytearray(8192))


def parts(chunk: bytes) -> Iterator[bytes]:
    """Split off what a queue asks first of all, which no test here is about."""
    if chunk[0] == 0x04 and chunk[8] == 0x8A:
        end = int.from_bytes(chunk[4:8], "little")
        yield chunk[:end]
        chunk = chunk[end:]
    if chunk:
        yield chunk


class Interceptor:
    """Forwards bytes between gateway and target, and may change or repeat those of a gateway.

    `forges`: number of completions of writes to forge; `forges_outcomes`: also forge answers about
    the outcome of those writes.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.recorded = bytearray()
        self.serving: set[asyncio.Task[None]] = set()
        self.rewrites = 0
        self.replays = 0
        self.forges = 0
        self.forges_outcomes = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        # Cancelled at the end of a test, which is no error.
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._relay(reader, writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(writer.transport.abort)
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            stack.callback(up_writer.transport.abort)
            try:
                async with asyncio.TaskGroup() as tasks:
                    awaited = asyncio.Event()
                    tasks.create_task(self._forward(reader, up_writer, awaited, requests=True))
                    tasks.create_task(self._forward(up_reader, writer, awaited, requests=False))
            except* OSError:
                pass  # a peer is done

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        awaited: asyncio.Event,
        *,
        requests: bool,
    ) -> None:
        while read := await reader.read(1 << 20):
            for chunk in parts(read) if requests else [read]:
                sent = bytearray(chunk)
                opcode = chunk[8] if requests and chunk[0] == 0x04 else None
                is_write = opcode == 0x01
                if is_write or (self.forges_outcomes and opcode == 0x86):
                    awaited.set()
                if self.forges and not requests and awaited.is_set():
                    self.forges -= 1
                    awaited.clear()  # the gateway abandons this connection
                    # Dword 0 of a completion entry, or a byte of the data that precedes it.
                    sent[8 if chunk[0] == 0x05 else 100] ^= 1
                if is_write and self.rewrites:
                    self.rewrites -= 1
                    sent[48] ^= 1  # first LBA
                writer.write(sent)
                if is_write and self.replays:
                    self.replays -= 1
                    writer.write(sent)
                await writer.drain()
        with contextlib.suppress(OSError):  # the other end may have closed
            writer.write_eof()


@contextlib.asynccontextmanager
async def intercepted(world: World) -> AsyncIterator[Interceptor]:
    interceptor = Interceptor(world.target.address)
    server = await asyncio.start_server(interceptor.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    world.via = (host, port)
    try:
        yield interceptor
    finally:
        world.via = None
        server.close()
        for task in interceptor.serving:
            task.cancel()
        await asyncio.gather(*interceptor.serving, return_exceptions=True)


async def test_redirected_write_is_refused_and_written_where_it_belongs(world: World) -> None:
    async with intercepted(world) as wire, world.queue() as queue:
        await queue.write(4, data(4096))
        wire.rewrites = 1
        await queue.write(4, bytes(4096))
        await world.reason("command.mac", at_target=True)
        back = bytearray(8192)
        await queue.read(4, back)
        assert back == bytes(8192)
        assert world.attached.statistics()["sectors_unwritten"] == 1


async def test_write_that_is_redirected_for_ever_ends_with_a_path_error() -> None:
    async with (
        make_world(None, settings=GatewaySettings(hold_seconds=0.2)) as world,
        intercepted(world) as wire,
        world.queue() as queue,
    ):
        await queue.write(4, data(4096))
        wire.rewrites = 1 << 30
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(4, bytes(4096))
        assert caught.value.status == 0x300
        wire.rewrites = 0
        back = bytearray(4096)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(back):
                # The next reconnection attempt may come after this hold time.
                with contextlib.suppress(NvmeStatusError):
                    await queue.read(4, back)
        assert back == data(4096)


@pytest.mark.parametrize("forges_outcomes", [True, False])
async def test_forged_completions_that_keep_coming_fail_the_volume(
    world: World, monkeypatch: pytest.MonkeyPatch, forges_outcomes: bool
) -> None:
    """For one write whose outcome is forged, too; or for many writes whose outcomes are genuine."""
    monkeypatch.setattr("sealane.daemon.gateway.back_end.RETRY_SECONDS_MAX", 0.001)
    async with intercepted(world) as wire, world.queue() as queue:
        wire.forges_outcomes = forges_outcomes
        # A limit, so that a gateway that doesn't detect them can finish its writes.
        wire.forges = 2 * VERIFICATION_LOSSES_MAX
        for _ in range(0 if forges_outcomes else VERIFICATION_LOSSES_MAX):
            await queue.write(4, data(4096))
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(4, data(4096))
        assert caught.value.status == INTERNAL_ERROR
        assert wire.forges == VERIFICATION_LOSSES_MAX - 1
        await world.reason("verification.limit")
        wire.forges = 0
        with pytest.raises(NvmeStatusError) as caught:
            await queue.read(4, bytearray(4096))
        assert caught.value.status == INTERNAL_ERROR


async def test_replayed_write_is_refused_and_the_host_goes_on(world: World) -> None:
    async with intercepted(world) as wire, world.queue() as queue:
        wire.replays = 1
        await queue.write(4, data(4096))
        await world.reason("command.mac", at_target=True)
        await queue.write(5, data(4096))
        assert world.attached.statistics()["associations_lost"] == 1
