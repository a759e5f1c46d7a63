"""How a fabric stops: no new sessions, what is under way is finished, then everything ends.

The peers are told at once, in the sessions themselves (docs/formats/session-wire.md, DRAINING).
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealane.daemon.fabric.session import OPEN, Session
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError

REASON: Final = "session.closed.draining"
"""Why a session ended that had no more time, or had not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a drain is."""

    seconds_left: float
    sessions_left: int


class Drain:
    """The one drain of a fabric; begins once, and is never taken back."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self._sessions = sessions
        self._deadline: float | None = None

    @property
    def progress(self) -> Progress | None:
        """How far it is; None while it has not begun."""
        if self._deadline is None:
            return None
        left = self._deadline - asyncio.get_running_loop().time()
        return Progress(seconds_left=max(left, 0.0), sessions_left=len(self._sessions))

    def check(self) -> None:
        """UnavailableError `fabric.draining` once it has begun."""
        if self._deadline is not None:
            raise UnavailableError(
                "fabric.draining", "the fabric stops and takes no new sessions: try another one"
            )

    async def run(self, timeout_seconds: float) -> None:
        """Begin, or join what has begun; return when every session has ended.

        A later call may only shorten the time.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        is_first = self._deadline is None
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        if is_first:
            sessions = list(self._sessions.values())
            get_logger().info(
                "fabric_draining", sessions=len(sessions), timeout_seconds=timeout_seconds
            )
            for session in sessions:
                if session.state in OPEN:
                    session.drain()
                else:
                    session.close(REASON)
        try:
            async with asyncio.timeout_at(self._deadline):
                for session in list(self._sessions.values()):
                    await session.wait_closed()
        except TimeoutError:
            for session in list(self._sessions.values()):
                session.close(REASON)
