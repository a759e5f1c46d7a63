"""Puts calls that were refused into the audit log; what was granted the service records itself."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from sealane.crypto.audit import Detail
from sealane.daemon.broker.audit import Audit
from sealane.daemon.clock import utc_now
from sealane.daemon.logs import get_logger
from sealane.errors import Error, UnavailableError
from sealane.transport.tasks import TaskOwner

TEXT_MAX: Final = 128  # characters of a caller's text that the log keeps
SUMMARY_SECONDS: Final = 60.0
"""How often calls that were refused alike are summed up."""
KINDS_MAX: Final = 64
"""Callers and reasons told apart in that time: some 100 MB of records a day at the most."""
_OTHERS: Final = ("others", "call.refused")


@contextlib.asynccontextmanager
async def refusals_recorded(
    audit: Audit, kind: str, *, subject: str, **detail: Detail
) -> AsyncIterator[None]:
    """Record that the block was refused, or failed, if it was; before the answer leaves.

    UnavailableError `audit.unwritable` takes the place of the answer if it can't be recorded.
    """
    try:
        yield
    except Error as error:
        asked = {k: v[:TEXT_MAX] if isinstance(v, str) else v for k, v in detail.items()}
        await audit.record(
            kind,
            subject=subject,
            outcome="failed" if isinstance(error, UnavailableError) else "refused",
            reason=error.reason,
            **asked,
        )
        raise


@dataclass(slots=True, kw_only=True)
class _Alike:
    """Calls of one caller that were refused for one reason, behind the first of them."""

    method: str
    first: dt.datetime
    last: dt.datetime
    count: int = 0


class CallRefusals:
    """Calls that didn't pass the checks of every call (sealane.daemon.calls), kept within bounds.

    Anybody can make such calls as fast as the network carries them. The first of a caller for a
    reason is recorded before it is answered; those that follow are counted, and recorded as one
    with the times of the first and the last when the minute is over. Beyond KINDS_MAX kinds in a
    minute, callers and reasons are recorded as `others`.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._alike: dict[tuple[str, str], _Alike] = {}
        self._tasks = TaskOwner()
        self._summing: asyncio.Task[None] | None = None

    async def note(self, method: str, subject: str, reason: str) -> None:
        """Record or count a refused call; UnavailableError `audit.unwritable`."""
        now = utc_now()
        key = (subject, reason)
        if key not in self._alike and len(self._alike) >= KINDS_MAX:
            key = _OTHERS
        alike = self._alike.get(key)
        if alike is not None:
            alike.first = alike.first if alike.count else now
            alike.count, alike.last = alike.count + 1, now
            return
        self._alike[key] = _Alike(method=method, first=now, last=now)
        if self._summing is None or self._summing.done():
            self._summing = self._tasks.start(self._keep_summing(), name="call-refusals")
        await self._audit.record(
            "call", subject=key[0], outcome="refused", reason=key[1], method=method
        )

    async def close(self) -> None:
        """Record what was counted since the last minute."""
        await self._tasks.close()
        await self._sum_up()

    async def _keep_summing(self) -> None:
        while self._alike:
            await asyncio.sleep(SUMMARY_SECONDS)
            await self._sum_up()

    async def _sum_up(self) -> None:
        try:
            for subject, reason in [*self._alike]:
                alike = self._alike.pop((subject, reason))
                if alike.count:
                    await self._audit.record(
                        "call",
                        subject=subject,
                        outcome="refused",
                        reason=reason,
                        method=alike.method,
                        count=alike.count,
                        first=alike.first.isoformat(),
                        last=alike.last.isoformat(),
                    )
        except UnavailableError as error:
            # Nothing at all is granted from now on: whoever asks hears it.
            get_logger().error("refusals_not_recorded", reason=error.reason)
