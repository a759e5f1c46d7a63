"""NVMe/TCP listener: handshake, Connect and admin queues here; I/O queues go to the engine.

The response to an I/O queue's Connect is fully sent before the socket is handed over, and no byte
beyond the Connect command is ever read here.
"""

import asyncio
import contextlib
import itertools
import socket
import uuid
from dataclasses import dataclass, field
from typing import Protocol

from sealane import _native
from sealane.daemon.storage.events import StorageEvent
from sealane.errors import Error, ProtocolError, UnavailableError, UsageError
from sealane.protocol.nvme.admin import AdminController
from sealane.protocol.nvme.command import encode_completion
from sealane.protocol.nvme.connect import Connect, decode_connect
from sealane.protocol.nvme.constants import (
    CONNECT_DATA_BYTES,
    DYNAMIC_CONTROLLER,
    H2C_DATA_BYTES,
    QUEUE_DEPTH_MAX,
    PduKind,
    Status,
)
from sealane.protocol.nvme.subsystem import Subsystem
from sealane.transport.nvme.stream import PduStream
from sealane.transport.tasks import TaskOwner

_HANDSHAKE_SECONDS = 5.0
_ADMIT_SECONDS = 15.0
_ACCEPT_PAUSE_SECONDS = 0.1
_FAREWELL_SECONDS = 2.0
_CONNECTIONS_MAX = 256
_CONTROLLERS_MAX = 0xFFEF
_DIGESTS = 0x03


class ConnectRefusedError(ProtocolError):
    """A Connect command is answered with `status`; `result` names the field at fault."""

    def __init__(self, reason: str, message: str, *, status: Status, result: int = 0) -> None:
        super().__init__(reason, message)
        self.status = status
        self.result = result


class Admission(Protocol):
    """An I/O queue that may start once its Connect is answered."""

    def start(self, descriptor: int) -> None:
        """Hand the connection to the engine, which duplicates the descriptor."""

    def close(self) -> None:
        """Give up what was prepared, if it wasn't started."""


class Exported(Protocol):
    """A subsystem that hosts can connect to."""

    @property
    def subsystem(self) -> Subsystem:
        """What it shows."""

    def allows(self, host_nqn: str) -> bool:
        """Whether this host may have a controller."""

    async def admit(self, association: "Association", connect: Connect) -> Admission:
        """Prepare an I/O queue; ConnectRefusedError to refuse it."""

    async def association_closed(self, association_id: int) -> None:
        """Stop and drain the association's queues."""

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Report a refused Connect."""


class Provider(Protocol):
    """Finds subsystems by name."""

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Find a subsystem; None if there is no such."""


@dataclass(slots=True, kw_only=True)
class Association:
    """A host and one controller: an admin queue and its I/O queues."""

    association_id: int
    controller_id: int
    host_nqn: str
    host_id: uuid.UUID
    exported: Exported
    admin: AdminController
    task: asyncio.Task[None] | None = None
    queue_ids: set[int] = field(default_factory=set)
    is_closed: bool = False


class Listener:
    """Accepts hosts at one address; bounded in connections, time and bytes."""

    def __init__(self, provider: Provider, *, traddr: str, trsvcid: int) -> None:
        self._provider = provider
        self._address = (traddr, trsvcid)
        self._socket: socket.socket | None = None
        self._tasks = TaskOwner()
        self._associations: dict[int, Association] = {}
        self._association_ids = itertools.count(1)
        self._connections = 0

    @property
    def address(self) -> tuple[str, int]:
        """Address and port, the real one if port 0 was asked for."""
        if self._socket is None:
            return self._address
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    async def start(self) -> None:
        """Listen. UsageError if the address can't be had."""
        traddr, trsvcid = self._address
        family = socket.AF_INET6 if ":" in traddr else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((traddr, trsvcid))
            listening.listen(_CONNECTIONS_MAX)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            raise UsageError(
                "listener.address",
                f"can't listen on {traddr}:{trsvcid}: {error.strerror}; choose a free address",
            ) from error
        self._socket = listening
        self._listen(listening)

    async def stop(self) -> None:
        """Close the address and every association, and wait for their queues."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        await self._tasks.close()

    def queue_closed(self, event: StorageEvent) -> None:
        """End the association of an I/O queue that closed: at once after a fault.

        A host that leaves in order closes its I/O queues first and then shuts its controller down
        (Linux does): it gets the time to.
        """
        if event.reason:
            self.end_association(event.association)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(_FAREWELL_SECONDS, self.end_association, event.association)

    def end_association(self, association_id: int) -> None:
        """Close an association; its queues are drained in its own task."""
        for association in self._associations.values():
            mine = association.association_id == association_id
            if mine and association.task is not None and not association.is_closed:
                association.task.cancel()

    async def end_export(self, exported: Exported) -> None:
        """Close every association of a subsystem and wait until its queues are drained."""
        ending = [
            association.task
            for association in self._associations.values()
            if association.exported is exported and association.task is not None
        ]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    def _listen(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept without waiting, so that no cancellation can lose a connection."""
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors: pause instead of being woken for it over and over.
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen, listening)
            return
        if self._connections >= _CONNECTIONS_MAX:
            connection.close()
            return
        self._connections += 1
        task = self._tasks.start(self._serve(connection), name="nvme-connection")
        task.add_done_callback(lambda _: self._gone(connection))

    def _gone(self, connection: socket.socket) -> None:
        # In a callback and not in the task, which may be cancelled before its first step.
        self._connections -= 1
        connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        stream = PduStream(connection, data_max=CONNECT_DATA_BYTES)
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                connect = await self._handshake(stream)
            if connect.queue_id == 0:
                await self._serve_admin(stream, connect)
            else:
                await self._serve_io(stream, connect)
        except (ConnectRefusedError, UnavailableError, TimeoutError):
            pass  # answered already, or nobody is left to answer
        except ProtocolError:
            with contextlib.suppress(UnavailableError):
                await stream.terminate(from_host=False)

    async def _handshake(self, stream: PduStream) -> Connect:
        request, _ = await stream.receive()
        if request.kind != PduKind.IC_REQ or request.version != 0:
            raise ProtocolError("pdu.malformed", "a connection starts with ICReq, version 0")
        if request.alignment > 0:
            raise ProtocolError("pdu.malformed", "data alignment other than 4 is not offered")
        # Digests are asked for in bits 0 and 1; the response grants none.
        if request.digests & ~_DIGESTS:
            raise ProtocolError("pdu.malformed", "unknown digests asked for")
        await stream.send(_native.encode_ic_resp(H2C_DATA_BYTES))
        capsule, data = await stream.receive()
        if capsule.kind != PduKind.CAPSULE_CMD:
            raise ProtocolError("connect.expected", "the first capsule must be Connect")
        return decode_connect(capsule.entry, data)

    async def _serve_admin(self, stream: PduStream, connect: Connect) -> None:
        exported = await self._checked(stream, connect)
        controller_id = next(
            (cid for cid in range(1, _CONTROLLERS_MAX) if cid not in self._associations), None
        )
        if controller_id is None:
            raise UnavailableError("connect.busy", "no controller id is free")
        association = Association(
            association_id=next(self._association_ids),
            controller_id=controller_id,
            host_nqn=connect.host_nqn,
            host_id=connect.host_id,
            exported=exported,
            admin=AdminController(
                exported.subsystem,
                controller_id=controller_id,
                keep_alive_ms=connect.keep_alive_ms,
            ),
            task=asyncio.current_task(),
        )
        self._associations[controller_id] = association
        try:
            await stream.send(_response(connect.command_id, result=controller_id))
            await self._admin_loop(stream, association)
        finally:
            association.is_closed = True
            del self._associations[controller_id]
            await exported.association_closed(association.association_id)

    async def _admin_loop(self, stream: PduStream, association: Association) -> None:
        while True:
            keep_alive = association.admin.keep_alive_ms
            async with asyncio.timeout(keep_alive / 1000 if keep_alive else None):
                capsule, data = await stream.receive()
            if capsule.kind != PduKind.CAPSULE_CMD or data:
                raise ProtocolError("pdu.malformed", "an admin queue takes commands without data")
            answer = association.admin.handle(capsule.entry)
            if answer is None:
                continue
            parts = [_native.encode_capsule_resp(answer.completion)]
            if answer.data:
                parts.insert(0, _native.encode_c2h_data(answer.command_id, answer.data))
            await stream.send(*parts)

    async def _serve_io(self, stream: PduStream, connect: Connect) -> None:
        exported = await self._checked(stream, connect)
        admission: Admission | None = None
        answered = False
        try:
            association = self._associate(exported, connect)
            async with asyncio.timeout(_ADMIT_SECONDS):
                admission = await exported.admit(association, connect)
            if self._associations.get(association.controller_id) is not association:
                raise UnavailableError("connection.lost", "the association ended meanwhile")
            association.queue_ids.add(connect.queue_id)
            answered = True
            await stream.send(_response(connect.command_id, result=association.controller_id))
            if self._associations.get(association.controller_id) is association:
                admission.start(stream.socket.fileno())
                admission = None
        except ConnectRefusedError as error:
            await self._refuse(stream, connect, exported, error)
        except (Error, TimeoutError) as error:
            reason = error.reason if isinstance(error, Error) else "connect.timeout"
            refused = ConnectRefusedError(
                reason,
                str(error) or "preparing the queue took too long",
                status=Status.CONNECT_BUSY,
            )
            if answered:
                exported.refused(refused, connect)  # a second answer would be a lie: just close
            else:
                await self._refuse(stream, connect, exported, refused)
        finally:
            if admission is not None:
                admission.close()

    async def _checked(self, stream: PduStream, connect: Connect) -> Exported:
        exported = self._provider.find(connect.subsystem_nqn)
        if exported is None:
            error = ConnectRefusedError(
                "connect.subsystem",
                f"no subsystem {connect.subsystem_nqn!r} here",
                status=Status.CONNECT_PARAMETERS,
                result=256 | 1 << 16,
            )
            await self._refuse(stream, connect, None, error)
        elif not exported.allows(connect.host_nqn):
            error = ConnectRefusedError(
                "connect.host",
                f"host {connect.host_nqn!r} may not use {connect.subsystem_nqn}",
                status=Status.CONNECT_HOST,
            )
            await self._refuse(stream, connect, exported, error)
        elif connect.record_format != 0:
            error = ConnectRefusedError(
                "connect.format",
                f"record format {connect.record_format}; allowed: 0",
                status=Status.CONNECT_FORMAT,
            )
            await self._refuse(stream, connect, exported, error)
        elif connect.queue_id == 0 and connect.controller_id != DYNAMIC_CONTROLLER:
            error = _bad_field("controller id", connect.controller_id, offset=16 | 1 << 16)
            await self._refuse(stream, connect, exported, error)
        elif not 2 <= connect.queue_size <= QUEUE_DEPTH_MAX:
            error = _bad_field("queue size", connect.queue_size, offset=44)
            await self._refuse(stream, connect, exported, error)
        else:
            return exported
        raise error

    def _associate(self, exported: Exported, connect: Connect) -> Association:
        association = self._associations.get(connect.controller_id)
        same = association is not None and (
            association.exported is exported
            and association.host_nqn == connect.host_nqn
            and association.host_id == connect.host_id
        )
        if association is None or not same:
            raise _bad_field("controller id", connect.controller_id, offset=16 | 1 << 16)
        allowed = 1 <= connect.queue_id <= association.admin.queue_count
        if not allowed or connect.queue_id in association.queue_ids:
            raise _bad_field("queue id", connect.queue_id, offset=42)
        if not association.admin.is_ready:
            raise ConnectRefusedError(
                "connect.sequence", "the controller isn't enabled", status=Status.SEQUENCE_ERROR
            )
        return association

    async def _refuse(
        self,
        stream: PduStream,
        connect: Connect,
        exported: Exported | None,
        error: ConnectRefusedError,
    ) -> None:
        if exported is not None:
            exported.refused(error, connect)
        await stream.send(
            _response(connect.command_id, status=int(error.status), result=error.result)
        )


def _bad_field(name: str, value: int, *, offset: int) -> ConnectRefusedError:
    return ConnectRefusedError(
        "connect.parameter",
        f"{name} {value} can't be used",
        status=Status.CONNECT_PARAMETERS,
        result=offset,
    )


def _response(command_id: int, *, status: int = 0, result: int = 0) -> bytes:
    return _native.encode_capsule_resp(encode_completion(command_id, status=status, result=result))
