"""Challenges: single-use nonces, limited in number and per peer; times are the monotonic clock's.

A challenge is for one node, one role and one type of evidence, and is used up by the first attempt
that names it. Of two concurrent attempts only one gets it.
"""

import secrets
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from sealane.crypto.attestation.runtime_data import NONCE_BYTES
from sealane.crypto.evidence.verifier import NOT_INTRODUCED, Introduced
from sealane.errors import UnavailableError, VerificationError

SESSION_ID_BYTES: Final = 16
CHALLENGE_SECONDS: Final = 60

# Limits of the verifier's memory: enough for a cluster that starts at once, and a single address
# can't use it up.
CHALLENGES_MAX: Final = 4096
CHALLENGES_PER_PEER_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """An open challenge; `expires_ns` is on the verifier's monotonic clock."""

    session_id: bytes
    nonce: bytes
    node: str
    role: str
    evidence_type: str
    peer: str
    expires_ns: int
    introduced: Introduced = NOT_INTRODUCED


class Challenges:
    """The open challenges of one verifier."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Challenge] = OrderedDict()
        self._by_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        *,
        node: str,
        role: str,
        evidence_type: str,
        peer: str,
        now_ns: int,
        introduced: Introduced = NOT_INTRODUCED,
    ) -> Challenge:
        """Create a challenge for `peer`; UnavailableError `attestation.challenge.limit`."""
        self._expire(now_ns)
        from_peer = self._by_peer[peer]
        if len(self._open) >= CHALLENGES_MAX or from_peer >= CHALLENGES_PER_PEER_MAX:
            raise UnavailableError(
                "attestation.challenge.limit",
                f"{from_peer} challenges of {peer} and {len(self._open)} in all are open: try "
                "again later",
            )
        challenge = Challenge(
            session_id=secrets.token_bytes(SESSION_ID_BYTES),
            nonce=secrets.token_bytes(NONCE_BYTES),
            node=node,
            role=role,
            evidence_type=evidence_type,
            peer=peer,
            expires_ns=now_ns + CHALLENGE_SECONDS * 10**9,
            introduced=introduced,
        )
        self._open[challenge.session_id] = challenge
        self._by_peer[peer] += 1
        return challenge

    def take(self, session_id: bytes, *, now_ns: int) -> Challenge:
        """Remove a challenge and return it, for its single attempt.

        VerificationError `attestation.nonce.stale`: unknown, used or expired.
        """
        challenge = self._open.pop(session_id, None)
        if challenge is not None:
            self._forget(challenge.peer)
        if challenge is None or challenge.expires_ns <= now_ns:
            raise VerificationError(
                "attestation.nonce.stale",
                "the challenge is unknown, used or expired: request a new one",
            )
        return challenge

    def _expire(self, now_ns: int) -> None:
        # They expire in the order of creation: the clock is monotonic, and all have the same
        # lifetime.
        while self._open:
            session_id, oldest = next(iter(self._open.items()))
            if oldest.expires_ns > now_ns:
                return
            del self._open[session_id]
            self._forget(oldest.peer)

    def _forget(self, peer: str) -> None:
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]
