"""Drain of a fabric: no new sessions, operations in flight finish, then all sessions end.

Peers learn of it at once, within the sessions (docs/formats/session-wire.md, DRAINING).
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealane.daemon.fabric.session import OPEN, Session
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError

REASON: Final = "session.closed.draining"
"""Close reason of a session that ran out of time in a drain, or had not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a drain."""

    seconds_left: float
    sessions_left: int


class Drain:
    """The drain of a fabric. It can be ended, but a session that was told of it still ends."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self._sessions = sessions
        self._deadline: float | None = None
        self._ended = 0

    @property
    def progress(self) -> Progress | None:
        """Progress; None before the drain has begun."""
        if self._deadline is None:
            return None
        left = self._deadline - asyncio.get_running_loop().time()
        return Progress(seconds_left=max(left, 0.0), sessions_left=len(self._sessions))

    def check(self) -> None:
        """Raise UnavailableError `fabric.draining` once the drain has begun."""
        if self._deadline is not None:
            raise UnavailableError(
                "fabric.draining",
                "the fabric is stopping and takes no new sessions: use another one",
            )

    def end(self) -> None:
        """End the drain: new sessions are taken again. Idempotent."""
        if self._deadline is None:
            return
        self._deadline = None
        self._ended += 1
        get_logger().info("fabric_undrained", sessions=len(self._sessions))

    async def run(self, timeout_seconds: float) -> None:
        """Begin the drain, or join it; return when all sessions have ended.

        A later call can only shorten the time. If the drain is ended meanwhile, only the sessions
        that were told of it end.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        is_first = self._deadline is None
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        drain, told = self._ended, list(self._sessions.values())
        if is_first:
            get_logger().info(
                "fabric_draining", sessions=len(told), timeout_seconds=timeout_seconds
            )
            for session in told:
                if session.state in OPEN or session.is_granted:
                    session.drain()
                else:
                    session.close(REASON)
        try:
            async with asyncio.timeout_at(self._deadline):
                for session in told:
                    await session.wait_closed()
        except TimeoutError:
            is_present = drain == self._ended
            for session in list(self._sessions.values()) if is_present else told:
                session.close(REASON)
