"""Admin queue of a host: several commands in flight, answers matched by command id.

A command that timed out may still be executing, so a timeout ends the queue.
"""

import asyncio
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from sealane import _native
from sealane.errors import Error, ProtocolError, UnavailableError
from sealane.protocol.nvme.command import decode_completion
from sealane.protocol.nvme.constants import PduKind
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.exchange import HEADER_FIELD, SEQUENCE, Answer
from sealane.transport.nvme.stream import PduFaultError, PduStream
from sealane.transport.tasks import TaskOwner

ADMIN_QUEUE_SIZE = 32


@dataclass(slots=True)
class _Pending:
    answer: Answer
    ended: asyncio.Future[None]


class AdminQueue:
    """Executes admin commands; calls `lost` once if the connection ends without `close`.

    At most ADMIN_QUEUE_SIZE - 1 commands are in flight; further callers wait.
    """

    def __init__(
        self, stream: PduStream, *, timeout_seconds: float, lost: Callable[[Error], None]
    ) -> None:
        self._stream = stream
        self._timeout_seconds = timeout_seconds
        self._lost = lost
        self._pending: dict[int, _Pending] = {}
        self._room = asyncio.Semaphore(ADMIN_QUEUE_SIZE - 1)
        self._last_id = 0
        self._failure: Error | None = None
        self._tasks = TaskOwner()
        self._tasks.start(self._receive(), name="nvme-admin-queue")

    async def submit(
        self,
        entry: bytes,
        *,
        data: bytes = b"",
        room: int = 0,
        is_bounded: bool = True,
        timeout_seconds: float = math.inf,
    ) -> tuple[bytes, int]:
        """Execute one command; return its data and result.

        `timeout_seconds` replaces the queue's if it is shorter; `is_bounded` False: wait without a
        timeout (events). NvmeStatusError if the controller reports an error, UnavailableError if
        the queue ended.
        """
        await self._room.acquire()
        if self._failure is not None:
            self._room.release()
            raise UnavailableError(self._failure.reason, str(self._failure.args[0]))
        command_id = self._free_id()
        sent = bytearray(entry)
        struct.pack_into("<H", sent, 2, command_id)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The queue may fail after its caller was cancelled: mark the exception as retrieved.
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        pending = _Pending(Answer(command_id=command_id, room=room), ended)
        self._pending[command_id] = pending
        capsule = self._stream.encode_command(bytes(sent), data)
        seconds = min(timeout_seconds, self._timeout_seconds)
        try:
            async with asyncio.timeout(seconds if is_bounded else None):
                await self._send(capsule)
                await ended
        except TimeoutError:
            text = f"no answer to an admin command in {seconds:g} s"
            error = UnavailableError("connection.timeout", text)
            self._fail(error)
            raise error from None
        return bytes(pending.answer.data), pending.answer.result

    async def close(self) -> None:
        """Close without shutting the controller down; commands in flight fail."""
        try:
            await self._tasks.close()
        finally:
            # Also if the wait is cancelled.
            error = UnavailableError("connection.lost", "the admin queue was closed")
            self._fail(error, silent=True)
            self._stream.socket.close()

    async def _send(self, capsule: bytes) -> None:
        try:
            await self._stream.send(capsule)
        except UnavailableError as error:
            self._fail(error)
        except BaseException:
            # Part of the capsule may have been sent: nothing can follow it.
            self._fail(
                UnavailableError(
                    "connection.lost", "the admin queue ended while a command was being sent"
                )
            )
            raise

    async def _receive(self) -> None:
        try:
            while True:
                self._take(*await self._stream.receive())
        except ProtocolError as error:
            self._fail(error)
            fault = error if isinstance(error, PduFaultError) else None
            await self._stream.farewell(from_host=True, fault=fault)
        except UnavailableError as error:
            self._fail(error)

    def _take(self, header: _native.PduHeader, payload: bytes) -> None:
        if header.kind == PduKind.C2H_TERM:
            raise ProtocolError(
                "pdu.terminated", f"the controller ended the connection: error {header.cid:#x}"
            )
        if header.kind not in {PduKind.CAPSULE_RESP, PduKind.C2H_DATA}:
            raise PduFaultError(f"unexpected PDU {header.kind:#04x}", fatal_status=SEQUENCE)
        command_id = header.cid
        if header.kind == PduKind.CAPSULE_RESP:
            command_id = decode_completion(header.entry)[0]
        pending = self._pending.get(command_id)
        if pending is None:
            # Offset of the command id in a completion entry, or in a data header.
            offset = 20 if header.kind == PduKind.CAPSULE_RESP else 8
            raise PduFaultError(
                f"a completion for unknown command id {command_id}",
                fatal_status=HEADER_FIELD,
                offset=offset,
            )
        try:
            is_complete = pending.answer.take(header, payload)
        except NvmeStatusError as error:
            self._end(command_id, pending, error)
        else:
            if is_complete:
                self._end(command_id, pending, None)

    def _end(self, command_id: int, pending: _Pending, error: Error | None) -> None:
        # Only now has the controller released the id, even if the caller was cancelled long ago.
        del self._pending[command_id]
        self._room.release()
        if pending.ended.done():
            return
        if error is None:
            pending.ended.set_result(None)
        else:
            pending.ended.set_exception(error)

    def _fail(self, error: Error, *, silent: bool = False) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for command_id, pending in list(self._pending.items()):
            self._end(command_id, pending, UnavailableError(error.reason, str(error.args[0])))
        if not silent:
            self._lost(error)

    def _free_id(self) -> int:
        """Pick a command id that isn't in flight, including commands of cancelled callers."""
        for _ in range(0x10000):
            self._last_id = (self._last_id + 1) & 0x7FFF
            if self._last_id not in self._pending:
                return self._last_id
        raise UnavailableError("connection.busy", "all command ids are in flight")
