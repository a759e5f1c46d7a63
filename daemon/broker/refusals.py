"""Records refusals in the audit log, within limits; services record their grants themselves."""

import asyncio
import contextlib
import datetime as dt
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from sealane.crypto.audit import Detail, Head, Outcome
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.peers import prefix_of
from sealane.daemon.runtime.authorizers import UNKNOWN_CALLER
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UnavailableError
from sealane.transport.tasks import TaskOwner

TEXT_MAX: Final = 128  # characters of a caller's text that the log keeps
SUMMARY_SECONDS: Final = 60.0
"""Interval at which similar refusals are summed up."""
KINDS_MAX: Final = 64
"""Kinds of refusals that are distinguished per interval: at most some 100 MB of records a day."""
STRANGER_KINDS_MAX: Final = 16
"""How many of these callers without an attested identity may use: some 27 MB a day."""
CALLER_KINDS_MAX: Final = 8
"""How many of these one attested caller may use."""

_OTHERS: Final = "others"
_STRANGERS: Final = "strangers"
_REASON: Final = "call.refused"
_SUMMED_DETAIL: Final = ("method", "address")


@contextlib.asynccontextmanager
async def refusals_recorded(
    audit: Audit, kind: str, *, subject: str, **detail: Detail
) -> AsyncIterator[None]:
    """Record that the block was refused or failed, before the response is sent.

    UnavailableError `audit.unwritable` replaces the response if it can't be recorded.
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
    """Similar refusals that followed the first one."""

    kind: str
    subject: str
    outcome: Outcome
    reason: str
    detail: dict[str, Detail]
    first: dt.datetime
    last: dt.datetime
    count: int = 0


_Key: TypeAlias = tuple[str, str, str, str]


class SummedAudit:
    """An audit log that records refusals within limits, and everything else as is.

    Anyone can be refused as fast as the network allows. The first refusal of a kind is recorded
    before it is answered. Similar ones are counted, and recorded as one at the end of the minute,
    with the times of the first and the last. Refusals are similar if caller, reason and kind of
    call are the same; for an attested caller also the requested object. A caller without
    attestation is identified by its address prefix, whatever name it claims; all such callers
    together have `STRANGER_KINDS_MAX` of the kinds, so they can't crowd out attested ones.
    """

    def __init__(self, log: Audit) -> None:
        self._log = log
        self._alike: dict[_Key, _Alike] = {}
        self._strangers = 0
        self._of_caller: Counter[str] = Counter()
        self._tasks = TaskOwner()
        self._summing: asyncio.Task[None] | None = None

    @property
    def head(self) -> Head:
        """See `Audit`."""
        return self._log.head

    async def refused_call(self, method: str, subject: str, reason: str) -> None:
        """Record a call that failed the checks of every call (sealane.daemon.runtime.calls)."""
        await self.record("call", subject=subject, outcome="refused", reason=reason, method=method)

    async def record(
        self, kind: str, *, subject: str, outcome: Outcome, reason: str = "", **detail: Detail
    ) -> None:
        """See `Audit.record`."""
        if outcome not in {"refused", "failed"}:
            await self._log.record(kind, subject=subject, outcome=outcome, reason=reason, **detail)
            return
        now = utc_now()
        key, subject = self._key(kind, subject, reason, detail)
        alike = self._alike.get(key)
        if alike is not None:
            alike.first = alike.first if alike.count else now
            alike.count, alike.last = alike.count + 1, now
            return
        kind, reason = key[0], key[2]
        self._alike[key] = _Alike(
            kind=kind,
            subject=subject,
            outcome=outcome,
            reason=reason,
            detail={name: detail[name] for name in _SUMMED_DETAIL if name in detail},
            first=now,
            last=now,
        )
        if self._summing is None or self._summing.done():
            self._summing = self._tasks.start(self._keep_summing(), name="refusals")
        await self._log.record(kind, subject=subject, outcome=outcome, reason=reason, **detail)

    async def close(self) -> None:
        """Record the refusals counted since the last minute."""
        await self._tasks.close()
        await self._sum_up()

    def _key(
        self, kind: str, subject: str, reason: str, detail: Mapping[str, Detail]
    ) -> tuple[_Key, str]:
        """Return the key that similar refusals share, and the subject to record."""
        is_stranger = "address" in detail or subject == UNKNOWN_CALLER
        caller = prefix_of(str(detail.get("address", subject))) if is_stranger else subject
        asked = "" if is_stranger else repr(sorted(detail.items()))
        key = (kind, caller, reason, asked)
        if key in self._alike:
            return key, subject
        if is_stranger:
            if self._strangers < STRANGER_KINDS_MAX:
                self._strangers += 1
                return key, subject
            return ("call", _STRANGERS, _REASON, ""), _STRANGERS
        if self._of_caller[caller] < CALLER_KINDS_MAX and (
            self._of_caller.total() < KINDS_MAX - STRANGER_KINDS_MAX
        ):
            self._of_caller[caller] += 1
            return key, subject
        return ("call", _OTHERS, _REASON, ""), _OTHERS

    async def _keep_summing(self) -> None:
        while self._alike:
            await asyncio.sleep(SUMMARY_SECONDS)
            await self._sum_up()

    async def _sum_up(self) -> None:
        self._strangers = 0
        self._of_caller.clear()
        summed, self._alike = self._alike, {}
        try:
            for alike in summed.values():
                if alike.count:
                    await self._log.record(
                        alike.kind,
                        subject=alike.subject,
                        outcome=alike.outcome,
                        reason=alike.reason,
                        **alike.detail,
                        count=alike.count,
                        first=alike.first.isoformat(),
                        last=alike.last.isoformat(),
                    )
        except UnavailableError as error:
            # Nothing at all is granted from now on, and every caller gets an error.
            get_logger().error("refusals_not_recorded", reason=error.reason)
