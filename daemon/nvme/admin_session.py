"""Serves one admin queue: commands, events, time limit of authentication, keep-alive."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from sealane.daemon.nvme.authenticating import SEQUENCE_ERROR, send_answer
from sealane.daemon.nvme.exported import Association
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.nvme.command import Answer
from sealane.protocol.nvme.constants import PduKind
from sealane.protocol.nvme.properties import Transition
from sealane.transport.nvme.stream import DataDigestFaultError, PduFaultError, PduStream
from sealane.transport.tasks import TaskOwner

AUTHENTICATION_SECONDS = 30.0
# Limit for an answer that the host doesn't receive: its window is closed, or the network is down.
SEND_SECONDS = 30.0
# Limit for a discovery controller without keep-alive (NVMe Base 2.0 §3.1.2.3: at least two
# minutes).
DISCOVERY_VISIT_SECONDS = 120.0


class KeepAliveExpiredError(UnavailableError):
    """The host was silent for longer than its keep-alive time-out."""


class AdminSession:
    """One admin queue, from its Connect to its end."""

    def __init__(
        self,
        stream: PduStream,
        association: Association,
        *,
        on_stopped: Callable[[Association], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._association = association
        self._admin = association.admin
        self._on_stopped = on_stopped
        self._due = asyncio.Event()
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._limit: float | None = None
        self._timer = self._loop.call_soon(lambda: None)

    @property
    def is_left(self) -> bool:
        """True if the host has closed the connection, even if that wasn't noticed here yet."""
        return self._stream.is_left

    def wake(self) -> None:
        """Send the events that are now due."""
        self._due.set()

    async def run(self) -> None:
        """Serve until the queue ends, which raises an error of `sealane.errors` or TimeoutError."""
        if not self._admin.is_authenticated:
            async with asyncio.timeout(AUTHENTICATION_SECONDS):
                while not self._admin.is_authenticated:
                    await self._step()
        events = TaskOwner()
        events.start(self._push_events(), name="nvme-events")
        try:
            async with asyncio.timeout(None) as patience:
                self._watch(patience)
                while True:
                    await self._step()
                    if self._limit != self._patience_seconds():
                        self._watch(patience)
        except TimeoutError:
            raise KeepAliveExpiredError(
                "keep_alive.expired",
                f"host {self._association.host_nqn} sent nothing within its keep-alive time-out",
            ) from None
        finally:
            self._timer.cancel()
            await events.close()

    async def _step(self) -> None:
        try:
            capsule, data = await self._stream.receive()
        except DataDigestFaultError as error:
            self._heard = self._loop.time()
            await self._send(self._admin.refuse(error.header.entry))
            return
        self._heard = self._loop.time()
        if capsule.kind == PduKind.H2C_TERM:
            raise UnavailableError(
                "connection.terminated",
                f"the host ended the connection with fatal status {capsule.cid}",
            )
        if capsule.kind != PduKind.CAPSULE_CMD:
            raise PduFaultError(
                f"PDU type {capsule.kind:#04x} on an admin queue", fatal_status=SEQUENCE_ERROR
            )
        answer = self._admin.handle(capsule.entry, data)
        transition = self._admin.take_transition()
        if transition in {Transition.RESET, Transition.SHUT_DOWN}:
            await self._on_stopped(self._association)
        if answer is not None:
            await self._send(answer)
        if self._admin.is_ending:
            raise VerificationError(
                "authentication.failed",
                f"host {self._association.host_nqn} failed to authenticate",
            )
        self._due.set()

    async def _push_events(self) -> None:
        # If the connection fails or stalls here, the reader notices that, too, unless it has ended.
        with contextlib.suppress(UnavailableError):
            while True:
                await self._due.wait()
                self._due.clear()
                while (answer := self._admin.next_answer()) is not None:
                    await self._send(answer)

    async def _send(self, answer: Answer) -> None:
        try:
            async with self._turn, asyncio.timeout(SEND_SECONDS):
                await send_answer(self._stream, answer)
        except TimeoutError:
            # Half a PDU may have been sent, so this connection can't be used any further.
            self._stream.abort()
            raise UnavailableError(
                "connection.stalled", f"the host received no answer for {SEND_SECONDS:g} s"
            ) from None

    def _watch(self, patience: asyncio.Timeout) -> None:
        """Expire `patience` if the host was silent for too long; else check again in due time.

        Traffic on I/O queues counts like a Keep Alive command (traffic-based keep-alive).
        """
        self._timer.cancel()
        self._limit = self._patience_seconds()
        if self._limit is None:
            return
        now = self._loop.time()
        silent = now - self._heard
        idle_ms = self._association.exported.idle_ms(self._association.association_id)
        if idle_ms is not None:
            silent = min(silent, idle_ms / 1000)
        if silent >= self._limit:
            patience.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._limit - silent, self._watch, patience)

    def _patience_seconds(self) -> float | None:
        keep_alive = self._admin.keep_alive_ms
        if keep_alive:
            return keep_alive / 1000
        return (
            DISCOVERY_VISIT_SECONDS if self._association.exported.subsystem.is_discovery else None
        )
