"""A gateway's accelerator cards, and which of them seals for which volume.

A volume uses one card at a time, so its key is at no other. A card that is lost or held hands its
volumes to the others; what it had under way the processor seals. A card that comes into use takes
volumes over from fuller ones, but not soon after it was lost: it may be lost again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from sealane import _native
from sealane.daemon.gateway.accelerator import CardKeeper
from sealane.daemon.gateway.hold import Hold

BALANCE_SECONDS: Final = 2.0
"""How often the cards' loads are compared when nothing calls for it."""


class MakeKeeper(Protocol):
    """Makes a card's keeper with the callbacks of `Cards`."""

    def __call__(
        self,
        *,
        report: Callable[[bool], Awaitable[None]],
        is_taken: Callable[[str], bool],
        changed: Callable[[], None],
    ) -> CardKeeper:
        """Return a keeper of one more card."""


class Cards:
    """The keepers of a gateway's cards; none without `gateway.accelerator`."""

    def __init__(self, report: Callable[[bool], Awaitable[None]]) -> None:
        """Tell `report` whether all cards are used as operators want."""
        self._report = report
        self._keepers: list[CardKeeper] = []
        self._is_well: dict[int, bool] = {}
        self._volumes: set[_native.GatewayVolume] = set()
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[CardKeeper]:
        """Return the keepers, in the configuration's order."""
        return iter(self._keepers)

    def keep(self, make: MakeKeeper) -> CardKeeper:
        """Add the keeper that `make` returns."""
        number = len(self._keepers)
        keeper = make(
            report=partial(self._note, number),
            is_taken=partial(self._is_taken, number),
            changed=self._changed.set,
        )
        self._keepers.append(keeper)
        return keeper

    def add(self, volume: _native.GatewayVolume) -> None:
        """Let a volume use a card."""
        self._volumes.add(volume)
        if self._keepers:
            min(self._keepers, key=_fullness).add(volume)
            self._changed.set()

    async def remove(self, volume: _native.GatewayVolume) -> None:
        """Take its card from a volume whose queues have ended; as `CardKeeper.remove`."""
        # First: then a move under way doesn't give it another card.
        self._volumes.discard(volume)
        for keeper in self._keepers:
            await keeper.remove(volume)

    def renew(self, volume: _native.GatewayVolume) -> None:
        """Give a volume's new queues its card."""
        for keeper in self._keepers:
            if volume in keeper.volumes:
                keeper.renew()

    def check_losses(self) -> None:
        """Look for a card that a volume has given up: any, as the volume may have moved since."""
        for keeper in self._keepers:
            keeper.renew()

    async def run(self) -> None:
        """Use the cards, and spread the volumes over them."""
        if not self._keepers:
            return
        async with asyncio.TaskGroup() as group:
            for keeper in self._keepers:
                group.create_task(keeper.run())
            while True:
                self._changed.clear()
                while move := self._next_move():
                    await self._move(*move)
                with suppress(TimeoutError):
                    async with asyncio.timeout(BALANCE_SECONDS):
                        await self._changed.wait()

    def _next_move(self) -> tuple[_native.GatewayVolume, CardKeeper, CardKeeper] | None:
        """Return a volume that should leave a card, and the card for it; None if all is well."""
        usable = [keeper for keeper in self._keepers if keeper.is_usable]
        for keeper in self._keepers:
            # One that rests still ends jobs, and has its card until then.
            if keeper.card is None and keeper.volumes and usable:
                return next(iter(keeper.volumes)), keeper, min(usable, key=_fullness)
        proven = [keeper for keeper in usable if keeper.is_proven and _has_place(keeper)]
        if not proven:
            return None
        least = min(proven, key=_fullness)
        most = max(usable, key=lambda keeper: (not _fits(keeper), keeper.volume_count))
        is_uneven = not _fits(most) or most.volume_count >= least.volume_count + 2
        if most is least or not is_uneven:
            return None
        return next(iter(most.volumes)), most, least

    async def _move(self, volume: _native.GatewayVolume, old: CardKeeper, new: CardKeeper) -> None:
        if old.is_usable:
            await old.release(volume)
        else:
            await old.remove(volume)
        if volume in self._volumes:
            new.add(volume)

    def _is_taken(self, number: int, card_id: str) -> bool:
        own = self._keepers[number]
        # Of decisions under two labels, the last one counts: a stop, or this label's `enable`.
        return any(
            other.card is not None or (other.hold is not Hold.NONE and other.decided >= own.decided)
            for other in self._keepers
            if other is not own and other.card_id == card_id
        )

    async def _note(self, number: int, is_well: bool) -> None:
        self._is_well[number] = is_well
        await self._report(all(self._is_well.values()))


def _has_place(keeper: CardKeeper) -> bool:
    """Whether a card in use has a place for one more key."""
    return keeper.card is not None and keeper.volume_count < keeper.card.key_slots


def _fits(keeper: CardKeeper) -> bool:
    """Whether a card in use has a place for the key of each of its volumes."""
    return keeper.card is not None and keeper.volume_count <= keeper.card.key_slots


def _fullness(keeper: CardKeeper) -> tuple[bool, bool, bool, int]:
    """Order cards by how much speaks against one more volume."""
    return (
        not keeper.is_usable,
        not _has_place(keeper),
        not keeper.is_proven,
        keeper.volume_count,
    )
