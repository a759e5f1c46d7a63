"""Volumes that a drain flushes and closes, with one task for each.

The tasks outlive the drain: what has begun is completed, so a volume is never left half-way.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error
from sealane.transport.tasks import TaskOwner

RETRY_SECONDS: Final = 5.0
"""Time before another attempt: each one closes the host's connections."""

PutAside = Callable[[str], Awaitable[str]]


class PuttingAside:
    """Volumes that are being put aside, and why the others can't be."""

    def __init__(self, put_aside: PutAside) -> None:
        """Put one volume aside with `put_aside`, which returns why it could not be flushed."""
        self._put_aside = put_aside
        self._tasks = TaskOwner()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}
        self._retry_at: dict[str, float] = {}

    def __contains__(self, volume_id: str) -> bool:
        """Return whether a volume is being put aside."""
        return volume_id in self._running

    def problem(self, volume_id: str) -> str:
        """Return why the last attempt failed; empty if it did not."""
        return self._problems.get(volume_id, "")

    def forget(self) -> None:
        """Forget the problems of an earlier drain."""
        self._problems.clear()
        self._retry_at.clear()

    def start(self, volume_id: str) -> None:
        """Put a volume aside, unless the last attempt failed within RETRY_SECONDS."""
        now = asyncio.get_running_loop().time()
        if volume_id in self._running or now < self._retry_at.get(volume_id, 0):
            return
        self._running[volume_id] = self._tasks.start(
            self._run(volume_id), name=f"put-aside-{volume_id}"
        )

    async def ended(self) -> None:
        """Wait until no volume is being put aside."""
        while self._running:
            await asyncio.wait([*self._running.values()])

    async def _run(self, volume_id: str) -> None:
        before, problem = self._problems.pop(volume_id, ""), "interrupted"
        try:
            problem = await self._put_aside(volume_id)
        except Error as error:
            problem = str(error)
        finally:
            del self._running[volume_id]
            self._retry_at.pop(volume_id, None)
            if problem:
                self._problems[volume_id] = problem
                self._retry_at[volume_id] = asyncio.get_running_loop().time() + RETRY_SECONDS
        if problem and problem != before:
            get_logger().warning("volume_not_put_aside", volume_id=volume_id, message=problem)
