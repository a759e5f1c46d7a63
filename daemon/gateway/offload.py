"""Operators' hold on a gateway's accelerator cards: probe, enable, disable, drain."""

import asyncio
import copy
from dataclasses import dataclass, field
from typing import Final

from sealane.daemon.gateway.accelerator import CardKeeper, CardState
from sealane.daemon.gateway.hold import DisabledCard, Hold
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, UsageError

_STRICTNESS: Final = list(Hold).index


@dataclass(slots=True, eq=False)
class _Card:
    """A card, and the calls about it; `kept` outlasts the process."""

    keeper: CardKeeper
    kept: DisabledCard
    stops: int = 0
    enabling: asyncio.Lock = field(default_factory=asyncio.Lock)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_stops(self, stops: int) -> None:
        """Raise UnavailableError if the card was stopped since there were so many stops."""
        if stops != self.stops:
            raise UnavailableError(
                "accelerator.stopped",
                f"{self.keeper.source.label} was drained or disabled by another call meanwhile",
            )


class OffloadService:
    """The cards of a gateway's configuration.

    Of two decisions about a card that meet, the one to stop it wins.
    """

    def __init__(self) -> None:
        self._cards: dict[str, _Card] = {}

    def add(self, keeper: CardKeeper, kept: DisabledCard) -> None:
        """Serve `keeper`; `kept` outlasts the process."""
        self._cards[keeper.source.label] = _Card(keeper, kept)

    def list(self) -> list[CardKeeper]:
        """Return all cards."""
        return [card.keeper for card in self._cards.values()]

    def get(self, label: str) -> CardKeeper:
        """Return a card; UsageError `accelerator.not_found`."""
        return self._find(label).keeper

    async def probe(self, label: str) -> CardKeeper:
        """Check a card as before its use, and don't use it; raises as `CardKeeper.check`."""
        keeper = self._find(label).keeper
        await keeper.check()
        return keeper

    async def enable(self, label: str) -> CardKeeper:
        """Use a card again once it has been checked; return when it is in use.

        Raises as `CardKeeper.check`; then nothing has changed. UnavailableError
        `accelerator.stopped` if it was drained or disabled meanwhile, `accelerator.busy` if
        another call is enabling it.
        """
        card = self._find(label)
        keeper = card.keeper
        if card.enabling.locked():
            raise UnavailableError("accelerator.busy", f"another call is enabling {label}")
        async with card.enabling:
            if keeper.state is CardState.IN_USE:
                return keeper
            stops, hold = card.stops, keeper.hold
            if hold is not Hold.NONE:
                # A card with one place for a key has none for the check before that.
                await keeper.released()
            checked = await keeper.check()
            card.check_stops(stops)
            if keeper.card is not None:
                # It has recovered by itself meanwhile.
                return keeper
            keeper.decide(Hold.NONE, checked=checked)
            # An error that is raised here must not keep the connection.
            del checked
            try:
                await keeper.settled()
                card.check_stops(stops)
                _check_use(keeper)
                # Last, so that a card isn't enabled at the next start unless it was in use.
                async with card.writing:
                    card.check_stops(stops)
                    await asyncio.to_thread(
                        card.kept.write, is_disabled=False, card_id=keeper.card_id
                    )
                    card.check_stops(stops)
            except BaseException:
                await self._restore(card, hold)
                raise
            get_logger().info("accelerator_enabled", label=label)
        return keeper

    async def _restore(self, card: _Card, hold: Hold) -> None:
        """Undo an `enable`: the card is held as before, or as it was stopped meanwhile."""
        keeper = card.keeper
        hold = max(keeper.hold, hold, key=_STRICTNESS)
        if keeper.hold is not hold:
            keeper.decide(hold)
        if hold is Hold.DISABLED:
            async with card.writing:
                await asyncio.to_thread(card.kept.write, is_disabled=True, card_id=keeper.card_id)

    async def disable(self, label: str) -> CardKeeper:
        """Begin to stop the use of a card, also for later starts. Idempotent.

        UnavailableError `accelerator.state` if only this process knows of it.
        """
        card = self._find(label)
        keeper = card.keeper
        self._stop(card, Hold.DISABLED)
        async with card.writing:
            # It may have been enabled again.
            if keeper.hold is Hold.DISABLED:
                await asyncio.to_thread(card.kept.write, is_disabled=True, card_id=keeper.card_id)
        return keeper

    def drain(self, label: str) -> CardKeeper:
        """Begin to stop the use of a card until the next start. Idempotent."""
        card = self._find(label)
        self._stop(card, Hold.DRAINED)
        return card.keeper

    def _stop(self, card: _Card, hold: Hold) -> None:
        # It stops also an `enable` that has not decided yet.
        card.stops += 1
        keeper = card.keeper
        hold = max(keeper.hold, hold, key=_STRICTNESS)
        if keeper.hold is not hold:
            keeper.decide(hold)
            get_logger().info("accelerator_stopping", label=keeper.source.label, hold=str(hold))

    def _find(self, label: str) -> _Card:
        if label not in self._cards:
            raise UsageError(
                "accelerator.not_found",
                f"no accelerator {label!r}; this gateway has: {', '.join(self._cards) or 'none'}",
            )
        return self._cards[label]


def _check_use(keeper: CardKeeper) -> None:
    if keeper.failure is not None:
        # A copy, as it gets a traceback.
        raise copy.copy(keeper.failure)
