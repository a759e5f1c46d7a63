"""Stand-ins for a card, its source and a volume, to try what a keeper decides without an engine."""

# ruff: noqa: ARG002 - arguments are those of what they stand for

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from sealane import _native
from sealane.crypto.evidence.cmw import Item
from sealane.daemon.gateway.accelerator import CardKeeper, CardState
from sealane.daemon.gateway.cards import Cards
from sealane.daemon.gateway.hold import DisabledCard
from sealane.daemon.gateway.offload import OffloadService
from sealane.daemon.node.evidence.card import CardSource
from sealane.errors import VerificationError

LABEL = "card0"


class Connection:
    """A connection to the card."""

    profile, depth = "fake", 1

    def __init__(self, source: "Source") -> None:
        self._source = source
        self.key_slots = source.key_slots
        self.loss: str | None = None
        self.record = Record()
        source.connections += 1

    def __del__(self) -> None:
        self._source.connections -= 1


class Record:
    """What volumes had of a connection."""

    def __init__(self) -> None:
        self.jobs = 0

    def figures(self) -> dict[str, int]:
        return {"jobs": self.jobs}


class Source(CardSource):
    """A card; `is_there` and `is_right` say how it answers."""

    def __init__(self, label: str) -> None:
        super().__init__(label, f"/{label}")
        self.connections = 0
        self.key_slots = 64
        self.is_there = True
        self.is_right = True

    async def wait_connections(self, count: int) -> None:
        """Wait until there are so many: the thread that made one ends a moment later."""
        deadline = time.monotonic() + 1
        while self.connections != count:
            assert time.monotonic() < deadline, self.connections
            await asyncio.sleep(0.01)

    async def collect(self, nonce: bytes) -> Item:
        return Item("card", nonce)

    def connect(self, accepted: Item) -> _native.Accelerator:
        time.sleep(0.02)
        if not self.is_there:
            raise ConnectionRefusedError("no card")
        return cast("_native.Accelerator", Connection(self))

    def check(self, card: _native.Accelerator, accepted: Item) -> None:
        if not self.is_right:
            raise VerificationError("attestation.card.changed", "another card")


class Volume:
    """A volume; `card` is the one that has its keys."""

    def __init__(self) -> None:
        self.card: _native.Accelerator | None = None
        self.jobs = 0
        self.seconds = 0.0
        """How long the card takes to load its keys."""
        self.is_refused = False
        self.given = 0
        """How often it was told to use a card."""
        self.rested: list[_native.Accelerator | None] = []
        """The cards that were to end its jobs."""

    @property
    def native(self) -> _native.GatewayVolume:
        return cast("_native.GatewayVolume", self)

    def rest_accelerator(self) -> int:
        self.rested.append(self.card)
        return self.jobs

    def accelerate(self, card: _native.Accelerator | None) -> None:
        time.sleep(self.seconds)
        if card is not None and self.is_refused:
            raise OSError("it takes no key")
        self.card = card
        self.given += card is not None


class Kept:
    """A keeper that runs, and the calls about its card."""

    def __init__(
        self, state: Path, label: str, card: str, cards: Cards, calls: OffloadService
    ) -> None:
        self.source = Source(label)
        self.file = DisabledCard(state, label)
        self.attest_seconds = 0.0
        self.is_attested = True
        self.answers_attestation = True
        """Whether the card answers while its gateway attests."""
        self.cards = cards
        self.keeper = cards.keep(
            partial(
                CardKeeper,
                self.source,
                accepted=lambda: Item("card", card.encode()) if self.is_attested else None,
                was_silent=lambda: not self.is_attested,
                attest=self._attest,
                hold=self.file.read(),
                is_disabled=self.file.has,
            )
        )
        self.calls = calls
        calls.add(self.keeper, self.file)

    async def _attest(self) -> None:
        await asyncio.sleep(self.attest_seconds)
        self.is_attested = self.answers_attestation

    async def wait(self, state: CardState) -> None:
        deadline = time.monotonic() + 10
        while self.keeper.state is not state:
            assert time.monotonic() < deadline, (self.keeper.state, self.keeper.failure)
            await asyncio.sleep(0.01)


class Fleet:
    """Cards of one gateway."""

    def __init__(self, state: Path, cards: Sequence[tuple[str, str]]) -> None:
        self.health: list[bool] = []
        self.cards = Cards(self._report)
        self.calls = OffloadService()
        self.kept = [Kept(state, *names, self.cards, self.calls) for names in cards]

    async def _report(self, is_well: bool) -> None:
        self.health.append(is_well)

    async def wait(self, *states: CardState) -> None:
        """Wait until each card is in its state."""
        for made, state in zip(self.kept, states, strict=True):
            await made.wait(state)

    def card_of(self, volume: Volume) -> int | None:
        """Return which card has a volume's keys."""
        numbers = {id(made.keeper.card): number for number, made in enumerate(self.kept)}
        return None if volume.card is None else numbers[id(volume.card)]

    async def wait_cards(self, *volumes: Volume, cards: Sequence[int]) -> None:
        """Wait until these cards have the volumes' keys, in any order."""
        deadline = time.monotonic() + 10
        while sorted(str(self.card_of(volume)) for volume in volumes) != [*map(str, cards)]:
            assert time.monotonic() < deadline, [self.card_of(volume) for volume in volumes]
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def fleet(state: Path, *cards: tuple[str, str]) -> AsyncIterator[Fleet]:
    """Keep cards of these labels and numbers, whose daemon has the state directory `state`."""
    made = Fleet(state, cards)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(made.cards.run())
        try:
            yield made
        finally:
            running.cancel()


@contextlib.asynccontextmanager
async def kept(state: Path, *, label: str = LABEL, card: str = "1") -> AsyncIterator[Kept]:
    """Keep a card whose daemon has the state directory `state`."""
    async with fleet(state, (label, card)) as made:
        yield made.kept[0]


def parsed(evidence: bytes) -> SimpleNamespace:
    """Return a statement from the evidence of these cards."""
    return SimpleNamespace(card_id=f"key-sha256:{evidence.decode()}")


def attached(volume: Volume) -> SimpleNamespace:
    """Return an attached volume, as far as its detachment uses it."""
    return SimpleNamespace(native=volume, subsystem=SimpleNamespace(nqn="volume"))
