"""The anchor of a device as seen by its users, each of which has one record in it.

Group commits of many volumes arrive concurrently. While a call to the anchor is in flight, new
states queue, a newer state of a record replaces an older one, and all of them go with the next
call. A call whose outcome is unknown is repeated until it is known.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sealane.daemon.device.anchors.anchor import CHANGES_MAX, FAILED, Anchor, Anchored, Change
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, Reason, UnavailableError
from sealane.transport.tasks import TaskOwner

ANCHOR_SECONDS: Final = 6.0
"""How long `advance` waits before it fails; less than the timeout of a target's callers."""
_RETRY_SECONDS: Final = 0.25


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """The newest state of a record (None: remove it), and the waiters for it or an older state."""

    record: Anchored | None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class DeviceAnchors:
    """The records of one open device; created on a running event loop, not thread-safe.

    `spacing_seconds` is for anchors that wear out (`tpm2`): records are anchored only at this
    interval, and `advance` doesn't wait unless called with `at_once`. States that are not anchored
    yet are lost if this process ends. `lost` is called once, with the reason why nothing can be
    anchored any longer.
    """

    def __init__(
        self,
        anchor: Anchor,
        *,
        spacing_seconds: float = 0.0,
        timeout_seconds: float = ANCHOR_SECONDS,
        lost: Callable[[Error], None] | None = None,
    ) -> None:
        self._anchor = anchor
        self._spacing_seconds = spacing_seconds
        self._timeout_seconds = timeout_seconds
        self._lost = lost
        self._records = {name: _bare(record) for name, record in anchor.records.items()}
        self._floor = anchor.floor
        self._queued: dict[str, _Wanted] = {}
        self._sending: dict[str, _Wanted] = {}
        self._failure: Error | None = None
        self._is_ending = False
        self._hurry = asyncio.Event()
        self._tasks = TaskOwner()
        self._is_working = False

    def current(self, name: str) -> tuple[int, bytes] | None:
        """Return number and blob of the anchored record `name`, or None."""
        record = self._records.get(name)
        return None if record is None else (record.number, record.blob)

    def base(self, name: str) -> int:
        """Return the number that the next state of a record must exceed.

        For a record that doesn't exist: above the numbers of all records that were or are being
        removed.
        """
        newest = self._queued.get(name) or self._sending.get(name)
        record = self._records.get(name) if newest is None else newest.record
        if record is not None:
            return record.number
        requested = {**self._sending, **self._queued}
        going = [self._reached(each) for each, wanted in requested.items() if wanted.record is None]
        return max(self._floor, *going, 0)

    async def advance(self, name: str, number: int, blob: bytes, *, at_once: bool = False) -> None:
        """Anchor `blob` (1…128 bytes) as state `number` (1…2^64 - 1, increasing) of a record.

        Once this returns, no older state of it is accepted, except with `spacing_seconds`.
        UsageError `anchor.order`, `anchor.range`. UnavailableError `anchor.timeout`: it may still
        be anchored, now or later, unless a newer state is requested before; `anchor.failed`, or the
        error that `lost` was called with: nothing is anchored any longer.
        """
        await self._request(name, Anchored(number=number, blob=blob), at_once=at_once)

    async def reach(self, name: str, number: int, blob: bytes) -> None:
        """Anchor `blob` at once, as `advance`; after `anchor.timeout` a repeated call waits on.

        For callers that need to know whether exactly this state is anchored.
        """
        requested = self._queued.get(name) or self._sending.get(name)
        record = Anchored(number=number, blob=blob)
        if requested is not None and requested.record == record:
            self._hurry.set()
            await self._wait(_awaited(requested))
        elif self._records.get(name) != record:
            await self._request(name, record, at_once=True)

    async def forget(self, name: str) -> None:
        """Remove a record permanently; errors as `advance`. Idempotent."""
        await self._request(name, None, at_once=False)

    async def settle(self) -> None:
        """Wait until all requested states are anchored; errors as `advance`."""
        requested = [
            _awaited(wanted) for wanted in (*self._sending.values(), *self._queued.values())
        ]
        self._hurry.set()
        for settled in requested:
            await self._wait(settled)

    def begin_end(self) -> None:
        """Let the next timeout be the last: a shutdown must not wait for every record."""
        self._is_ending = True

    async def close(self) -> None:
        """Anchor the requested states if possible within the time limit, and release the anchor."""
        try:
            if self._failure is None:
                await self.settle()
        except Error as error:
            get_logger().error("not_anchored", reason=error.reason, message=str(error.args[0]))
        finally:
            self._lost = None
            await self._tasks.close()
            self._fail(UnavailableError(FAILED, "the device is closed"))
            await self._anchor.close()

    async def _request(self, name: str, record: Anchored | None, *, at_once: bool) -> None:
        if self._failure is not None:
            raise self._failure
        newest = self._queued.get(name) or self._sending.get(name)
        before = self._records.get(name) if newest is None else newest.record
        # Checks that the name is valid and the number increases, before anything is queued.
        Change(name=name, expected=self._expected(name, before, record), record=record)
        wanted = self._queued.setdefault(name, _Wanted(record=record))
        wanted.record = record
        if at_once:
            self._hurry.set()
        if not self._is_working:
            self._is_working = True
            self._tasks.start(self._work(), name="anchor")
        if at_once or not self._spacing_seconds:
            await self._wait(_awaited(wanted))

    async def _wait(self, settled: asyncio.Future[None]) -> None:
        seconds = self._timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await settled
        except TimeoutError as error:
            if self._is_ending:
                self._timeout_seconds = 0.0
            raise UnavailableError(
                "anchor.timeout", f"the anchor was not updated within {seconds:g} s"
            ) from error

    async def _work(self) -> None:
        try:
            while self._queued:
                await self._pause()
                names = [*self._queued][:CHANGES_MAX]
                self._sending = {name: self._queued.pop(name) for name in names}
                if not self._queued:
                    self._hurry.clear()
                await self._send()
        except Error as error:
            self._end(error)
        finally:
            self._is_working = False
            if self._sending:
                self._end(UnavailableError(FAILED, "the update of the anchor was interrupted"))

    async def _pause(self) -> None:
        if self._spacing_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._spacing_seconds):
                    await self._hurry.wait()

    async def _send(self) -> None:
        changes = [
            Change(name=name, expected=self._number(name), record=wanted.record)
            for name, wanted in self._sending.items()
            if wanted.record != self._records.get(name)
        ]
        if changes:
            await self._repeat(changes)
        for change in changes:
            if change.record is None:
                self._floor = max(self._floor, self._records.pop(change.name).number)
            else:
                self._records[change.name] = change.record
        sent, self._sending = self._sending, {}
        for wanted in sent.values():
            _resolve(wanted, None)

    async def _repeat(self, changes: Sequence[Change]) -> None:
        """Request exactly these changes until their outcome is known."""
        reported: Reason | None = None
        while True:
            try:
                await self._anchor.advance(changes)
            except UnavailableError as error:
                if error.reason == FAILED:
                    raise
                if error.reason != reported:
                    reported = error.reason
                    get_logger().warning(
                        "anchor_unanswered", reason=error.reason, message=str(error)
                    )
            else:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    def _expected(self, name: str, before: Anchored | None, record: Anchored | None) -> int:
        """Return the number that the next state of a record must exceed, if any."""
        if before is None and record is None:
            return 0
        return self.base(name) if before is None else before.number

    def _reached(self, name: str) -> int:
        """Return the highest number that a record may have reached."""
        sending = self._sending.get(name)
        if sending is None or sending.record is None:
            return self._number(name)
        return sending.record.number

    def _number(self, name: str) -> int:
        record = self._records.get(name)
        return 0 if record is None else record.number

    def _end(self, error: Error) -> None:
        self._fail(error)
        if self._lost is not None:
            self._lost(error)

    def _fail(self, error: Error) -> None:
        self._failure = self._failure or error
        for wanted in (*self._sending.values(), *self._queued.values()):
            _resolve(wanted, self._failure)
        self._sending, self._queued = {}, {}


def _bare(record: Anchored) -> Anchored:
    """Return the record without its MAC, which the anchor adds itself."""
    return replace(record, mac=b"")


def _awaited(wanted: _Wanted) -> asyncio.Future[None]:
    settled = asyncio.get_running_loop().create_future()
    # Mark the exception as retrieved: there may be no waiter.
    settled.add_done_callback(lambda future: future.cancelled() or future.exception())
    wanted.waiting.append(settled)
    return settled


def _resolve(wanted: _Wanted, error: Error | None) -> None:
    for settled in wanted.waiting:
        if settled.done():
            continue  # the waiter was cancelled
        if error is None:
            settled.set_result(None)
        else:
            settled.set_exception(error)
