"""Which users may be jobs of a fabric: those of `fabric.jobs`, as the kernel names them."""

import time
from collections.abc import Callable, Iterable
from typing import Final

from sealane.daemon.runtime.door import Caller
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.overflow_ids import overflow_ids
from sealane.errors import VerificationError

LINES_MAX: Final = 10
"""Refused callers logged in a period; the metric counts all of them."""
PERIOD_SECONDS: Final = 60.0


class AdmittedUsers:
    """The users and groups of `fabric.jobs`.

    A process is admitted by its effective uid, its effective gid, or a supplementary group, as they
    were when it connected. Without any user or group configured, nobody is.
    """

    def __init__(
        self,
        *,
        uids: Iterable[int],
        groups: Iterable[int],
        overflow: Callable[[], tuple[int, int]] = overflow_ids,
    ) -> None:
        self._uids = frozenset(uids)
        self._groups = frozenset(groups)
        self._overflow_uid, self._overflow_gid = overflow()

    def admit(self, caller: Caller) -> None:
        """Raise VerificationError unless the caller may be a job.

        `session.user.unmapped` for a user whom this daemon's user namespace doesn't map: all of
        them have the same number here, so they can't be told apart.
        `session.user.refused` for any other.
        """
        if caller.user == self._overflow_uid:
            raise VerificationError(
                "session.user.unmapped",
                f"the daemon's user namespace doesn't map your user: it has the number "
                f"{caller.user}, as all users that aren't mapped",
            )
        if caller.user in self._uids:
            return
        if self._groups and self._groups & (caller.groups - {self._overflow_gid}):
            return
        raise VerificationError(
            "session.user.refused",
            f"neither user {caller.user} nor a group of this process is one of fabric.jobs",
        )


class RefusedCallers:
    """Counts refused callers and logs a limited number of them, as they may retry forever."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = metrics.job_callers_refused
        self._clock = clock
        self._period_ends = float("-inf")
        self._lines = 0

    def note(self, caller: Caller, error: VerificationError) -> None:
        """Count one, and log it if few were logged in this period."""
        self._count.labels(error.reason).inc()
        now = self._clock()
        if now >= self._period_ends:
            self._period_ends, self._lines = now + PERIOD_SECONDS, 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            get_logger().warning(
                "job_caller_refused",
                uid=caller.user,
                process=caller.process,
                reason=error.reason,
                message=error.args[0],
            )
