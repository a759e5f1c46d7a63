"""Drain of a daemon before planned maintenance (docs/operate/draining.md).

Each role refuses what is new, asks those who use it to leave, and waits until nothing is in use.
The drain belongs to this process: the next one serves.
"""

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from prometheus_client import Gauge

from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, UsageError
from sealane.transport.tasks import TaskOwner

TIMEOUT_SECONDS: Final = 30.0
"""Time for what is in use to end, unless the operator says otherwise."""
TIMEOUT_SECONDS_MAX: Final = 86_400.0
POLL_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 1.0
"""Time between a role's drain that failed and the next."""


class DrainState(StrEnum):
    """State of a daemon's drain."""

    SERVING = "serving"
    DRAINING = "draining"
    OVERDUE = "overdue"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Something still in use: which volume, namespace or sessions, and, for people, by whom.

    `ends`: by itself within seconds, even if those who use it do nothing.
    """

    role: str
    name: str
    detail: str
    ends: bool


class DrainedRole(Protocol):
    """A role that can be drained."""

    @property
    def services(self) -> Sequence[str]:
        """Local gRPC services that aren't healthy during a drain."""

    def begin_drain(self) -> None:
        """Refuse what is new from now on, and ask those who use the role to leave. Idempotent."""

    def uses(self) -> list[Use]:
        """Return what is still in use."""

    async def drain(self, seconds_left: Callable[[], float]) -> None:
        """Return once nothing is in use; `seconds_left` is 0 when the time is over."""

    async def end_drain(self) -> None:
        """Serve again. Idempotent."""


def refuse_new(what: str) -> UnavailableError:
    """Return the refusal of something new, such as "attachments", during a drain."""
    return UnavailableError(
        "node.draining",
        f"this node is being drained and takes no new {what}: use another node, or end the drain "
        "with sealanectl node undrain",
    )


class NodeDrain:
    """The drain of all roles of a daemon together."""

    def __init__(
        self,
        roles: Sequence[DrainedRole],
        *,
        report: Callable[[Sequence[str], bool], Awaitable[None]],
        draining: Gauge,
        drained: Gauge,
    ) -> None:
        """Drain `roles`; `report` tells the health of services, the gauges are 0 or 1."""
        self._roles = roles
        self._report = report
        self._draining = draining
        self._drained = drained
        self._tasks = TaskOwner()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._deadline = 0.0
        self._started: dt.datetime | None = None
        self._is_drained = False

    @property
    def started(self) -> dt.datetime | None:
        """When the drain began; None without one."""
        return self._started

    @property
    def state(self) -> DrainState:
        """State of the drain."""
        if self._started is None:
            return DrainState.SERVING
        if self._is_drained and not self.uses():
            return DrainState.DRAINED
        return DrainState.DRAINING if self.seconds_left() > 0 else DrainState.OVERDUE

    def seconds_left(self) -> float:
        """Seconds until the drain is overdue; 0 afterwards, and without a drain."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def uses(self) -> list[Use]:
        """Return what is still in use of a draining daemon."""
        if self._started is None:
            return []
        return [use for role in self._roles for use in role.uses()]

    async def begin(self, timeout_seconds: float) -> None:
        """Begin the drain, or set the time of the present one again; 0: TIMEOUT_SECONDS.

        UsageError `node.drain.range`.
        """
        if not 0 <= timeout_seconds <= TIMEOUT_SECONDS_MAX:
            raise UsageError(
                "node.drain.range",
                f"drain time {timeout_seconds:g} s; allowed: 0 to {TIMEOUT_SECONDS_MAX:g} s",
            )
        async with self._turn:
            now = asyncio.get_running_loop().time()
            self._deadline = now + (timeout_seconds or TIMEOUT_SECONDS)
            if self._task is not None and not self._task.done():
                return
            if self._started is None:
                self._started = utc_now()
                self._draining.set(1)
                get_logger().info(
                    "node_draining", timeout_seconds=timeout_seconds or TIMEOUT_SECONDS
                )
            for role in self._roles:
                role.begin_drain()
            self._task = self._tasks.start(self._run(), name="node-drain")

    async def end(self) -> None:
        """Serve again. Idempotent. Completes even if its caller doesn't wait for it."""
        await asyncio.shield(self._tasks.start(self._end(), name="node-undrain"))

    async def close(self) -> None:
        """Stop the drain's tasks, as the daemon stops."""
        await self._tasks.close()

    def _services(self) -> list[str]:
        return [service for role in self._roles for service in role.services]

    async def _run(self) -> None:
        await self._report(self._services(), False)
        while True:
            overdue = self._tasks.start(self._warn(), name="node-drain-overdue")
            try:
                async with asyncio.TaskGroup() as group:
                    for role in self._roles:
                        group.create_task(self._drain(role))
            finally:
                overdue.cancel()
            self._set_drained(is_drained=True)
            # A gateway that was away for longer may come back to a drained target.
            while not self.uses():  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(POLL_SECONDS)
            self._set_drained(is_drained=False)

    async def _drain(self, role: DrainedRole) -> None:
        """Drain one role. A fault in it is logged, and ends neither this drain nor the others'."""
        reported = ""
        while True:
            try:
                return await role.drain(self.seconds_left)
            except Exception as error:  # noqa: BLE001 - any fault, of any role
                if repr(error) != reported:
                    reported = repr(error)
                    get_logger().error(
                        "node_drain_failed", services=[*role.services], message=reported
                    )
            await asyncio.sleep(_RETRY_SECONDS)

    def _set_drained(self, *, is_drained: bool) -> None:
        self._is_drained = is_drained
        self._drained.set(is_drained)
        get_logger().info("node_drained" if is_drained else "node_used_again")

    async def _warn(self) -> None:
        """Log what is still in use when the time is over."""
        # A later call may have given it more time.
        while left := self.seconds_left():  # noqa: ASYNC110 - a wait until a time, not a poll
            await asyncio.sleep(left)
        uses = self.uses()
        get_logger().warning(
            "node_drain_overdue",
            uses=len(uses),
            message="; ".join(f"{use.role} {use.name}: {use.detail}" for use in uses[:3]),
        )

    async def _end(self) -> None:
        async with self._turn:
            if self._started is None:
                return
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait((self._task,))
            self._task, self._started, self._is_drained = None, None, False
            for role in self._roles:
                await role.end_drain()
            self._draining.set(0)
            self._drained.set(0)
            await self._report(self._services(), True)
            get_logger().info("node_undrained")
