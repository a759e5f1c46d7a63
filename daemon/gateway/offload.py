"""Operators' hold on a gateway's accelerator card: probe, enable, disable, drain."""

import asyncio
import copy
from typing import Final

from sealane.daemon.gateway.accelerator import CardKeeper, CardState
from sealane.daemon.gateway.hold import DisabledCard, Hold
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, UsageError

_STRICTNESS: Final = list(Hold).index


class OffloadService:
    """The cards of a gateway: one, if its configuration has `gateway.accelerator`.

    Of two decisions that meet, the one to stop the card wins.
    """

    def __init__(self, keeper: CardKeeper | None, kept: DisabledCard | None) -> None:
        """Serve `keeper`; `kept` outlasts the process."""
        self._card = None if keeper is None or kept is None else (keeper, kept)
        self._stops = 0
        self._enabling = asyncio.Lock()
        self._writing = asyncio.Lock()

    def list(self) -> list[CardKeeper]:
        """Return all cards."""
        return [] if self._card is None else [self._card[0]]

    def get(self, label: str) -> CardKeeper:
        """Return a card; UsageError `accelerator.not_found`."""
        return self._find(label)[0]

    async def probe(self, label: str) -> CardKeeper:
        """Check a card as before its use, and don't use it; raises as `CardKeeper.check`."""
        keeper, _ = self._find(label)
        await keeper.check()
        return keeper

    async def enable(self, label: str) -> CardKeeper:
        """Use a card again once it has been checked; return when it is in use.

        Raises as `CardKeeper.check`; then nothing has changed. UnavailableError
        `accelerator.stopped` if it was drained or disabled meanwhile, `accelerator.busy` if
        another call is enabling it.
        """
        keeper, kept = self._find(label)
        if self._enabling.locked():
            raise UnavailableError("accelerator.busy", f"another call is enabling {label}")
        async with self._enabling:
            if keeper.state is CardState.IN_USE:
                return keeper
            stops, hold = self._stops, keeper.hold
            if hold is not Hold.NONE:
                # A card with one place for a key has none for the check before that.
                await keeper.released()
            checked = await keeper.check()
            self._check_stops(stops, label)
            if keeper.card is not None:
                # It has recovered by itself meanwhile.
                return keeper
            keeper.decide(Hold.NONE, checked=checked)
            # An error that is raised here must not keep the connection.
            del checked
            try:
                await keeper.settled()
                self._check_stops(stops, label)
                _check_use(keeper)
                # Last, so that a card isn't enabled at the next start unless it was in use.
                async with self._writing:
                    self._check_stops(stops, label)
                    await asyncio.to_thread(kept.write, is_disabled=False, card_id=keeper.card_id)
                    self._check_stops(stops, label)
            except BaseException:
                await self._restore(keeper, kept, hold)
                raise
            get_logger().info("accelerator_enabled", label=label)
        return keeper

    async def _restore(self, keeper: CardKeeper, kept: DisabledCard, hold: Hold) -> None:
        """Undo an `enable`: the card is held as before, or as it was stopped meanwhile."""
        hold = max(keeper.hold, hold, key=_STRICTNESS)
        if keeper.hold is not hold:
            keeper.decide(hold)
        if hold is Hold.DISABLED:
            async with self._writing:
                await asyncio.to_thread(kept.write, is_disabled=True, card_id=keeper.card_id)

    async def disable(self, label: str) -> CardKeeper:
        """Begin to stop the use of a card, also for later starts. Idempotent.

        UnavailableError `accelerator.state` if only this process knows of it.
        """
        keeper, kept = self._find(label)
        self._stop(keeper, Hold.DISABLED)
        async with self._writing:
            # It may have been enabled again.
            if keeper.hold is Hold.DISABLED:
                await asyncio.to_thread(kept.write, is_disabled=True, card_id=keeper.card_id)
        return keeper

    def drain(self, label: str) -> CardKeeper:
        """Begin to stop the use of a card until the next start. Idempotent."""
        keeper, _ = self._find(label)
        self._stop(keeper, Hold.DRAINED)
        return keeper

    def _stop(self, keeper: CardKeeper, hold: Hold) -> None:
        # It stops also an `enable` that has not decided yet.
        self._stops += 1
        hold = max(keeper.hold, hold, key=_STRICTNESS)
        if keeper.hold is not hold:
            keeper.decide(hold)
            get_logger().info("accelerator_stopping", label=keeper.source.label, hold=str(hold))

    def _check_stops(self, stops: int, label: str) -> None:
        if stops != self._stops:
            raise UnavailableError(
                "accelerator.stopped", f"{label} was drained or disabled by another call meanwhile"
            )

    def _find(self, label: str) -> tuple[CardKeeper, DisabledCard]:
        if self._card is None or self._card[0].source.label != label:
            known = [keeper.source.label for keeper in self.list()]
            raise UsageError(
                "accelerator.not_found",
                f"no accelerator {label!r}; this gateway has: {', '.join(known) or 'none'}",
            )
        return self._card


def _check_use(keeper: CardKeeper) -> None:
    if keeper.failure is not None:
        # A copy, as it gets a traceback.
        raise copy.copy(keeper.failure)
