"""The targets of one gateway: where they are, how they are, and which one a new volume gets.

A volume's descriptor names its target. What a gateway asks of one target waits for no other.
"""

import asyncio
import contextlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import Final

import grpc

from sealane.crypto.roles import Role
from sealane.daemon.node.channels import Connection
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.target_view import TargetState, TargetView
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UnavailableError, UsageError, reason_of
from sealane.protocol.v1 import storage_pb2, storage_pb2_grpc

LOOK_SECONDS: Final = 5.0
"""Pause between two looks at a target."""
ANSWER_SECONDS: Final = 5.0
"""How long a target may take to say how it is."""
TARGET_SERVICES: Final = ("targets",)
"""Health services that are unhealthy while a target is away or doesn't serve all its volumes."""
_NAMED_MAX: Final = 10
_BAD: Final = {TargetState.AWAY, TargetState.UNHEALTHY}


class Place:
    """The target that has a volume; another one when the volume's device has moved."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._moved = asyncio.Event()

    def move(self, node: str) -> None:
        """Name the target that has the volume from now on, and wake who waits in `left`."""
        self.node = node
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def left(self, node: str) -> None:
        """Wait until the volume is on another target than `node`."""
        while self.node == node:
            await self._moved.wait()


class Targets:
    """The targets that the configuration lists; a reload may change it."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        *,
        identity: Identity,
        report: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """Use targets at `addresses`, by their nodes.

        `report` is called, after each look at one of them, with whether all are well.
        """
        self._addresses = dict(addresses)
        self._identity = identity
        self._report = report
        self._views: dict[str, TargetView] = {}
        self._creating: dict[str, int] = {}
        self._leaving: Collection[str] = ()
        self._changed = asyncio.Event()

    @property
    def nodes(self) -> Collection[str]:
        """The targets, in the configuration's order."""
        return self._addresses.keys()

    def views(self) -> list[TargetView]:
        """Return all targets as they were at the last look."""
        return [
            self._views.get(node) or TargetView(node=node, address=address)
            for node, address in self._addresses.items()
        ]

    def channel(self, node: str) -> contextlib.AbstractAsyncContextManager[grpc.aio.Channel]:
        """Open a channel to a target's control plane; UsageError `volume.target.unknown`."""
        return self._identity.channel(self._address(node), node, Role.TARGET)

    def stream(
        self, node: str
    ) -> contextlib.AbstractAsyncContextManager[tuple[grpc.aio.Channel, asyncio.Future[None]]]:
        """Open a channel to a target's control plane for one stream.

        See `Identity.stream_channel`.
        """
        return self._identity.stream_channel(self._address(node), node, Role.TARGET)

    def connection(self, node: str) -> contextlib.AbstractAsyncContextManager[Connection]:
        """Open the same channel as `channel`, with the leaves at its ends."""
        return self._identity.connection(self._address(node), node, Role.TARGET)

    def absence(self, node: str) -> Error | None:
        """Return why a target couldn't be asked at the last look; None: it could."""
        view = self._views.get(node)
        if view is None or view.reason is None:
            return None
        return UnavailableError(view.reason, view.detail)

    @contextlib.asynccontextmanager
    async def chosen(
        self, named: str, *, size_bytes: int, earlier: Callable[[], Awaitable[str]]
    ) -> AsyncIterator[str]:
        """Yield the target for a new volume: the one `named`, or if that is empty, the best.

        If none takes a volume, it is the target that `earlier` returns: an earlier call may have
        made the volume there. It is asked for nothing else.

        The target can't be removed meanwhile. UsageError `volume.target` if there is no such
        target, `volume.target.unknown` if the earlier call's isn't configured here;
        UnavailableError `volume.target.none` if none takes a volume, and `earlier` returns
        an empty text.
        """
        node = named or await self._best_or(earlier, size_bytes)
        # A reload may be removing what was just chosen.
        if node not in self._staying:
            raise UsageError(
                "volume.target", f"target {node[:80]!r}; allowed: {_listed(self._staying)}"
            )
        with self._held(node):
            yield node

    async def keep_looked_at(self) -> None:
        """Look at each target periodically, until cancelled; a silent one delays no other."""
        looking: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                looking = {node: task for node, task in looking.items() if not task.done()}
                for node in [node for node in self.nodes if node not in looking]:
                    looking[node] = tasks.create_task(
                        self._keep_looking_at(node), name=f"look-at-{node}"
                    )
                await self._changed.wait()

    async def _keep_looking_at(self, node: str) -> None:
        while node in self._addresses:
            await self._look(node)
            await self._report_all()
            await asyncio.sleep(LOOK_SECONDS)

    async def _report_all(self) -> None:
        states = {view.state for view in self.views()}
        is_well = not states & _BAD
        # None is said to be well before it has been looked at.
        if self._report is not None and not (is_well and TargetState.UNKNOWN in states):
            await self._report(is_well)

    async def apply(
        self,
        addresses: Mapping[str, str],
        *,
        volumes_of: Callable[[Collection[str]], Awaitable[Mapping[str, str]]],
    ) -> None:
        """Replace the configured targets. On an error, nothing changes.

        `volumes_of` returns the volumes on some targets, each with its target. UsageError
        `gateway.target.used` if a target is missing that still has volumes.
        """
        self._leaving = {*self._addresses} - {*addresses}
        try:
            used = [f"a new volume on {n}" for n in self._leaving if self._creating.get(n)]
            if self._leaving and not used:
                found = await volumes_of(self._leaving)
                used = [f"{volume} on {node}" for volume, node in found.items()]
            if used:
                raise _used(used)
            self._addresses = dict(addresses)
        finally:
            self._leaving = ()
        self._views = {
            node: view for node, view in self._views.items() if addresses.get(node) == view.address
        }
        self._changed.set()

    def statistics(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return how the targets are, for the metrics; called from their thread."""
        return {
            (view.node,): {
                "is_away": int(view.state is TargetState.AWAY),
                "is_unhealthy": int(view.state is TargetState.UNHEALTHY),
                "is_draining": int(view.state is TargetState.DRAINING),
                **(
                    {}
                    if view.free_bytes is None
                    else {"free_bytes": view.free_bytes, "capacity_bytes": view.capacity_bytes}
                ),
            }
            for view in self.views()
        }

    @property
    def _staying(self) -> list[str]:
        return [node for node in self._addresses if node not in self._leaving]

    def _address(self, node: str) -> str:
        try:
            return self._addresses[node]
        except KeyError:
            raise UsageError(
                "volume.target.unknown",
                f"the volume is on target {node!r}, which this gateway's configuration doesn't "
                f"list; it has {_listed(self._addresses)}",
            ) from None

    @contextlib.contextmanager
    def _held(self, node: str) -> Iterator[None]:
        self._creating[node] = self._creating.get(node, 0) + 1
        try:
            yield
        finally:
            self._creating[node] -= 1

    async def _best_or(self, earlier: Callable[[], Awaitable[str]], size_bytes: int) -> str:
        try:
            return await self._best(size_bytes)
        except UnavailableError:
            if node := await earlier():
                # The caller hasn't named it.
                self._address(node)
                return node
            raise

    async def _best(self, size_bytes: int) -> str:
        """Return the target with most room of those that take volumes."""
        staying = self._staying
        if len(staying) == 1:
            return staying[0]
        # One that didn't answer at the last look has the next one's time to be found again.
        asked = [node for node in staying if self.absence(node) is None] or staying
        looked = await self._look_at(asked)
        good = [view for view in looked if view.state is TargetState.GOOD]
        able = [view for view in good if view.has_room_for_volume]
        if not able:
            raise UnavailableError(
                "volume.target.none",
                "no target takes a new volume: "
                + "; ".join(f"{view.node}: {_why(view)}" for view in self.views()),
            )
        return min(able, key=lambda view: _rank(view, size_bytes)).node

    async def _look_at(self, nodes: Collection[str]) -> list[TargetView]:
        return await asyncio.gather(*map(self._look, [*nodes]))

    async def _look(self, node: str) -> TargetView:
        address = self._addresses.get(node, "")
        view = TargetView(node=node, address=address)
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                self._identity.channel(address, node, Role.TARGET) as channel,
            ):
                found = await storage_pb2_grpc.StorageStub(channel).GetTarget(
                    storage_pb2.GetTargetRequest(), timeout=ANSWER_SECONDS
                )
        except (Error, TimeoutError, OSError) as error:
            reason = reason_of(error, otherwise="connection.timeout")
            if reason == "peer.unimplemented":
                # A target of an earlier release serves, and says no more than that.
                view = replace(view, state=TargetState.GOOD)
            else:
                # The reason is kept apart.
                said = str(error.args[0]) if isinstance(error, Error) else str(error)
                text = said or f"no answer within {ANSWER_SECONDS:g} s"
                view = replace(view, state=TargetState.AWAY, reason=reason, detail=text)
        else:
            view = replace(
                view,
                state=_state(found),
                free_bytes=found.free_bytes if found.HasField("free_bytes") else None,
                capacity_bytes=found.capacity_bytes,
                volumes=found.volumes,
                has_room_for_volume=found.volumes < found.volumes_max,
            )
        # Meanwhile a reload may have removed it, or changed its address.
        if self._addresses.get(node) == address:
            _log_change(self._views.get(node), view)
            self._views[node] = view
        return view


def _state(found: storage_pb2.TargetStatus) -> TargetState:
    if found.draining:
        return TargetState.DRAINING
    return TargetState.GOOD if found.healthy else TargetState.UNHEALTHY


def _rank(view: TargetView, size_bytes: int) -> tuple[int, int, int, str]:
    """Order targets for a new volume: first those that have room, then those that don't say.

    Of these the one with most room, then with fewest volumes, then by name.
    """
    if view.free_bytes is None:
        return 1, 0, view.volumes, view.node
    has_room = view.free_bytes >= size_bytes
    return 0 if has_room else 2, -view.free_bytes, view.volumes, view.node


def _listed(nodes: Collection[str]) -> str:
    return ", ".join(map(repr, nodes))


def _why(view: TargetView) -> str:
    if view.state is TargetState.GOOD:
        return "it has as many volumes as it can have"
    return view.detail or f"it is {view.state}"


def _used(volumes: Sequence[str]) -> UsageError:
    more = f" and {len(volumes) - _NAMED_MAX} more" if len(volumes) > _NAMED_MAX else ""
    return UsageError(
        "gateway.target.used",
        "a target that still has volumes can't be removed: "
        + ", ".join(volumes[:_NAMED_MAX])
        + more,
    )


def _log_change(before: TargetView | None, view: TargetView) -> None:
    known = TargetState.GOOD if before is None else before.state
    if view.state == known:
        return
    logger = get_logger()
    log = logger.warning if view.state in _BAD else logger.info
    log("target_state", target=view.node, state=str(view.state), reason=view.reason)
