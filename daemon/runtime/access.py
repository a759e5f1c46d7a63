"""Who may call this daemon on its Unix sockets: operators, jobs and readers (decision 118).

A process is known by its effective uid, its effective gid and its supplementary groups, as the
kernel recorded them at its connect(2). The kernel's record is not changed by what the process does
later, and needs neither its process id nor a list of users.
"""

import time
from collections.abc import Callable

from sealane.daemon.runtime.door import Caller
from sealane.daemon.runtime.line_limit import LineLimit
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.overflow_ids import overflow_ids
from sealane.daemon.runtime.parties import MembersOf, Party
from sealane.errors import VerificationError

Parties = frozenset[Party]
PartiesNow = Callable[[], Parties]
"""Returns what a connected caller is at present, which a reload may change."""


def only_operators() -> Parties:
    """Return the parties of a caller of the daemon's own socket: its own user, or root."""
    return frozenset({Party.OPERATOR})


class Access:
    """Decides what the callers of the shared sockets are, by the lists now in force."""

    def __init__(
        self, members: MembersOf, *, overflow: Callable[[], tuple[int, int]] = overflow_ids
    ) -> None:
        self._members = members
        self._overflow_uid, self._overflow_gid = overflow()

    def replace(self, members: MembersOf) -> None:
        """Decide by these lists from now on, also about callers that are connected."""
        self._members = members

    def admit(self, caller: Caller) -> None:
        """Raise VerificationError unless the caller is of any party.

        `door.user.unmapped` for a user whom this daemon's user namespace doesn't map: all of them
        have the same number here, so they can't be told apart. `door.user.refused` for any other.
        """
        self._require(caller, frozenset(Party))

    def admit_job(self, caller: Caller) -> None:
        """Raise the same unless the caller is a job or an operator."""
        self._require(caller, frozenset({Party.JOB, Party.OPERATOR}))

    def _require(self, caller: Caller, wanted: Parties) -> None:
        if caller.user == self._overflow_uid:
            raise VerificationError(
                "door.user.unmapped",
                f"the daemon's user namespace doesn't map your user: it has the number "
                f"{caller.user}, as all users that aren't mapped",
            )
        if not self.parties_of(caller)() & wanted:
            raise VerificationError(
                "door.user.refused",
                f"neither user {caller.user} nor a group of this process is listed for this socket",
            )

    def parties_of(self, caller: Caller) -> PartiesNow:
        """Return what tells, at any later time, of which parties this connection's process is."""
        uid = caller.user
        if uid == self._overflow_uid:
            return frozenset
        gids = caller.groups - {self._overflow_gid}

        def now() -> Parties:
            return frozenset(
                party
                for party, members in self._members.items()
                if uid in members.uids or gids & members.gids
            )

        return now


class RefusedCallers:
    """Counts refused callers and logs a limited number of them, as they may retry forever."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = metrics.job_callers_refused
        self._limit = LineLimit(clock=clock)

    def note(self, caller: Caller, error: VerificationError) -> None:
        """Count one, and log it if few were logged in this period."""
        self._count.labels(error.reason).inc()
        if self._limit.allow():
            get_logger().warning(
                "job_caller_refused",
                uid=caller.user,
                process=caller.process,
                reason=error.reason,
                message=error.args[0],
            )
