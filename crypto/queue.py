"""The secret of one secure I/O queue: its transcript and derivation (secure-queue.md).

Gateway and target exchange ephemeral keys over mutual TLS (`Storage.OpenQueue`), and each seals a
random share to the other's attested KEM key. So an attacker with only a stolen TLS key, or in the
middle, derives a useless secret. Every value that both must agree on is in the transcript, so a
changed value gives keys that don't match.
"""

import hashlib
import uuid
from dataclasses import dataclass, field
from typing import Final

from sealane.crypto.encoding import fields
from sealane.crypto.exchange import PUBLIC_KEY_BYTES, Exchange, wipe
from sealane.errors import ProtocolError

NONCE_BYTES: Final = 16
TICKET_BYTES: Final = 16
MILESTONE_BYTES: Final = 32
"""Milestone: progress of a store, as encoded by the engine (docs/formats/secure-queue.md §2)."""
VERSION: Final = 3
"""Version of the key agreement. Both labels name it, so no peer can be made to use another one."""
_LABEL: Final = f"sealane queue secret v{VERSION}"
_OFFER: Final = f"sealane queue offer v{VERSION}"
_CLAIMING_OFFER: Final = f"sealane claiming queue offer v{VERSION}"
_CLAIM: Final = "sealane group claim v1"
GROUP_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClaim:
    """What a gateway says of its fail-over group; `term` is the group's, as the gateway knows it.

    With `is_take_over`, it ends that term and serves in the next one; otherwise it says that it
    serves in that term.
    """

    group: bytes
    term: int
    is_take_over: bool = False
    accepts_loss: bool = False
    incarnation: int = 0
    """Incarnation of the target that has all that the gateway has acknowledged; 0: nothing."""
    by_operator: bool = field(default=False, compare=False)
    """Whether an operator asked; for reports only, and not bound by an offer."""

    def __post_init__(self) -> None:
        if len(self.group) != GROUP_BYTES:
            raise ProtocolError(
                "queue.group.malformed",
                f"a group's name of {len(self.group)} bytes; needed: {GROUP_BYTES}",
            )

    def encode(self) -> bytes:
        """Return the bytes that an offer binds."""
        return fields(
            _CLAIM,
            self.group,
            self.term.to_bytes(8, "big"),
            self.is_take_over.to_bytes(1, "big"),
            self.accepts_loss.to_bytes(1, "big"),
            self.incarnation.to_bytes(8, "big"),
        )


def group_name(volume_id: uuid.UUID, host_nqn: str) -> bytes:
    """Return the name of the gateways that serve a volume to one host."""
    named = fields("sealane fail-over group v1", volume_id.bytes, host_nqn.encode())
    return hashlib.sha256(named).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOffer:
    """A gateway's request for a queue; its share is sealed to the target for this request only."""

    volume_id: uuid.UUID
    host_nqn: str
    target_node: str
    gateway_node: str
    queue_id: int
    association_epoch: int
    is_read_only: bool
    nonce: bytes
    public_key: bytes
    milestone: bytes = b""
    """What the target's store must contain; empty: no requirement."""
    claim: GroupClaim | None = None

    def __post_init__(self) -> None:
        _check_sizes(self.nonce, self.public_key, self.milestone)

    def encode(self) -> bytes:
        """Return the bytes that the sealed share and the transcript bind."""
        # An offer without a claim is the same as that of versions that know no claims.
        claims = () if self.claim is None else (self.claim.encode(),)
        return fields(
            _CLAIMING_OFFER if claims else _OFFER,
            self.volume_id.bytes,
            self.host_nqn.encode(),
            self.target_node.encode(),
            self.gateway_node.encode(),
            self.queue_id.to_bytes(4, "big"),
            self.association_epoch.to_bytes(8, "big"),
            self.is_read_only.to_bytes(1, "big"),
            self.nonce,
            self.public_key,
            self.milestone,
            *claims,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTranscript:
    """All that both ends agree on for one queue; the target's share is sealed for this only.

    A target creates it only if its store contains the offer's milestone.
    """

    offer: QueueOffer
    target_incarnation: int
    nonce: bytes
    public_key: bytes
    milestone: bytes = b""
    """The target store's current milestone; empty: it keeps no freshness."""

    def __post_init__(self) -> None:
        _check_sizes(self.nonce, self.public_key, self.milestone)

    def encode(self) -> bytes:
        """Return the bytes that both sides hash."""
        return fields(
            _LABEL,
            self.offer.encode(),
            self.target_incarnation.to_bytes(8, "big"),
            self.nonce,
            self.public_key,
            self.milestone,
        )


def derive_queue_secret(
    own: Exchange,
    *,
    peer_key: bytes,
    gateway_share: bytearray,
    target_share: bytearray,
    transcript: QueueTranscript,
) -> bytearray:
    """Derive the 32-byte queue secret; the consumer wipes it. Wipes both shares."""
    shares = gateway_share + target_share
    try:
        return own.derive(peer_key, transcript.encode(), _LABEL, also=shares)
    finally:
        for secret in (shares, gateway_share, target_share):
            wipe(secret)


def _check_sizes(nonce: bytes, public_key: bytes, milestone: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(
            "queue.nonce.malformed", f"a nonce of {len(nonce)} bytes; needed: {NONCE_BYTES}"
        )
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ProtocolError(
            "queue.key.malformed", f"a share of {len(public_key)} bytes; needed: {PUBLIC_KEY_BYTES}"
        )
    if len(milestone) not in {0, MILESTONE_BYTES}:
        raise ProtocolError(
            "queue.milestone.malformed",
            f"a milestone of {len(milestone)} bytes; allowed: {MILESTONE_BYTES}, or none",
        )
