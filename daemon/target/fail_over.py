"""Fail-over groups: which of several gateways serves a volume to one host (fail-over.md).

A group has one serving gateway and a term, which grows with each take-over. Only the serving
gateway gets queues, and only in its term. A take-over is this order of events: nothing more is
admitted for the group; the last gateway's queues end, and nothing of them is in flight; the store
is flushed, so that its acknowledged writes don't depend on its journal; the new term is anchored;
only then does the next gateway get its first queue.

No term ends without that fence and flush. So a gateway that is refused may drop its journal, and a
group that nobody serves has no acknowledged write that isn't durable.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from sealane.crypto.queue import GROUP_BYTES, GroupClaim
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.failures import MOVED, ROLLED_BACK, STANDBY
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.kinds import TakeOverCause
from sealane.protocol.nvme.nqn import NQN_BYTES_MAX
from sealane.protocol.v1 import storage_pb2
from sealane.transport.tasks import TaskOwner

GROUPS_MAX: Final = 8
"""Groups of one volume and tenant: hosts that gateways of the tenant fail over for."""
TAKE_OVER_SECONDS_MIN: Final = 5.0
"""Shortest time between two take-overs of a group by different gateways."""
UNFLUSHED: Final = "queue.take_over.unflushed"
EARLY: Final = "queue.take_over.early"
PENDING: Final = "queue.take_over.pending"

Key = tuple[str, bytes]
"""Tenant and name of a group. Gateways of another tenant can't name this one's groups."""


class Volume(Protocol):
    """What a take-over needs of the volume."""

    def has_queues(self, host_nqn: str) -> bool:
        """Return whether queues of a gateway run or may start."""

    async def fence(self, host_nqn: str) -> None:
        """End a gateway's queues and tickets; return once none of its commands is in flight."""

    async def flush(self) -> None:
        """Make the store durable; UnavailableError if that fails."""

    async def keep(self, groups: storage_pb2.FailOverGroups) -> None:
        """Anchor the groups. After an error it is unknown whether they are."""

    def report(self, take_over: TakeOver) -> None:
        """Have brokers record that another gateway serves, or that a loss was accepted."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """A group; `host_nqn` is its serving gateway, empty if there is none."""

    host_nqn: str = ""
    term: int
    is_of_now: bool = False
    """Whether this target process has all that its gateway has acknowledged.

    One that began to serve before may have some in its journal only, until it has sent them again
    and says so.
    """
    is_changing: bool = False
    changed_at: float | None = None
    """When a gateway was last fenced."""
    fenced: str = ""
    """The gateway that served last, if nobody does since because `keep` has failed."""
    accepts_loss: bool = False
    """Whether a loss was accepted for a take-over in which `keep` has failed."""

    @property
    def is_durable(self) -> bool:
        """Whether a flush now makes all that was acknowledged durable."""
        return self.is_of_now or not self.host_nqn


@dataclass(slots=True, kw_only=True)
class _Running:
    """A change that is in progress, and what it will return."""

    claim: GroupClaim
    done: asyncio.Future[int]


class FailOver:
    """The fail-over groups of one volume."""

    def __init__(self, volume: Volume, *, now: Callable[[], float] = time.monotonic) -> None:
        self._volume = volume
        self._now = now
        self._groups: dict[Key, _Group] = {}
        self._newest_term = 0
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Of each tenant: none waits for another's fences."""
        self._keeping = asyncio.Lock()
        self._running: dict[tuple[Key, str], _Running] = {}
        self._tasks = TaskOwner()
        self._take_overs = 0
        self._refusals = 0

    def restore(self, kept: storage_pb2.FailOverGroups) -> None:
        """Continue with the groups of an earlier process, and their serving gateways.

        VerificationError `volume.descriptor.malformed` for groups that no target keeps.
        """
        for each in kept.groups:
            if len(each.group) != GROUP_BYTES or len(each.host_nqn.encode()) > NQN_BYTES_MAX:
                raise VerificationError(
                    "volume.descriptor.malformed", "a fail-over group of the file is malformed"
                )
            self._groups[each.tenant, each.group] = _Group(host_nqn=each.host_nqn, term=each.term)
        self._newest_term = max([kept.newest_term, *(each.term for each in kept.groups)])

    def kept(self) -> storage_pb2.FailOverGroups:
        """Return the groups, to be kept with the volume."""
        groups = [
            storage_pb2.FailOverGroup(
                tenant=tenant, group=name, host_nqn=group.host_nqn, term=group.term
            )
            for (tenant, name), group in self._groups.items()
        ]
        return storage_pb2.FailOverGroups(groups=groups, newest_term=self._newest_term)

    def state(self, key: Key) -> tuple[int, str]:
        """Return a group's term, and its serving gateway; empty: none."""
        group = self._groups.get(key)
        return (self._newest_term, "") if group is None else (group.term, group.host_nqn)

    def statistics(self) -> dict[str, int]:
        """Return take-overs, and queues refused to standbys, for the metrics."""
        return {"take_overs": self._take_overs, "standby_refusals": self._refusals}

    def require(self, key: Key, host_nqn: str, term: int) -> None:
        """Check that a gateway serves the group in this term.

        VerificationError `queue.standby` if it doesn't, `volume.rolled_back` if no gateway can have
        been let into this term; UnavailableError `queue.take_over.pending`.
        """
        group = self._groups.get(key)
        if group is not None and group.is_changing:
            raise UnavailableError(PENDING, "a take-over of the fail-over group is in progress")
        if term > self.state(key)[0]:
            # A gateway serves only in a term that is anchored, and terms grow.
            raise VerificationError(
                ROLLED_BACK,
                f"the gateway served in term {term}, which is later than {self.state(key)[0]}, the "
                "newest of the fail-over group: the target was rolled back to an older state",
            )
        if group is None or (group.host_nqn, group.term) != (host_nqn, term):
            self._refusals += 1
            raise VerificationError(
                STANDBY, "this gateway doesn't serve the fail-over group in this term: stand by"
            )

    def confirm(self, key: Key, host_nqn: str, term: int) -> None:
        """Note that this process has all that the serving gateway has acknowledged.

        Errors of `require`.
        """
        self.require(key, host_nqn, term)
        self._groups[key].is_of_now = True

    async def take_over(self, key: Key, host_nqn: str, claim: GroupClaim) -> int:
        """Make a gateway the serving one, after a fence; return the term in which it serves.

        VerificationError `queue.take_over.term` if the group isn't in the claim's term any more;
        UnavailableError `queue.take_over.early`, `queue.take_over.unflushed`, `queue.group.limit`,
        `queue.take_over.pending` if another change by this gateway is in progress; errors of
        `Volume`. What has begun is completed even if the caller is gone; a repeated call joins it.
        """
        return await self._complete(key, host_nqn, claim, self._take_over)

    async def release(self, key: Key, host_nqn: str, term: int) -> None:
        """End the term of a gateway whose acknowledged writes are durable: nobody serves then.

        Errors of `require` and `Volume`; `queue.take_over.pending` as for `take_over`.
        """
        claim = GroupClaim(group=key[1], term=term)
        await self._complete(key, host_nqn, claim, self._release)

    async def _complete(
        self,
        key: Key,
        host_nqn: str,
        claim: GroupClaim,
        change: Callable[[Key, str, GroupClaim], Awaitable[int]],
    ) -> int:
        name = (key, host_nqn)
        running = self._running.get(name)
        if running is None:
            self._check_term(key, claim)
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            running = self._running[name] = _Running(claim=claim, done=done)

            async def complete() -> None:
                try:
                    done.set_result(await change(key, host_nqn, claim))
                except Error as error:
                    done.set_exception(error)
                except BaseException as error:
                    done.set_exception(error)
                    raise
                finally:
                    del self._running[name]
                    # Whoever asked may be gone.
                    done.exception()

            self._tasks.start(complete(), name="take-over")
        elif running.claim != claim:
            raise UnavailableError(PENDING, "another claim of this gateway is in progress")
        return await asyncio.shield(running.done)

    async def _take_over(self, key: Key, host_nqn: str, claim: GroupClaim) -> int:
        async with self._turns[key[0]]:
            group = await self._claimed(key, claim)
            before = group.host_nqn
            if before and before != host_nqn:
                self._check(group, claim)
            group.is_changing = True
            try:
                await self._end_term(group)
                async with self._keeping:
                    # From here on the last gateway is out, whatever becomes of this take-over: it
                    # may be anchored although `keep` fails.
                    group.fenced = before or group.fenced
                    group.accepts_loss |= claim.accepts_loss
                    group.host_nqn, group.term = "", claim.term + 1
                    self._newest_term = max(self._newest_term, group.term)
                    await self._volume.keep(self._with(key, host_nqn))
                    group.host_nqn, group.is_of_now = host_nqn, True
                    taken = _taken(key, group, claim)
                    group.fenced, group.accepts_loss = "", False
            finally:
                group.is_changing = False
        is_fence = taken.fenced not in {"", host_nqn}
        if is_fence:
            group.changed_at = self._now()
        if is_fence or taken.accepts_loss:
            self._volume.report(taken)
        if before != host_nqn:
            self._take_overs += 1
        if before != host_nqn or taken.accepts_loss:
            get_logger().warning(
                "fail_over",
                tenant=key[0],
                gateway=host_nqn,
                fenced=taken.fenced,
                term=taken.term,
                cause=taken.cause,
                accepts_loss=taken.accepts_loss,
            )
        return taken.term

    async def _release(self, key: Key, host_nqn: str, claim: GroupClaim) -> int:
        async with self._turns[key[0]]:
            self.require(key, host_nqn, claim.term)
            await self._forget(key)
            async with self._keeping:
                await self._volume.keep(self.kept())
        return claim.term

    async def _end_term(self, group: _Group) -> None:
        """End all queues of the serving gateway; then make what it has acknowledged durable."""
        if group.host_nqn:
            # Also if the next one is a new process of the same gateway.
            await self._volume.fence(group.host_nqn)
            await self._volume.flush()

    def _check_term(self, key: Key, claim: GroupClaim) -> None:
        term = self.state(key)[0]
        if claim.term != term:
            raise VerificationError(
                MOVED, f"the claim is of term {claim.term}, and the group is in term {term}"
            )

    async def _claimed(self, key: Key, claim: GroupClaim) -> _Group:
        self._check_term(key, claim)
        group = self._groups.get(key)
        if group is None:
            await self._make_room(key[0], claim)
            group = self._groups[key] = _Group(term=self._newest_term)
        return group

    async def _make_room(self, tenant: str, claim: GroupClaim) -> None:
        """Forget the tenant's oldest unused group if there are too many; it is fenced first."""
        mine = [
            (not each.is_durable, each.term, key)
            for key, each in self._groups.items()
            if key[0] == tenant
        ]
        if len(mine) < GROUPS_MAX:
            return
        for may_lose, _, key in sorted(mine):
            unused = self._groups[key]
            is_allowed = claim.accepts_loss or not may_lose
            if is_allowed and not self._volume.has_queues(unused.host_nqn):
                await self._forget(key)
                unused.fenced = unused.host_nqn or unused.fenced
                unused.accepts_loss |= may_lose
                unused.host_nqn = ""
                ended = _taken(key, unused, claim)
                get_logger().warning(
                    "fail_over_group_forgotten",
                    tenant=tenant,
                    fenced=ended.fenced,
                    accepts_loss=ended.accepts_loss,
                )
                if ended.accepts_loss:
                    self._volume.report(ended)
                return
        raise UnavailableError(
            "queue.group.limit",
            f"a tenant has at most {GROUPS_MAX} fail-over groups of one volume in use: detach the "
            "volume from a host, or take over with accepted loss, which forgets an unused one",
        )

    async def _forget(self, key: Key) -> None:
        group = self._groups[key]
        group.is_changing = True
        try:
            await self._end_term(group)
            del self._groups[key]
        finally:
            group.is_changing = False

    def _check(self, group: _Group, claim: GroupClaim) -> None:
        if group.changed_at is not None:
            wait = group.changed_at + TAKE_OVER_SECONDS_MIN - self._now()
            if wait > 0:
                raise UnavailableError(
                    EARLY, f"the last take-over was a moment ago; allowed in {wait:.1f} s"
                )
        if not group.is_of_now and not claim.accepts_loss:
            raise UnavailableError(
                UNFLUSHED,
                f"the target has restarted since {group.host_nqn} began to serve: that gateway may "
                "keep acknowledged writes that the target lost; start it, or take over with "
                "accepted loss",
            )

    def _with(self, key: Key, host_nqn: str) -> storage_pb2.FailOverGroups:
        kept = self.kept()
        for each in kept.groups:
            if (each.tenant, each.group) == key:
                each.host_nqn = host_nqn
        return kept


def _taken(key: Key, group: _Group, claim: GroupClaim) -> TakeOver:
    """Return what to report of the group: who serves it since `claim`, and who served before."""
    return TakeOver(
        tenant=key[0],
        group=key[1],
        host_nqn=group.host_nqn,
        fenced=group.fenced,
        term=group.term,
        cause=TakeOverCause.OPERATOR if claim.by_operator else TakeOverCause.HOST,
        accepts_loss=group.accepts_loss,
    )


def kept_with(signed: bytes, groups: storage_pb2.FailOverGroups) -> bytes:
    """Return a volume's descriptor file: its signed descriptor, and its fail-over groups.

    The two messages share no field number, so each parses the file, and so do versions that know no
    groups.
    """
    return signed + groups.SerializeToString()
