"""The broker's authorizations of this node's peers: requested by challenge, limited in time.

A target serves a gateway's queues, and a fabric its sessions, only while the broker has confirmed
that this incarnation of the peer may act. The broker's answer is signed and covers this node's
nonce. It counts from the moment the nonce was sent, so delaying or replaying an answer gains no
time. When the time is over, or the broker refuses, `lost` ends what the peer has here.

The engine enforces the limit: work for a peer holds the peer's `permit`, and stops when that
expires. This module only extends the permit after a verified answer, or revokes it. A stopped event
loop or a frozen process extends nothing.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from cryptography import x509

from sealane import _native
from sealane.crypto.attestation.ear import AttestationResult
from sealane.crypto.certificates import Subject
from sealane.daemon.config import AUTHORIZATION_SECONDS
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UnavailableError, VerificationError, foreign_reason
from sealane.protocol.v1 import trust_pb2
from sealane.transport.tasks import TaskOwner

PEERS_MAX: Final = 16384
PEERS_PER_CALL_MAX: Final = 1024
REFUSED_VOLUMES_MAX: Final = 64
"""Volumes that one peer may be refused; then it must wait until some of these are forgotten."""
NONCE_BYTES: Final = 32

STALE: Final = "authorization.stale"
REVOKED: Final = "node.revoked"
NO_VOLUME: Final = "volume.not_found"
"""The broker's only answer about a volume that a peer may not use, or that doesn't exist."""
_ASKS_PER_LIFETIME: Final = 3
_LOOK_NS: Final = 250_000_000
# A refused peer that keeps calling causes at most one question to the broker in this time.
_REFUSAL_NS: Final = 10**9


Ask = Callable[[bytes, Sequence[PeerIncarnation]], Awaitable[Sequence[str]]]
"""(nonce, peers) → for each peer the reason why it may not act, empty if it may; verified for that
nonce."""
Lost = Callable[[PeerIncarnation, str], Awaitable[None]]
"""Ends what a peer has here, with a reason id. Returns when nothing of it is in progress."""


def peer_of(caller: Subject) -> PeerIncarnation:
    """Return the incarnation of a peer in a verified certificate."""
    return PeerIncarnation(spiffe_id=caller.spiffe_id, incarnation=caller.incarnation)


def peer_message(peer: PeerIncarnation) -> trust_pb2.PeerIncarnation:
    """Convert to the wire format."""
    return trust_pb2.PeerIncarnation(
        spiffe_id=peer.spiffe_id,
        incarnation=peer.incarnation,
        volume_id=peer.volume_id,
        read_only=peer.is_read_only,
    )


def peer_from(message: trust_pb2.PeerIncarnation) -> PeerIncarnation:
    """Convert from the wire format."""
    return PeerIncarnation(
        spiffe_id=message.spiffe_id,
        incarnation=message.incarnation,
        volume_id=message.volume_id,
        is_read_only=message.read_only,
    )


class Authorizations:
    """Authorizations of the peers of one role. `run` must run while the role serves.

    For a peer that is new, or whose authorization is older than `fresh_seconds`, `require` waits
    for a new one. What a peer `uses` here ends `keep_seconds` after its last authorization.
    """

    def __init__(
        self,
        *,
        ask: Ask,
        uses: Callable[[], Iterable[PeerIncarnation]],
        lost: Lost,
        fresh_seconds: float = AUTHORIZATION_SECONDS,
        keep_seconds: float | None = None,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._ask = ask
        self._uses = uses
        self._lost = lost
        self._interval_seconds = fresh_seconds / _ASKS_PER_LIFETIME
        self._fresh_ns = round(fresh_seconds * 1e9)
        self._keep_ns = round((keep_seconds or fresh_seconds) * 1e9)
        self._now_ns = now_ns
        # Time at which the nonce of the last yes was sent, and of the last no.
        self._granted: dict[PeerIncarnation, int] = {}
        self._refused: dict[PeerIncarnation, tuple[int, str]] = {}
        # A permit exists as long as some work holds it.
        self._permits: WeakValueDictionary[PeerIncarnation, _native.Permit] = WeakValueDictionary()
        self._asking: dict[PeerIncarnation, asyncio.Future[None]] = {}
        self._ending: set[PeerIncarnation] = set()
        self._tasks = TaskOwner()
        self.is_broker_away = False
        """Whether the last round of questions got no answer."""

    def ages(self) -> dict[str, dict[str, int]]:
        """Return the seconds since the authorization of each peer in use, for the metrics."""
        now = self._now_ns()
        return {
            peer.name: {"age_seconds": (now - sent) // 10**9}
            for peer, sent in self._granted.copy().items()
        }

    def is_fresh(self, peer: PeerIncarnation) -> bool:
        """Return whether the peer may begin something now."""
        sent = self._granted.get(peer)
        return sent is not None and self._now_ns() - sent < self._fresh_ns

    def permit(self, peer: PeerIncarnation) -> _native.Permit:
        """Return the peer's permit, one object as long as anything holds it.

        It expires `keep_seconds` after the last question that was answered with yes, or at a no.
        """
        permit = self._permits.get(peer)
        if permit is None:
            permit = self._permits[peer] = _native.Permit()
            sent = self._granted.get(peer)
            if sent is not None:
                permit.extend(sent + self._keep_ns)
        return permit

    async def require(self, peer: PeerIncarnation) -> None:
        """Return if the peer may act; asks the broker unless its last answer is fresh.

        VerificationError with the broker's reason if it may not, UnavailableError if the broker
        can't be asked.
        """
        if self.is_fresh(peer):
            return
        refused = self._refused.get(peer)
        if refused is not None and self._now_ns() - refused[0] < _REFUSAL_NS:
            raise _refusal(peer, refused[1])
        asking = self._asking.get(peer)
        if asking is None:
            if len(self._granted) + len(self._asking) >= PEERS_MAX:
                raise UnavailableError(
                    "authorization.limit",
                    f"{PEERS_MAX} peers act here already, or wait to; allowed: {PEERS_MAX}",
                )
            if peer.volume_id:
                self._check_guesses(peer)
            asking = asyncio.ensure_future(self._ask_for([peer]))
            self._asking[peer] = asking
            asking.add_done_callback(partial(self._asked, peer))
        # One answer serves all waiters: cancelling one must not affect the others.
        await asyncio.shield(asking)
        if not self.is_fresh(peer):
            raise _refusal(peer, self._refused[peer][1] if peer in self._refused else STALE)

    async def permitted(self, peer: PeerIncarnation) -> tuple[PeerIncarnation, _native.Permit]:
        """Return the peer and its permit once it may act. Errors as `require`."""
        await self.require(peer)
        return peer, self.permit(peer)

    async def admit(
        self,
        caller: Subject,
        leaf: x509.Certificate,  # noqa: ARG002 - the broker's verdict covers leaf and result
        result: AttestationResult,  # noqa: ARG002
    ) -> bool:
        """Admit a call (sealane.daemon.runtime.calls), unless its peer may not act."""
        await self.require(peer_of(caller))
        return False

    async def run(self) -> None:
        """Keep the peers in use authorized, and end what unauthorized peers have here."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_asking(), name="authorizations-ask")
            tasks.create_task(self._keep_ending(), name="authorizations-end")
            try:
                await asyncio.Event().wait()
            finally:
                await self._tasks.close()

    def lose_all(self, reason: str) -> None:
        """Revoke all authorizations: this node itself may no longer act."""
        now = self._now_ns()
        for peer in {*self._granted, *self._uses()}:
            self._refuse(peer, now, reason)

    async def _keep_asking(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            peers = list(dict.fromkeys(self._uses()))
            # Also without peers: so it is known early whether the broker answers.
            starts = range(0, max(len(peers), 1), PEERS_PER_CALL_MAX)
            rounds = [self._ask_again(peers[at : at + PEERS_PER_CALL_MAX]) for at in starts]
            self.is_broker_away = not all(await asyncio.gather(*rounds))

    async def _ask_again(self, peers: Sequence[PeerIncarnation]) -> bool:
        try:
            await self._ask_for(peers)
        except Error as error:
            get_logger().warning(
                "authorization_unanswered", reason=error.reason, message=str(error.args[0])
            )
            if error.reason == REVOKED:
                self.lose_all(REVOKED)
            return False
        return True

    async def _ask_for(self, peers: Sequence[PeerIncarnation]) -> None:
        sent = self._now_ns()
        answers = await self._ask(secrets.token_bytes(NONCE_BYTES), peers)
        for peer, reason in zip(peers, answers, strict=True):
            if reason:
                self._refuse(peer, sent, reason)
            elif sent > self._refused.get(peer, (-1, ""))[0]:
                self._granted[peer] = max(sent, self._granted.get(peer, sent))
                permit = self._permits.get(peer)
                if permit is not None:
                    permit.extend(sent + self._keep_ns)

    def _check_guesses(self, peer: PeerIncarnation) -> None:
        """Stop asking about volumes for a peer that was recently refused many of them."""
        guessed = (p for p in self._refused if p.volume_id and p.spiffe_id == peer.spiffe_id)
        if sum(1 for _ in guessed) >= REFUSED_VOLUMES_MAX:
            raise UnavailableError(
                "authorization.limit",
                f"{peer.spiffe_id} was refused {REFUSED_VOLUMES_MAX} volumes: try again later",
            )

    def _asked(self, peer: PeerIncarnation, asking: asyncio.Future[None]) -> None:
        del self._asking[peer]
        if not asking.cancelled():
            # Waiters get the exception; if there are none, mark it as retrieved.
            asking.exception()

    def _refuse(self, peer: PeerIncarnation, sent: int, reason: str) -> None:
        # An older yes that is still in flight must not override the refusal.
        self._refused[peer] = (sent, reason)
        self._granted.pop(peer, None)
        permit = self._permits.get(peer)
        if permit is not None:
            permit.take_back(reason)
        self._end(peer, reason)

    async def _keep_ending(self) -> None:
        while True:
            now = self._now_ns()
            used = set(self._uses())
            for peer in used:
                if now - self._granted.get(peer, now - self._keep_ns) >= self._keep_ns:
                    self._granted.pop(peer, None)
                    self._end(peer, self._refused.get(peer, (0, STALE))[1])
            for peer in self._granted.keys() - used:
                if now - self._granted[peer] >= self._fresh_ns:
                    del self._granted[peer]
            for peer, (sent, _) in [*self._refused.items()]:
                if now - sent >= self._keep_ns:
                    del self._refused[peer]
            ends = [self._granted[peer] + self._keep_ns for peer in used & self._granted.keys()]
            soonest = min(ends, default=now + _LOOK_NS)
            await asyncio.sleep(min(max(soonest - now, 0), _LOOK_NS) / 1e9)

    def _end(self, peer: PeerIncarnation, reason: str) -> None:
        if peer not in self._ending and peer in set(self._uses()):
            self._ending.add(peer)
            self._tasks.start(self._end_uses(peer, reason), name="authorization-lost")

    async def _end_uses(self, peer: PeerIncarnation, reason: str) -> None:
        get_logger().error("authorization_lost", peer=peer.name, reason=reason)
        try:
            await self._lost(peer, reason)
        finally:
            self._ending.discard(peer)


def _refusal(peer: PeerIncarnation, reason: str) -> VerificationError:
    return VerificationError(foreign_reason(reason), f"the broker does not authorize {peer.name}")
