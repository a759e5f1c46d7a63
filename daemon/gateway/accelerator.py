"""Keeps an accelerator card in use: connects, verifies and probes it, and gives it to the volumes.

The engine decides when a card is given up: it does so at once, and the processor seals from then
on. Here the volumes of a card that was given up are freed of it, and after a pause it is tried
again. Losses that repeat make the pause longer. Operators' decisions, in `hold`, come first: a held
card gets no more jobs, ends those that it has, and then loses its keys and its connection.
"""

import asyncio
import contextlib
import copy
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import Final

from sealane import _native
from sealane.crypto.evidence.card import Statement, parse_statement
from sealane.crypto.evidence.cmw import Item
from sealane.daemon.gateway.hold import Hold
from sealane.daemon.node.evidence.card import NONCE_BYTES, CardSource
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UnavailableError, VerificationError

PAUSE_SECONDS_MIN: Final = 0.5
PAUSE_SECONDS_MAX: Final = 8.0
GOOD_SECONDS: Final = 60.0
"""A card in use for so long starts with the shortest pause again."""
RECHECK_SECONDS: Final = 2.0
"""How often the card is asked for its evidence again: it may be gone, or no longer be allowed."""
REST_SECONDS: Final = 2.0
"""How long a held card may take to end its jobs; the engine gives each of them 50 ms."""
_REST_POLL_SECONDS: Final = 0.01
APPRAISAL_SECONDS: Final = 20.0
"""How long the brokers may take to appraise the card's evidence again."""
RELEASE_SECONDS: Final = 30.0
"""How long an operator's call waits until a card has lost its keys, or is in use."""
ATTEST_SECONDS: Final = 10.0
"""How often the gateway attests, at most, because its card answers again."""


class CardState(StrEnum):
    """State of a card."""

    IN_USE = "in_use"
    NOT_IN_USE = "not_in_use"
    DRAINING = "draining"
    DRAINED = "drained"
    DISABLING = "disabling"
    DISABLED = "disabled"


_HELD: Final = {
    Hold.DRAINED: (CardState.DRAINING, CardState.DRAINED),
    Hold.DISABLED: (CardState.DISABLING, CardState.DISABLED),
}


class CardKeeper:
    """A card, and the volumes that use it.

    `accepted` returns the card's evidence with which this gateway is attested. Without it the card
    gets no keys: the policy doesn't know it, or it was silent when the gateway last attested, as
    `was_silent` tells.
    `is_disabled` returns whether operators have disabled the card of a hardware id; it may block,
    and raise UnavailableError. `attest` lets the gateway attest again, and returns when it has.
    `is_taken` returns whether the card of a hardware id is in use or held under another label.
    `changed` is called when the card comes into use, and when it has neither jobs nor keys any
    more.
    """

    def __init__(
        self,
        source: CardSource,
        *,
        accepted: Callable[[], Item | None],
        was_silent: Callable[[], bool],
        attest: Callable[[], Awaitable[None]],
        hold: Hold = Hold.NONE,
        is_disabled: Callable[[str], bool],
        report: Callable[[bool], Awaitable[None]],
        is_taken: Callable[[str], bool] = lambda _: False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the card at `source`; `report` is told whether it is used as operators want."""
        self.source = source
        self._accepted = accepted
        self._was_silent = was_silent
        self._attest = attest
        self._report_health = report
        self._hold = hold
        self._is_disabled = is_disabled
        self._is_taken = is_taken
        self._tell = changed
        self._card_id = ""
        self.decided = 0.0
        """When operators last decided about it, by `time.monotonic`; 0: not since the start."""
        self._volumes: set[_native.GatewayVolume] = set()
        self._leaving: set[_native.GatewayVolume] = set()
        self._record: _native.AcceleratorRecord | None = None
        self._earlier: Counter[str] = Counter()
        """Figures of connections before that of `_record`."""
        self._in_use_since = 0.0
        self._losses = 0
        """How often it was lost since it was last in use for GOOD_SECONDS, or enabled."""
        self._changed = asyncio.Event()
        self._decided = asyncio.Event()
        self._released = asyncio.Event()
        self._released.set()
        self._settled = asyncio.Event()
        self._connecting = asyncio.Lock()
        self._giving = asyncio.Lock()
        self._checked: _native.Accelerator | None = None
        self._sought = -ATTEST_SECONDS
        self.card: _native.Accelerator | None = None
        """The card while it is in use."""
        self.failure: Error | None = None
        """Why it isn't in use, or was lost before it was held."""

    @property
    def state(self) -> CardState:
        """State of the card."""
        if self._hold is Hold.NONE:
            return CardState.NOT_IN_USE if self.card is None else CardState.IN_USE
        ending, ended = _HELD[self._hold]
        return ended if self._released.is_set() else ending

    @property
    def hold(self) -> Hold:
        """What operators have decided."""
        return self._hold

    @property
    def volume_count(self) -> int:
        """Number of volumes that may use the card."""
        return len(self._volumes)

    @property
    def statement(self) -> Statement | None:
        """What the card stated when the gateway last attested with it."""
        accepted = self._accepted()
        return None if accepted is None else parse_statement(accepted.value)

    @property
    def card_id(self) -> str:
        """Hardware id of the card that the gateway attests with, or last used; empty if unknown."""
        statement = self.statement
        return self._card_id if statement is None else statement.card_id

    @property
    def volumes(self) -> frozenset[_native.GatewayVolume]:
        """The volumes that may use the card."""
        return frozenset(self._volumes)

    @property
    def is_usable(self) -> bool:
        """Whether it seals for volumes now."""
        return self.card is not None and self._hold is Hold.NONE

    @property
    def is_proven(self) -> bool:
        """Whether it seals now and wasn't lost, or not for a while."""
        return self.is_usable and (
            not self._losses or time.monotonic() >= self._in_use_since + GOOD_SECONDS
        )

    def figures(self) -> Counter[str]:
        """Return what volumes had of the card since the daemon's start, names as in the engine."""
        return self._earlier + Counter({} if self._record is None else self._record.figures())

    def add(self, volume: _native.GatewayVolume) -> None:
        """Let a volume use the card."""
        self._volumes.add(volume)
        self._leaving.discard(volume)
        self._changed.set()

    def renew(self) -> None:
        """Let volumes use the card with what is new: queues of hosts, keys; or none if it is lost.

        The engine notes at the card's connection that a volume has given it up.
        """
        self._changed.set()

    async def release(self, volume: _native.GatewayVolume) -> None:
        """Let the card in use end a volume's jobs and give it no more; then `remove` it."""
        self._leaving.add(volume)
        await _at_rest(partial(self._jobs_of, volume))
        await self.remove(volume)

    async def remove(self, volume: _native.GatewayVolume) -> None:
        """Take the card from a volume whose queues have ended, with its keys, and forget it.

        Until then the volume counts as one that uses the card.
        """
        try:
            await self._let_use(volume, None)
        finally:
            self._volumes.discard(volume)
            self._leaving.discard(volume)

    def decide(self, hold: Hold, *, checked: _native.Accelerator | None = None) -> None:
        """Hold the card from now on, or use it: first the one that `check` returned."""
        self.decided = time.monotonic()
        self._follow(hold, checked)

    def _follow(self, hold: Hold, checked: _native.Accelerator | None = None) -> None:
        self._hold = hold
        self._checked = checked
        if hold is Hold.NONE:
            self._losses = 0
            # A card in use settles again with its next round.
            self._settled.clear()
        else:
            self._settled.set()
        self._decided.set()
        self._changed.set()

    async def check(self) -> _native.Accelerator:
        """Connect to the card, have its evidence appraised now, and let it seal known sectors.

        UnavailableError if it doesn't answer, or seals wrongly, or no broker appraises it;
        VerificationError if its evidence is refused.
        """
        # Whether it answers at all, before the gateway attests for it.
        await self.source.collect(secrets.token_bytes(NONCE_BYTES))
        await self._attest()
        appraised = self._accepted()
        if appraised is None:
            raise VerificationError(
                "accelerator.refused",
                f"{self.source.label}: the verifier does not accept its evidence: no reference "
                "values, or no device of this gateway, in the policy match it",
            )
        try:
            async with self._connecting:
                return await asyncio.to_thread(self.source.connect, appraised)
        except OSError as error:
            raise self._unavailable(error) from error

    async def released(self) -> None:
        """Return when the card has no jobs and no keys; UnavailableError after RELEASE_SECONDS."""
        await self._within(self._released)

    async def settled(self) -> None:
        """Return when all volumes have the card, or it is held or lost.

        UnavailableError after RELEASE_SECONDS.
        """
        await self._within(self._settled)

    def _unavailable(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            "accelerator.unavailable", f"{self.source.label}, {self.source.socket}: {error}"
        )

    async def _within(self, event: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await event.wait()
        except TimeoutError as error:
            raise UnavailableError(
                "accelerator.busy",
                f"{self.source.label} is still {self.state} after {RELEASE_SECONDS:g} s: "
                f"{self.failure or 'it takes its time'}",
            ) from error

    async def run(self) -> None:
        """Use the card whenever it can be used and isn't held."""
        pause = PAUSE_SECONDS_MIN
        while True:
            self._decided.clear()
            await self._report_health(self._hold is not Hold.NONE)
            if self._hold is not Hold.NONE:
                await self._decided.wait()
                pause = PAUSE_SECONDS_MIN
                continue
            began = time.monotonic()
            self._released.clear()
            try:
                await self._use()
            except (OSError, Error) as error:
                self._report(error)
            finally:
                self.card = None
                await self._give(None)
                self._released.set()
                self._settled.set()
                self._tell()
            if time.monotonic() - began >= GOOD_SECONDS:
                pause = PAUSE_SECONDS_MIN
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._decided.wait()
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _use(self) -> None:
        """Use the card until it is held or lost; raises why it was lost."""
        async with self._connecting:
            card = self._checked
            if card is None:
                accepted = await self._attested()
                card_id = parse_statement(accepted.value).card_id
                await self._check_disabled(card_id)
                card = await asyncio.to_thread(self.source.connect, accepted)
                # It may have been disabled meanwhile, under another label.
                await self._check_disabled(card_id)
            self._checked = None
        if self._hold is not Hold.NONE:
            return
        if self._is_taken(self.card_id):
            raise UnavailableError(
                "accelerator.duplicate",
                f"{self.source.label}: card {self.card_id} is in use, or was stopped, under "
                "another label",
            )
        self._card_id = self.card_id
        self._earlier = self.figures()
        self._record = card.record
        self.card = card
        self.failure = None
        self._in_use_since = time.monotonic()
        self._tell()
        await self._report_health(True)
        get_logger().info(
            "accelerator_in_use",
            label=self.source.label,
            profile=card.profile,
            depth=card.depth,
            key_slots=card.key_slots,
        )
        checked = time.monotonic()
        while not card.loss and self._hold is Hold.NONE:
            self._changed.clear()
            accepted = self._expected()
            if time.monotonic() >= checked + RECHECK_SECONDS:
                await asyncio.to_thread(self.source.check, card, accepted)
                checked = time.monotonic()
            await self._give(card)
            self._settled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_SECONDS):
                    await self._changed.wait()
        await self._rest(card)
        if card.loss:
            raise UnavailableError("accelerator.lost", f"{self.source.label}: {card.loss}")

    async def _attested(self) -> Item:
        """Return the evidence that the card must show, from a new attestation if it is needed.

        A card that was silent while the gateway attested is attested as soon as it answers.
        """
        if self._accepted() is None:
            await self.source.collect(secrets.token_bytes(NONCE_BYTES))
            now = time.monotonic()
            if self._was_silent() and now >= self._sought + ATTEST_SECONDS:
                self._sought = now
                await self._attest()
        return self._expected()

    def _expected(self) -> Item:
        expected = self._accepted()
        if expected is None:
            raise UnavailableError(
                "accelerator.unattested",
                f"{self.source.label} gets no keys: this gateway isn't attested with its evidence",
            )
        return expected

    async def _check_disabled(self, card_id: str) -> None:
        if await asyncio.to_thread(self._is_disabled, card_id):
            self._follow(Hold.DISABLED)
            said = f"{self.source.label}: card {card_id} was disabled, maybe under another label"
            get_logger().warning(
                "accelerator_disabled", reason="accelerator.disabled", message=said
            )
            # Not by a name: a frame that its own traceback holds would keep the connection.
            raise UnavailableError("accelerator.disabled", said)

    async def _rest(self, card: _native.Accelerator) -> None:
        """Wait until the card has ended its jobs; it gets no more.

        After REST_SECONDS, or if it is lost, the processor seals what it still has.
        """

        async def jobs_left() -> int:
            if card.loss:
                return 0
            return sum([await self._jobs_of(volume) for volume in [*self._volumes]])

        if left := await _at_rest(jobs_left):
            get_logger().warning("accelerator_not_at_rest", label=self.source.label, jobs=left)

    async def _jobs_of(self, volume: _native.GatewayVolume) -> int:
        async with self._giving:
            # It may use another card by now.
            if volume not in self._volumes:
                return 0
            try:
                return await asyncio.to_thread(volume.rest_accelerator)
            except _native.QueueClosedError:
                self._volumes.discard(volume)
                return 0

    async def _give(self, card: _native.Accelerator | None) -> None:
        """Let all volumes use a card, with their newest keys and queues; or none."""
        for volume in [*self._volumes]:
            await self._let_use(volume, card)

    async def _let_use(
        self, volume: _native.GatewayVolume, card: _native.Accelerator | None
    ) -> None:
        async with self._giving:
            # It may have been removed while this waited.
            if volume not in self._volumes or (card is not None and volume in self._leaving):
                return
            try:
                await asyncio.to_thread(volume.accelerate, card)
            except _native.QueueClosedError:
                self._volumes.discard(volume)

    def _report(self, error: OSError | Error) -> None:
        if isinstance(error, OSError):
            error = self._unavailable(error)
        if self.card is not None:
            if time.monotonic() >= self._in_use_since + GOOD_SECONDS:
                self._losses = 0
            # Without an attestation, nothing says that the card failed.
            self._losses += error.reason != "accelerator.unattested"
        is_new = self.failure is None or error.reason != self.failure.reason
        # A copy: the error's traceback would keep the card's connection.
        self.failure = copy.copy(error)
        # Once for each change, not once for each attempt.
        if is_new and self._hold is Hold.NONE:
            get_logger().warning(
                "accelerator_not_in_use",
                label=self.source.label,
                reason=error.reason,
                message=str(error),
            )


async def _at_rest(jobs_left: Callable[[], Awaitable[int]]) -> int:
    """Wait until jobs have ended, for REST_SECONDS at most; return how many are left."""
    deadline = time.monotonic() + REST_SECONDS
    while left := await jobs_left():
        if time.monotonic() >= deadline:
            return left
        await asyncio.sleep(_REST_POLL_SECONDS)
    return 0
