"""Calls that are carried out to their end, also if their caller leaves.

gRPC cancels a handler at whatever it is waiting for when its caller cancels, disconnects or reaches
its deadline. What such a call had begun would stay half done: committed but not recorded, removed
from a list but not from a disk, locked and never released. So methods that change something run in
a task of their own. Their number is bounded for each caller where they begin, because a caller that
leaves makes room for its next call.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error
from sealane.transport.tasks import TaskOwner

RUNNING_MAX: Final = 64
"""Calls of one caller that run to their end at a time; others of it wait before they begin."""

_VOLUMES: Final = (
    "CreateVolume",
    "DeleteVolume",
    "AttachVolume",
    "DetachVolume",
    "ShareVolume",
    "UnshareVolume",
    "StartVolumeJob",
    "ChangeVolumeJob",
    "ResizeVolume",
    "CloneVolume",
)
_STORAGE: Final = (
    "CreateNamespace",
    "DeleteNamespace",
    "ResizeNamespace",
    "StartJob",
    "ChangeJob",
)
_BROKER: Final = (
    "RegisterVolume",
    "UnregisterVolume",
    "FinishFilling",
    "BeginResize",
    "FinishResize",
    "SetVolumeShare",
    "RemoveVolumeShare",
    "ReturnLease",
)
_DEVICES: Final = ("OpenDevice", "ConfirmDevice", "AdvanceAnchor", "CloseDevice", "ReportFindings")
_OTHERS: Final = (
    "DeviceRegistry/InitializeDevice",
    "DeviceRegistry/MoveDevice",
    "DeviceRegistry/ForgetDevice",
    "Operator/RotateVolumeKey",
    "Policies/ApplyPolicy",
    "Membership/RevokeNode",
    "Membership/RestoreNode",
)
COMPLETED: Final = frozenset(
    f"/sealane.v1.{name}"
    for name in (
        *(f"Volumes/{name}" for name in _VOLUMES),
        *(f"Storage/{name}" for name in _STORAGE),
        *(f"Broker/{name}" for name in _BROKER),
        *(f"Devices/{name}" for name in _DEVICES),
        *_OTHERS,
    )
)
"""Methods that change what outlives their caller. What belongs to a caller isn't among them: a
session or a queue that nobody waits for any more must not come to be."""


class CallCompletion:
    """The calls of one server that run to their end."""

    def __init__(self) -> None:
        # Of certified callers, whose number is bounded; all local ones share one.
        self._rooms: dict[str, asyncio.Semaphore] = {}
        self._running: set[asyncio.Future[Any]] = set()
        self._tasks = TaskOwner()

    async def run(self, method: str, work: Callable[[], Awaitable[Any]], *, caller: str) -> Any:
        """Return what `work` returns; once it has begun, a cancelled caller doesn't end it."""
        room = self._rooms.setdefault(caller, asyncio.Semaphore(RUNNING_MAX))
        await room.acquire()
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._running.add(outcome)
        outcome.add_done_callback(self._running.discard)
        self._tasks.start(self._carry_out(room, work, outcome), name=method)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            outcome.add_done_callback(partial(_ended_unheard, method))
            raise

    async def close(self, *, drain_seconds: float) -> None:
        """When the server has stopped, wait so long for what is left, then cancel it."""
        if self._running:
            await asyncio.wait([*self._running], timeout=drain_seconds)
        await self._tasks.close()

    async def _carry_out(
        self,
        room: asyncio.Semaphore,
        work: Callable[[], Awaitable[Any]],
        outcome: asyncio.Future[Any],
    ) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it is the caller's
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
        finally:
            room.release()


def _ended_unheard(method: str, outcome: asyncio.Future[Any]) -> None:
    error = None if outcome.cancelled() else outcome.exception()
    log = get_logger()
    if error is None:
        log.info("call_ended_unheard", method=method)
    elif isinstance(error, Error):
        log.info("call_ended_unheard", method=method, reason=error.reason, message=str(error))
    else:
        log.error("call_failed", method=method, exc_info=error)
