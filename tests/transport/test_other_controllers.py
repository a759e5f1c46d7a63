"""The initiator with less capable, slow or different controllers."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.errors import ProtocolError, UnavailableError
from sealane.protocol.nvme.command import encode_completion
from sealane.protocol.nvme.connect import Connect, decode_connect
from sealane.protocol.nvme.constants import AdminOpcode, FabricsType, Property
from sealane.transport.nvme import HostController
from sealane.transport.nvme.stream import PduStream

HOST = "nqn.2026-11.dev.sealane:host"
NQN = "nqn.2024-01.org.example:other"
READY, FATAL = 1, 2


def identity(*, nqn: str = NQN, mdts: int = 5, maxcmd: int = 0, icdoff: int = 0) -> bytes:
    data = bytearray(4096)
    data[77] = mdts
    data[111] = 1
    struct.pack_into("<H", data, 514, maxcmd)
    data[768:1024] = nqn.encode().ljust(256, b"\0")
    struct.pack_into("<IIH", data, 1792, (64 + 8192) // 16, 1, icdoff)
    return bytes(data)


@dataclass
class Controller:
    """A scripted controller, which records the connected queues."""

    identity: bytes = field(default_factory=identity)
    mqes: int = 127
    page_exponent: int = 0
    statuses: list[int] = field(default_factory=lambda: [READY])
    granted: int = 0x000F_000F
    connects: list[Connect] = field(default_factory=list)
    keep_alives: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, stream: PduStream) -> None:
        await stream.receive()
        await stream.send(_native.encode_ic_resp(8192))
        while True:
            header, data = await stream.receive()
            await self._answer(stream, header.entry, data)

    async def _answer(self, stream: PduStream, entry: bytes, data: bytes) -> None:
        opcode, command_id, result = entry[0], struct.unpack_from("<H", entry, 2)[0], 0
        if opcode == AdminOpcode.FABRICS:
            result = self._fabrics(entry, data)
        elif opcode == AdminOpcode.IDENTIFY:
            await stream.send(_native.encode_c2h_data(command_id, self.identity))
        elif opcode == AdminOpcode.SET_FEATURES:
            result = self.granted
        elif opcode == AdminOpcode.KEEP_ALIVE:
            self.keep_alives.set()
        await stream.send(_native.encode_capsule_resp(encode_completion(command_id, result=result)))

    def _fabrics(self, entry: bytes, data: bytes) -> int:
        if entry[4] == FabricsType.CONNECT:
            self.connects.append(decode_connect(entry, data))
            return 1
        offset = struct.unpack_from("<I", entry, 44)[0]
        if entry[4] == FabricsType.PROPERTY_GET and offset == Property.CAPABILITIES:
            return self.mqes | 1 << 24 | self.page_exponent << 48  # ready within 500 ms
        if entry[4] == FabricsType.PROPERTY_GET:
            return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return 0


@contextlib.asynccontextmanager
async def running(controller: Controller, **changes: object) -> AsyncIterator[HostController]:
    """Start the controller; yield a host that isn't connected yet."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    loop = asyncio.get_running_loop()

    async def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(UnavailableError):
            await controller.serve(PduStream(connection, data_max=8192))

    async def accept(tasks: asyncio.TaskGroup) -> None:
        while True:
            connection, _ = await loop.sock_accept(listening)
            tasks.create_task(serve(connection))

    port = listening.getsockname()[1]
    fields: dict[str, object] = {"subsystem_nqn": NQN, "host_nqn": HOST}
    fields |= {"traddr": "127.0.0.1", "trsvcid": port}
    host = HostController(**(fields | changes))  # type: ignore[arg-type]
    with listening:
        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(accept(tasks))
            try:
                yield host
            finally:
                await host.close()
                accepting.cancel()


async def test_a_queue_is_no_deeper_than_the_controller_says() -> None:
    for controller, depth in (
        (Controller(mqes=31), 32),
        (Controller(identity=identity(maxcmd=16)), 16),
        (Controller(identity=identity(maxcmd=1)), 2),
        (Controller(), 64),
    ):
        async with running(controller) as host:
            await host.connect()
            queue = await host.connect_queue(1, queue_depth=64)
            queue.close()
        assert (queue.queue_depth, controller.connects[-1].queue_size) == (depth, depth)


async def test_transfers_are_measured_in_the_controllers_pages() -> None:
    async with running(Controller(identity=identity(mdts=1), page_exponent=2)) as host:
        await host.connect()
        assert host.identity.transfer_max == 2 * 16_384


async def test_data_that_would_not_follow_the_entry_stay_out_of_the_capsule() -> None:
    async with running(Controller(identity=identity(icdoff=1))) as host:
        await host.connect()
        assert host.identity.in_capsule_max == 0


async def test_a_slow_controller_is_waited_for() -> None:
    async with running(Controller(statuses=[0, 0, READY])) as host:
        await host.connect()
        assert host.identity.subsystem_nqn == NQN


@pytest.mark.parametrize("statuses", [[FATAL], [READY | FATAL], [0]])
async def test_a_controller_that_does_not_get_ready_is_left(statuses: list[int]) -> None:
    async with running(Controller(statuses=statuses)) as host:
        with pytest.raises(ProtocolError) as caught:
            await host.connect()
    assert caught.value.reason == "controller.not_ready"


async def test_another_subsystem_than_asked_for_is_left() -> None:
    async with running(Controller(identity=identity(nqn=NQN + "x"))) as host:
        with pytest.raises(ProtocolError) as caught:
            await host.connect()
    assert caught.value.reason == "identify.subsystem"


async def test_fewer_queues_may_be_granted_than_asked_for() -> None:
    async with running(Controller(granted=0x0003_0001)) as host:
        await host.connect()
        assert await host.request_queues(8) == 2


async def test_keep_alives_are_sent_and_named_in_connect() -> None:
    controller = Controller()
    async with running(controller, keep_alive_ms=2) as host:
        await host.connect()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await controller.keep_alives.wait()
    assert controller.connects[0].keep_alive_ms == 2
