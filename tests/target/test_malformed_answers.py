"""Malformed PDUs from a controller: our initiator names each fault and ends only that queue.

NVMe/TCP Transport 1.0 §3.5 (errors), §3.6.2.4 and §3.6.2.5 (termination requests).
"""

import asyncio
import socket
import struct

import pytest

from attacks.pdus import (
    IDENTIFY,
    Kind,
    data_pdu,
    response,
)
from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.errors import Error, ProtocolError, UnavailableError
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.admin_queue import AdminQueue
from sealane.transport.nvme.initiator import HostController
from sealane.transport.nvme.stream import PduStream
from sealane.transport.nvme.volume_queue import ConnectedQueue, bulk_queue
from target.places import (
    BLOCK,
    BLOCKS,
    HEADER_FIELD,
    HOST,
    LIMIT,
    NQN,
    RANGE,
    SEQUENCE,
    SUCCESS,
    Wire,
    capsule,
    changed,
    pdu,
)


async def connected_pair() -> tuple[PduStream, Wire]:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    far.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=far)
    return PduStream(near, data_max=65_536), Wire(reader, writer)


def completion(cid: int) -> bytes:
    return response(0, cid).encode()


def data_for(cid: int, size: int, **changes: int) -> bytes:
    made = data_pdu(0, Kind.C2H_DATA, cid, bytes(size))
    for name, value in changes.items():
        setattr(made, name, value)
    return made.encode()


FROM_CONTROLLER: dict[str, tuple[bytes, tuple[int, int]]] = {
    "unknown type": (changed(response(0, 1), 0, 10), (HEADER_FIELD, 0)),
    "connection request": (pdu(Kind.IC_REQ, 128).encode(), (SEQUENCE, 0)),
    "connection response": (pdu(Kind.IC_RESP, 128).encode(), (SEQUENCE, 0)),
    "command": (capsule().encode(), (SEQUENCE, 0)),
    "host's data": (data_pdu(0, Kind.H2C_DATA, 1, bytes(8)).encode(), (SEQUENCE, 0)),
    "host's termination": (pdu(Kind.H2C_TERM, 24).encode(), (SEQUENCE, 0)),
    "header digest": (changed(response(0, 1), 1, 1), (HEADER_FIELD, 1)),
    "header length": (changed(response(0, 1), 2, 25), (HEADER_FIELD, 2)),
    "response with data": (changed(response(0, 1), 4, 25), (HEADER_FIELD, 4)),
    "response to nothing": (completion(77), (HEADER_FIELD, 20)),
    "data of nothing": (data_for(77, 8), (HEADER_FIELD, 8)),
    "more data than asked for": (data_for(1, 4104), (RANGE, 0)),
    "data out of order": (data_for(1, 8, transfer_offset=8), (SEQUENCE, 0)),
    "success before the end": (data_for(1, 8, flags=SUCCESS), (HEADER_FIELD, 1)),
    "four gigabytes": (changed(data_pdu(0, Kind.C2H_DATA, 1, bytes(8)), 7, 0xFF), (LIMIT, 0)),
}


@pytest.mark.parametrize("name", FROM_CONTROLLER)
async def test_an_admin_queue_names_every_fault_of_its_controller(name: str) -> None:
    sent, expected = FROM_CONTROLLER[name]
    stream, controller = await connected_pair()
    lost: list[Error] = []
    queue = AdminQueue(stream, timeout_seconds=PATIENCE_SECONDS, lost=lost.append)
    identify = bytes([IDENTIFY, 0x40]).ljust(64, b"\0")
    asked = asyncio.ensure_future(queue.submit(identify, room=4096))
    assert (await controller.next()).kind == Kind.COMMAND  # type: ignore[union-attr]
    controller.writer.write(sent)
    answer = await controller.next()
    assert answer is not None
    assert answer.kind == Kind.H2C_TERM
    assert bytes(answer.data) in sent
    assert struct.unpack_from("<HI", answer.header, 8) == expected
    with pytest.raises(UnavailableError):
        await asked
    assert [error.reason for error in lost] == ["pdu.malformed"]
    await queue.close()
    assert await controller.next() is None
    controller.writer.close()


@pytest.mark.parametrize("name", FROM_CONTROLLER)
async def test_an_io_queue_names_every_fault_of_its_controller(name: str) -> None:
    sent, expected = FROM_CONTROLLER[name]
    stream, controller = await connected_pair()
    connected = ConnectedQueue(
        socket=stream.socket,
        queue_id=1,
        queue_depth=8,
        h2c_data_max=65_536,
        transfer_max=65_536,
        in_capsule_max=8192,
    )
    identity = NamespaceIdentity(block_count=BLOCKS, block_bytes=BLOCK, metadata_bytes=0)
    queue = bulk_queue(connected, identity, io_bytes=BLOCK, timeout_seconds=PATIENCE_SECONDS)
    reading = asyncio.ensure_future(queue.read(0, bytearray(BLOCK)))
    asked = await controller.next()
    assert asked is not None
    # The engine and the control side start command ids at different numbers.
    renamed = bytearray(sent)
    if renamed[0] == Kind.C2H_DATA and renamed[8] == 1:
        renamed[8:10] = int(asked.command_id).to_bytes(2, "little")
    controller.writer.write(bytes(renamed))
    answer = await controller.next()
    assert answer is not None
    assert answer.kind == Kind.H2C_TERM
    code, information = struct.unpack_from("<HI", answer.header, 8)
    assert (code, information) == expected
    controller.writer.close()
    with pytest.raises(UnavailableError) as refused:
        await reading
    assert refused.value.reason == "pdu.malformed"
    await queue.close()


IC_RESPONSES = {
    "version": (8, 1),
    "alignment": (10, 31),
    "digests": (11, 3),
    "type": (0, 2),
    "length": (2, 127),
}


@pytest.mark.parametrize("name", IC_RESPONSES)
async def test_a_connection_response_that_cannot_be_is_answered(name: str) -> None:
    at, value = IC_RESPONSES[name]
    sent = bytearray(_native.encode_ic_resp(8192))
    sent[at] = value
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(128)
        writer.write(sent)
        heard.put_nowait((await reader.readexactly(1))[0])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    traddr, trsvcid = server.sockets[0].getsockname()
    host = HostController(traddr=traddr, trsvcid=trsvcid, subsystem_nqn=NQN, host_nqn=HOST)
    with pytest.raises(ProtocolError):
        await host.connect()
    assert await heard.get() == Kind.H2C_TERM
    server.close()
    await server.wait_closed()
