"""The fabric's part in the drain of its whole daemon."""

import asyncio
from collections.abc import Callable, Sequence

from sealane.crypto.roles import Role
from sealane.daemon.fabric.service import FabricService
from sealane.daemon.node.drain import POLL_SECONDS, Use


class FabricDrain:
    """Drains a fabric as `session drain` does, within `fabric.drain_timeout_seconds`."""

    services: Sequence[str] = ("sealane.v1.Sessions",)

    def __init__(self, service: FabricService) -> None:
        self._service = service

    def begin_drain(self) -> None:
        """Refuse sessions, and tell the peers of present ones."""
        self._service.begin_drain()

    def uses(self) -> list[Use]:
        """Return how many sessions are left."""
        progress = self._service.drain.progress
        if progress is None or not progress.sessions_left:
            return []
        count = progress.sessions_left
        detail = f"{count} not closed yet"
        return [Use(role=Role.FABRIC, name="sessions", detail=detail, ends=True)]

    async def drain(self, seconds_left: Callable[[], float]) -> None:  # noqa: ARG002 - the fabric's own time applies
        """Return when all sessions have ended."""
        # One turn of the loop: the drain begins in a task.
        await asyncio.sleep(0)
        while self.uses():  # noqa: ASYNC110 - a session may be registered meanwhile
            await asyncio.sleep(POLL_SECONDS)

    async def end_drain(self) -> None:
        """Take sessions again; those that were told to end still do."""
        self._service.drain.end()
