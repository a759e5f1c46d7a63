"""Work that the store asks for, and that every broker continues by itself until it is done."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, UsageError

REFRESH_SECONDS: Final = 5.0
"""How often each broker looks whether there is work."""


class Continuing:
    """Calls `proceed`, at once when it is wanted and otherwise at intervals."""

    def __init__(self, proceed: Callable[[], Awaitable[None]], *, event: str) -> None:
        self._proceed = proceed
        self._event = event
        self._wanted = asyncio.Event()
        self.failure = ""
        """Why the last attempt ended, if it failed."""

    def want(self) -> None:
        """Proceed now; whoever asks waits for this attempt, so an earlier one's failure is none."""
        self.failure = ""
        self._wanted.set()

    async def keep(self) -> None:
        """Proceed whenever there is work; ends with VerificationError only."""
        while True:
            self._wanted.clear()
            try:
                await self._proceed()
                self.failure = ""
            except (UnavailableError, UsageError) as error:
                self.failure = f"{error.args[0]} [{error.reason}]"
                get_logger().error(self._event, reason=error.reason, message=error.args[0])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._wanted.wait()
