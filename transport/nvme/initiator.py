"""Host side: an asynchronous admin queue, and I/O queues that the engine or a bulk queue takes."""

import asyncio
import contextlib
import itertools
import socket
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, Self

from sealane import _native
from sealane.errors import Error, ProtocolError, UnavailableError
from sealane.protocol.nvme.command import decode_completion
from sealane.protocol.nvme.connect import TICKET_BYTES, Connect
from sealane.protocol.nvme.constants import (
    DYNAMIC_CONTROLLER,
    FRONT_TRANSFER_BYTES,
    IDENTIFY_BYTES,
    NAMESPACE_ID,
    QUEUE_DEPTH_MAX,
    AdminOpcode,
    FabricsType,
    Feature,
    PduKind,
    Property,
)
from sealane.protocol.nvme.identify import (
    ControllerIdentity,
    NamespaceIdentity,
    decode_controller,
    decode_namespace,
)
from sealane.transport.nvme.stream import PduStream
from sealane.transport.tasks import TaskOwner

_TIMEOUT_SECONDS = 10.0
_IO_TIMEOUT_SECONDS = 60.0
_ADMIN_QUEUE_SIZE = 32
_ENABLE = 0x0046_0001  # 64-byte and 16-byte entries, enabled
_SHUTDOWN = 0x0046_4001
_READY = 0x01
_SGL = 0x40
_ENTRY = struct.Struct("<BBHI16xQI3xB6I")
_SGL_TRANSPORT = 0x5A
_VERIFICATION_STATUSES = {0x282, 0x283, 0x284}


P = ParamSpec("P")


class NvmeStatusError(Error):
    """A controller answered a command with an error. `status` is status code type and code."""

    exit_code = 1

    def __init__(self, status: int, *, lba: int | None = None) -> None:
        name = _native.status_name(status) or "unknown status"
        place = "" if lba is None else f" at LBA {lba}"
        super().__init__(f"nvme.status.{status:03x}", f"{name}{place}")
        self.status = status
        self.lba = lba

    @property
    def is_verification_failure(self) -> bool:
        """Whether the data at this place is not what was written: never use it."""
        return self.status in _VERIFICATION_STATUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedQueue:
    """An I/O queue whose Connect succeeded. Its owner hands the socket over, then closes it."""

    socket: socket.socket
    queue_id: int
    queue_depth: int
    h2c_data_max: int
    transfer_max: int
    in_capsule_max: int

    def close(self) -> None:
        """Close this side's descriptor."""
        self.socket.close()


class HostController:
    """One association of a host with a subsystem: `async with HostController(...) as host`.

    `keep_alive_ms` 0 means none. I/O errors and statuses raise errors of `sealane.errors`.
    """

    def __init__(
        self,
        *,
        traddr: str,
        trsvcid: int,
        subsystem_nqn: str,
        host_nqn: str,
        host_id: uuid.UUID | None = None,
        keep_alive_ms: int = 0,
    ) -> None:
        self._address = (traddr, trsvcid)
        self._subsystem_nqn = subsystem_nqn
        self._host_nqn = host_nqn
        self._host_id = host_id or uuid.uuid4()
        self._keep_alive_ms = keep_alive_ms
        self._stream: PduStream | None = None
        self._controller_id = DYNAMIC_CONTROLLER
        self._command_ids = itertools.count(1)
        self._turn = asyncio.Lock()
        self._tasks = TaskOwner()
        self._identity: ControllerIdentity | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def identity(self) -> ControllerIdentity:
        """What the controller says of itself."""
        if self._identity is None:
            raise UnavailableError("connection.lost", "the controller isn't connected")
        return self._identity

    async def connect(self) -> None:
        """Connect the admin queue, enable the controller, read its identity."""
        try:
            self._stream, _, self._controller_id = await self._connect_queue(
                queue_id=0, queue_size=_ADMIN_QUEUE_SIZE, ticket=bytes(TICKET_BYTES)
            )
            await self._enable()
        except BaseException:
            await self.close()
            raise
        if self._keep_alive_ms:
            self._tasks.start(self._keep_alive(), name="nvme-keep-alive")

    async def close(self) -> None:
        """Shut the controller down, if it still listens, and close."""
        stream = self._stream
        try:
            await self._tasks.close()
            if stream is not None:
                with contextlib.suppress(Error, TimeoutError):
                    async with asyncio.timeout(1):
                        await self._set_configuration(_SHUTDOWN)
        finally:
            # Also when the farewell is cancelled.
            self._stream = None
            if stream is not None:
                stream.socket.close()

    async def request_queues(self, count: int) -> int:
        """Ask for I/O queues; returns how many are granted."""
        value = (count - 1) | (count - 1) << 16
        words = (int(Feature.NUMBER_OF_QUEUES), value)
        _, result = await self._command(AdminOpcode.SET_FEATURES, words=words)
        return min(result & 0xFFFF, result >> 16) + 1

    async def identify_namespace(self, nsid: int = NAMESPACE_ID) -> NamespaceIdentity:
        """Size and format of a namespace."""
        data, _ = await self._command(AdminOpcode.IDENTIFY, nsid=nsid, length=IDENTIFY_BYTES)
        return decode_namespace(data)

    async def connect_queue(
        self, queue_id: int, *, queue_depth: int = QUEUE_DEPTH_MAX, ticket: bytes | None = None
    ) -> ConnectedQueue:
        """Connect an I/O queue, with a ticket if its subsystem is secure."""
        stream, h2c_data_max, _ = await self._connect_queue(
            queue_id=queue_id, queue_size=queue_depth, ticket=ticket or bytes(TICKET_BYTES)
        )
        return ConnectedQueue(
            socket=stream.socket,
            queue_id=queue_id,
            queue_depth=queue_depth,
            h2c_data_max=h2c_data_max,
            transfer_max=self.identity.transfer_max or FRONT_TRANSFER_BYTES,
            in_capsule_max=self.identity.in_capsule_max,
        )

    async def open_queue(
        self, queue_id: int, *, queue_depth: int = 64, io_bytes: int = FRONT_TRANSFER_BYTES
    ) -> "VolumeQueue":
        """Connect an I/O queue of a plain namespace and put a bulk queue on it."""
        namespace = await self.identify_namespace()
        if namespace.metadata_bytes:
            raise ProtocolError(
                "namespace.format",
                f"blocks carry {namespace.metadata_bytes} bytes of metadata; allowed: 0",
            )
        connected = await self.connect_queue(queue_id, queue_depth=queue_depth)
        with contextlib.closing(connected):
            native = _native.HostQueue(
                connected.socket.fileno(),
                queue_depth=queue_depth,
                h2c_data_max=connected.h2c_data_max,
                transfer_max=connected.transfer_max,
                in_capsule_max=connected.in_capsule_max,
                io_bytes=io_bytes,
                block_bytes=namespace.block_bytes,
                timeout_seconds=_IO_TIMEOUT_SECONDS,
            )
        return VolumeQueue(native, namespace)

    async def _enable(self) -> None:
        await self._set_configuration(_ENABLE)
        status = await self._property(Property.STATUS)
        if not status & _READY:
            raise ProtocolError("controller.not_ready", f"controller status is {status:#x}")
        data, _ = await self._command(AdminOpcode.IDENTIFY, words=(1,), length=IDENTIFY_BYTES)
        self._identity = decode_controller(data)

    async def _keep_alive(self) -> None:
        with contextlib.suppress(Error, TimeoutError):
            while True:
                await asyncio.sleep(self._keep_alive_ms / 2000)
                await self._command(AdminOpcode.KEEP_ALIVE)

    async def _connect_queue(
        self, *, queue_id: int, queue_size: int, ticket: bytes
    ) -> tuple[PduStream, int, int]:
        """Return a connected stream, its MAXH2CDATA and the controller id."""
        traddr, trsvcid = self._address
        connection = socket.socket(socket.AF_INET6 if ":" in traddr else socket.AF_INET)
        try:
            connection.setblocking(False)
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await asyncio.get_running_loop().sock_connect(connection, (traddr, trsvcid))
                stream = PduStream(connection, data_max=IDENTIFY_BYTES)
                h2c_data_max, controller_id = await self._exchange_connect(
                    stream,
                    Connect(
                        command_id=0,
                        queue_id=queue_id,
                        queue_size=queue_size,
                        keep_alive_ms=self._keep_alive_ms if queue_id == 0 else 0,
                        host_id=self._host_id,
                        controller_id=self._controller_id,
                        subsystem_nqn=self._subsystem_nqn,
                        host_nqn=self._host_nqn,
                        ticket=ticket,
                    ),
                )
        except OSError as error:
            connection.close()
            if isinstance(error, TimeoutError):
                text = f"no answer from {traddr}:{trsvcid} in {_TIMEOUT_SECONDS:g} s"
                raise UnavailableError("connection.timeout", text) from error
            raise UnavailableError(
                "connection.refused", f"can't connect to {traddr}:{trsvcid}: {error.strerror}"
            ) from error
        except BaseException:
            connection.close()
            raise
        return stream, h2c_data_max, controller_id

    async def _exchange_connect(self, stream: PduStream, connect: Connect) -> tuple[int, int]:
        await stream.send(_native.encode_ic_req())
        response, _ = await stream.receive()
        usable = response.kind == PduKind.IC_RESP and response.version == response.alignment == 0
        if not usable or response.digests or response.limit < IDENTIFY_BYTES:
            raise ProtocolError("pdu.malformed", "ICResp isn't usable")
        await stream.send(_native.encode_capsule_cmd(*connect.encode()))
        header, _ = await stream.receive()
        if header.kind != PduKind.CAPSULE_RESP:
            raise ProtocolError("pdu.malformed", f"Connect is answered by PDU {header.kind:#04x}")
        _, status, result = decode_completion(header.entry)
        if status:
            raise NvmeStatusError(status)
        return response.limit, result & 0xFFFF

    async def _set_configuration(self, value: int) -> None:
        entry = bytearray(_fabrics_entry(FabricsType.PROPERTY_SET, Property.CONFIGURATION))
        struct.pack_into("<Q", entry, 48, value)
        await self._submit(entry, length=0)

    async def _property(self, offset: Property) -> int:
        _, result = await self._submit(
            bytearray(_fabrics_entry(FabricsType.PROPERTY_GET, offset)), length=0
        )
        return result

    async def _command(
        self,
        opcode: AdminOpcode,
        *,
        nsid: int = 0,
        words: tuple[int, ...] = (),
        length: int = 0,
    ) -> tuple[bytes, int]:
        padded = (*words, 0, 0, 0, 0, 0, 0)[:6]
        entry = _ENTRY.pack(opcode, _SGL, 0, nsid, 0, length, _SGL_TRANSPORT, *padded)
        return await self._submit(bytearray(entry), length=length)

    async def _submit(self, entry: bytearray, *, length: int) -> tuple[bytes, int]:
        async with self._turn:
            if self._stream is None:
                raise UnavailableError("connection.lost", "the controller isn't connected")
            command_id = next(self._command_ids) & 0x7FFF
            struct.pack_into("<H", entry, 2, command_id)
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await self._stream.send(_native.encode_capsule_cmd(bytes(entry), b""))
                return await self._answer(self._stream, command_id, length)

    @staticmethod
    async def _answer(stream: PduStream, command_id: int, length: int) -> tuple[bytes, int]:
        data = b""
        while True:
            header, payload = await stream.receive()
            if header.kind == PduKind.C2H_DATA:
                if header.cid != command_id or header.offset != len(data):
                    raise ProtocolError("pdu.malformed", "data for another admin command")
                data += payload
                if len(data) > length:
                    raise ProtocolError("pdu.malformed", "more data than was asked for")
                continue
            if header.kind != PduKind.CAPSULE_RESP:
                raise ProtocolError("pdu.malformed", f"unexpected PDU {header.kind:#04x}")
            answered, status, result = decode_completion(header.entry)
            if answered != command_id:
                raise ProtocolError("pdu.malformed", "completion of another admin command")
            if status:
                raise NvmeStatusError(status)
            if len(data) != length:
                raise ProtocolError("pdu.malformed", f"{len(data)} of {length} bytes answered")
            return data, result


class VolumeQueue:
    """Bulk reads and writes on one plain I/O queue, many commands in flight.

    One transfer at a time; each runs on a thread without the interpreter's lock. Buffers must
    not be touched during a transfer.
    """

    def __init__(self, native: _native.HostQueue, namespace: NamespaceIdentity) -> None:
        self._native = native
        self.namespace = namespace

    @property
    def native(self) -> _native.HostQueue:
        """The engine's queue, for callers that bring their own thread."""
        return self._native

    async def write(self, lba: int, data: "bytes | bytearray | memoryview") -> None:
        """Write whole blocks. NvmeStatusError, or UnavailableError if the queue ended."""
        await self._run(self._native.write, lba, data)

    async def read(self, lba: int, into: "bytearray | memoryview") -> None:
        """Fill `into` with whole blocks. Errors as `write`."""
        await self._run(self._native.read, lba, into)

    async def flush(self) -> None:
        """Make completed writes durable."""
        await self._run(self._native.flush)

    def progress(self) -> int:
        """Bytes moved since the queue was opened."""
        return self._native.progress()

    async def close(self) -> None:
        """End the queue."""
        await asyncio.to_thread(self._native.close)

    @staticmethod
    async def _run(call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await asyncio.to_thread(call, *args, **kwargs)
        except _native.StatusError as error:
            raise NvmeStatusError(error.args[0], lba=error.args[1]) from error
        except _native.QueueError as error:
            raise UnavailableError(error.args[0], error.args[1]) from error


def _fabrics_entry(kind: FabricsType, offset: Property) -> bytes:
    entry = bytearray(64)
    entry[0], entry[1], entry[4] = AdminOpcode.FABRICS, _SGL, kind
    entry[40] = 1 if offset == Property.CAPABILITIES else 0
    struct.pack_into("<I", entry, 44, offset)
    return bytes(entry)
