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

RUNNING_MAX: Final = 64
"""Calls of one caller that run to their end at a time; others of it wait before they begin."""

_METHODS: Final = {
    "Volumes": (
        "CreateVolume",
        "DeleteVolume",
        "AttachVolume",
        "DetachVolume",
        "TakeOverVolume",
        "ShareVolume",
        "UnshareVolume",
        "StartVolumeJob",
        "ChangeVolumeJob",
        "ResizeVolume",
        "CloneVolume",
    ),
    "Offload": ("EnableAccelerator", "DisableAccelerator", "DrainAccelerator"),
    "Storage": (
        "CreateNamespace",
        "DeleteNamespace",
        "ResizeNamespace",
        "StartJob",
        "ChangeJob",
        "ReleaseFailOverGroup",
    ),
    "Broker": (
        "RegisterVolume",
        "UnregisterVolume",
        "FinishFilling",
        "BeginResize",
        "FinishResize",
        "SetVolumeShare",
        "RemoveVolumeShare",
        "ReturnLease",
    ),
    "Devices": (
        "OpenDevice",
        "ConfirmDevice",
        "AdvanceAnchor",
        "CloseDevice",
        "ReportFindings",
        "ReportTakeOver",
    ),
    "DeviceRegistry": ("InitializeDevice", "MoveDevice", "ForgetDevice"),
    "Operator": (
        "RotateVolumeKey",
        "RotateEncryptionKey",
        "RotateRecordKey",
        "PrepareTenantKey",
        "RotateTenantKey",
        "ReplaceAuthority",
    ),
    "Policies": ("ApplyPolicy", "ReplacePolicyOwners", "ResetPolicyOwners"),
    "Membership": ("RevokeNode", "RestoreNode"),
}
COMPLETED: Final = frozenset(
    f"/sealane.v1.{service}/{name}" for service, names in _METHODS.items() for name in names
)
"""Methods that change what outlives their caller. What belongs to a caller isn't among them: a
session or a queue that nobody waits for any more must not come to be."""


class CallCompletion:
    """The calls of one server that run to their end."""

    def __init__(self) -> None:
        # Of certified callers, whose number is bounded; all local ones share one.
        self._rooms: dict[str, asyncio.Semaphore] = {}
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, method: str, work: Callable[[], Awaitable[Any]], *, caller: str) -> Any:
        """Return what `work` returns; once it has begun, a cancelled caller doesn't end it."""
        room = self._rooms.setdefault(caller, asyncio.Semaphore(RUNNING_MAX))
        await room.acquire()
        task = asyncio.ensure_future(_carry_out(room, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(_ended_unheard, method))
            raise

    async def close(self, *, drain_seconds: float) -> None:
        """When the server has stopped, wait so long for what is left, then cancel it."""
        if not self._running:
            return
        _, late = await asyncio.wait([*self._running], timeout=drain_seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


async def _carry_out(room: asyncio.Semaphore, work: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await work()
    finally:
        room.release()


def _ended_unheard(method: str, task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    log = get_logger()
    if error is None:
        log.info("call_ended_unheard", method=method)
    elif isinstance(error, Error):
        log.info("call_ended_unheard", method=method, reason=error.reason, message=str(error))
    else:
        log.error("call_failed", method=method, exc_info=error)
