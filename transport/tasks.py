"""Owner of the tasks of one long-lived object: named, watched, cancelled and awaited together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskOwner:
    """Tasks that live no longer than their owner.

    Unlike a task group it outlives the call that created it, and one task's failure doesn't end the
    others: one broken connection is no reason to drop the rest.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run `coroutine` until it ends or the owner closes."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel the running tasks and wait for them."""
        current = asyncio.current_task()
        while running := [task for task in self._tasks if task is not current]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    async def wait(self) -> None:
        """Wait until no task runs; cancel none, also if the wait is cancelled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": f"task {task.get_name()} failed", "exception": error, "task": task}
            )
