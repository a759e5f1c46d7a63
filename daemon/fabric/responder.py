"""The side of a session's establishment that answers: a peer's offer finds its listener."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from sealane.crypto.certificates import Subject
from sealane.crypto.kem import KemKey
from sealane.daemon.fabric.establishment import Answer, Offer, Result, respond
from sealane.daemon.fabric.key_making import made_in_thread
from sealane.daemon.fabric.paths import of_wire, pair_ends, unit_room
from sealane.daemon.fabric.session import Session
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.transport.establish import SessionKeys, Shown

_BUSY_TRIES, _BUSY_PAUSE_SECONDS = 50, 0.02
"""How long an offer waits for a listener that is answering another one: some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The sender of an offer, as authenticated by mutual TLS."""

    subject: Subject
    shown: Shown
    """Leaf and attestation result of the call."""


class Responder:
    """Answers offers for listeners, each of which answers one at a time."""

    def __init__(
        self,
        *,
        own: Callable[[], Subject],
        own_result: Callable[[], tuple[bytes, Result]],
        kem: KemKey,
        wires: Sequence[str],
        listeners: Callable[[str], list[Session]],
    ) -> None:
        """Answer as `own`, for the sessions that `listeners` finds by their display name."""
        self._own = own
        self._own_result = own_result
        """Thumbprint of this fabric's leaf, and the attestation result that names it."""
        self._kem = kem
        self._wires = wires
        self._listeners = listeners
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By peer."""
        self._doors: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By name of listeners."""

    async def respond(
        self, offer: Offer, units: tuple[int, ...], peer: Peer
    ) -> tuple[Session, Answer, SessionKeys]:
        """Return the listener that takes an offer, the answer, and the keys (the caller's to wipe).

        The session `is_answering` until the caller says otherwise. Raises UnavailableError
        `session.listener.absent`, UsageError `session.establish.…`, VerificationError.
        """
        # A peer's offers are answered one after the other, so that it can't keep listeners busy.
        turn = self._turns.setdefault(peer.subject.spiffe_id, asyncio.Lock())
        async with turn:
            return await self._taken(offer, units, peer)

    async def _taken(
        self, offer: Offer, units: tuple[int, ...], peer: Peer
    ) -> tuple[Session, Answer, SessionKeys]:
        """Answer for the first listener of that name, of whatever user, that takes the offer.

        It is `is_answering` then, until it begins.
        """
        mismatch: VerificationError | None = None
        tried: set[Session] = set()
        door = self._doors.setdefault(offer.display_name, asyncio.Lock())
        while True:
            # In the order of arrival, so that no peer is ahead of another for long.
            async with door:
                session = await self._free_listener(offer, peer, tried)
                if session is None:
                    break
                session.is_answering = True
            tried.add(session)
            try:
                answer, keys = await self._answer(session, offer, units, peer)
            except VerificationError as error:
                session.admission.note_stranger(
                    peer.subject, display_name=offer.display_name, reason=error.reason
                )
                if error.reason != "session.secret.mismatch":
                    raise
                mismatch = error
                continue
            return session, answer, keys
        if mismatch is not None:
            raise mismatch
        # A peer that may not use a listener must not learn that it exists.
        raise UnavailableError(
            "session.listener.absent",
            f"no session {offer.display_name!r} is waiting for a peer at {self._own().node}",
        )

    async def _free_listener(self, offer: Offer, peer: Peer, tried: set[Session]) -> Session | None:
        """Return a listener that may take an offer; wait if all of them are answering others."""
        for _ in range(_BUSY_TRIES):
            candidates = [
                session
                for session in self._listeners(offer.display_name)
                if session.admission.takes(peer.subject, display_name=offer.display_name)
            ]
            # An offer that proves a secret is meant for a listener that has one, and no other is.
            has_proof = bool(offer.secret_proof)
            fitting = [one for one in candidates if (one.admission.secret is not None) == has_proof]
            left = [one for one in fitting or candidates if one not in tried]
            if not left:
                return None
            for session in left:
                if not session.is_answering:
                    return session
            await asyncio.sleep(_BUSY_PAUSE_SECONDS)
        return None

    async def _answer(
        self, session: Session, offer: Offer, units: tuple[int, ...], peer: Peer
    ) -> tuple[Answer, SessionKeys]:
        """Answer for a listener, which takes no other offer until it begins or this has failed."""

        def abandon(made: tuple[Answer, SessionKeys] | None) -> None:
            session.is_answering = False
            if made is not None:
                made[1].wipe()

        try:
            pairs = self._pairs(session.data_addresses, offer.data_addresses, units)
            room = unit_room(address for pair in pairs for address in pair)
            certificate, result = self._own_result()
            make = functools.partial(
                respond,
                offer,
                initiator=peer.subject,
                initiator_shown=peer.shown,
                own=self._own(),
                own_certificate=certificate,
                own_result=result,
                kem=self._kem,
                units=tuple(unit for unit in units if unit <= room),
                data_addresses=tuple(own for own, _ in pairs),
                secret=session.admission.secret,
            )
            return await made_in_thread(make, abandon=abandon)
        except Exception:
            session.is_answering = False
            raise

    def _pairs(
        self, own: Sequence[str], peers: Sequence[str], units: Sequence[int]
    ) -> list[tuple[str, str]]:
        """Return the ends of each path of a session with units of at least the last size.

        UsageError if there is none.
        """
        pairs = pair_ends(own, peers)
        if unit_room(address for pair in pairs for address in pair) < units[-1]:
            pairs = pair_ends(of_wire("udp", own), peers)
        if not pairs:
            raise UsageError(
                "session.establish.wires",
                f"no path in common: the peer offers {', '.join(peers)}; fabric.wires here: "
                f"{', '.join(self._wires)}",
            )
        return pairs
