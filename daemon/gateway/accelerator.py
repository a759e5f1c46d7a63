"""Keeps an accelerator card in use: connects, verifies and probes it, and gives it to the volumes.

The engine decides when a card is given up: it does so at once, and the processor seals from then
on. Here the volumes of a card that was given up are freed of it, and after a pause it is tried
again. Losses that repeat make the pause longer.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from sealane import _native
from sealane.crypto.evidence.cmw import Item
from sealane.daemon.node.evidence.card import CardSource
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UnavailableError

PAUSE_SECONDS_MIN: Final = 0.5
PAUSE_SECONDS_MAX: Final = 8.0
GOOD_SECONDS: Final = 60.0
"""A card in use for so long starts with the shortest pause again."""
RECHECK_SECONDS: Final = 2.0
"""How often the card is asked for its evidence again: it may be gone, or no longer be allowed."""


class CardKeeper:
    """A card, and the volumes that use it.

    `accepted` returns the card's evidence with which this gateway is attested. Without it the card
    gets no keys: the policy doesn't know it, or it was silent when the gateway last attested.
    """

    def __init__(self, source: CardSource, *, accepted: Callable[[], Item | None]) -> None:
        self._source = source
        self._accepted = accepted
        self._volumes: set[_native.GatewayVolume] = set()
        self._changed = asyncio.Event()
        self._loss: str = ""
        self._reason = ""
        self.is_in_use = False

    def add(self, volume: _native.GatewayVolume) -> None:
        """Let a volume use the card."""
        self._volumes.add(volume)
        self._changed.set()

    def renew(self) -> None:
        """Let volumes use the card with what is new: queues of hosts, keys."""
        self._changed.set()

    def remove(self, volume: _native.GatewayVolume) -> None:
        """Forget a volume that is about to be closed, which unloads its keys."""
        self._volumes.discard(volume)

    def lose(self, reason: str) -> None:
        """Give the card up: a volume has, for `reason`."""
        self._loss = self._loss or reason
        self._changed.set()

    async def run(self) -> None:
        """Use the card whenever it can be used."""
        pause = PAUSE_SECONDS_MIN
        while True:
            began = time.monotonic()
            try:
                await self._use()
            except (OSError, Error) as error:
                self._report(error)
            finally:
                self.is_in_use = False
                await self._give(None)
            if time.monotonic() - began >= GOOD_SECONDS:
                pause = PAUSE_SECONDS_MIN
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _use(self) -> None:
        """Use the card until it is lost; raises why."""
        card = await asyncio.to_thread(self._source.connect, self._attested())
        self._loss = ""
        self.is_in_use = True
        self._reason = ""
        get_logger().info(
            "accelerator_in_use",
            label=self._source.label,
            profile=card.profile,
            depth=card.depth,
            key_slots=card.key_slots,
        )
        checked = time.monotonic()
        while not self._loss:
            self._changed.clear()
            accepted = self._attested()
            if time.monotonic() >= checked + RECHECK_SECONDS:
                await asyncio.to_thread(self._source.check, card, accepted)
                checked = time.monotonic()
            await self._give(card)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_SECONDS):
                    await self._changed.wait()
        raise UnavailableError("accelerator.lost", f"{self._source.label}: {self._loss}")

    def _attested(self) -> Item:
        accepted = self._accepted()
        if accepted is None:
            raise UnavailableError(
                "accelerator.unattested",
                f"{self._source.label} gets no keys: this gateway isn't attested with its evidence",
            )
        return accepted

    async def _give(self, card: _native.Accelerator | None) -> None:
        """Let all volumes use a card, with their newest keys and queues; or none."""
        for volume in [*self._volumes]:
            try:
                await asyncio.to_thread(volume.accelerate, card)
            except _native.QueueClosedError:
                self.remove(volume)

    def _report(self, error: OSError | Error) -> None:
        reason = error.reason if isinstance(error, Error) else "accelerator.unavailable"
        # Once for each change, not once for each attempt.
        if reason != self._reason:
            self._reason = reason
            get_logger().warning(
                "accelerator_not_in_use",
                label=self._source.label,
                reason=reason,
                message=str(error),
            )
