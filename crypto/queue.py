"""The secret of one secure I/O queue: what both ends put into the exchange (docs/secure-queue.md).

Gateway and target exchange ephemeral shares over mutual TLS (`Storage.OpenQueue`); every value
both must agree on is in the transcript, so a changed one gives keys that fit nothing.
"""

import uuid
from dataclasses import dataclass
from typing import Final

from sealane.crypto.encoding import fields
from sealane.crypto.exchange import PUBLIC_KEY_BYTES, Exchange
from sealane.errors import ProtocolError

NONCE_BYTES: Final = 16
TICKET_BYTES: Final = 16
_LABEL: Final = "sealane queue secret v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTranscript:
    """What one secure queue is between whom."""

    volume_id: uuid.UUID
    host_nqn: str
    target_node: str
    gateway_node: str
    queue_id: int
    association_epoch: int
    target_incarnation: int
    gateway_nonce: bytes
    target_nonce: bytes
    gateway_key: bytes
    target_key: bytes

    def __post_init__(self) -> None:
        if len(self.gateway_nonce) != NONCE_BYTES or len(self.target_nonce) != NONCE_BYTES:
            raise ProtocolError("queue.nonce.malformed", f"a nonce has {NONCE_BYTES} bytes")
        if len(self.gateway_key) != PUBLIC_KEY_BYTES or len(self.target_key) != PUBLIC_KEY_BYTES:
            raise ProtocolError("queue.key.malformed", f"a share has {PUBLIC_KEY_BYTES} bytes")

    def encode(self) -> bytes:
        """Return the bytes both sides hash."""
        return fields(
            _LABEL,
            self.volume_id.bytes,
            self.host_nqn.encode(),
            self.target_node.encode(),
            self.gateway_node.encode(),
            self.queue_id.to_bytes(2, "big"),
            self.association_epoch.to_bytes(8, "big"),
            self.target_incarnation.to_bytes(8, "big"),
            self.gateway_nonce,
            self.target_nonce,
            self.gateway_key,
            self.target_key,
        )


def derive_queue_secret(
    own: Exchange, *, peer_key: bytes, transcript: QueueTranscript
) -> bytearray:
    """Derive the 32-byte queue secret; the consumer wipes it."""
    return own.derive(peer_key, transcript.encode(), _LABEL)
