"""The target's side of the key agreement for a queue's secret (secure-queue.md, section 2)."""

import secrets
from dataclasses import dataclass

from sealane.crypto.certificates import Subject
from sealane.crypto.exchange import Exchange
from sealane.crypto.kem import KemKey
from sealane.crypto.queue import (
    NONCE_BYTES,
    QueueOffer,
    QueueTranscript,
    derive_queue_secret,
)
from sealane.crypto.share import new_share, open_share, seal_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """A queue's secret, and the values from which the gateway derives it."""

    secret: bytearray
    public_key: bytes
    nonce: bytes
    sealed_share: bytes


def exchange(
    offer: QueueOffer,
    caller: Subject,
    *,
    sealed_share: bytes,
    incarnation: int,
    milestone: bytes,
    kem: KemKey,
) -> Exchanged:
    """Agree on the secret of the queue that `caller` offers; blocks while it uses the KEM key.

    `sealed_share` is the caller's share; `milestone` is that of the volume's store. Errors of
    `open_share` and `derive_queue_secret`.
    """
    own = Exchange()
    transcript = QueueTranscript(
        offer=offer,
        target_incarnation=incarnation,
        nonce=secrets.token_bytes(NONCE_BYTES),
        public_key=own.public_key,
        milestone=milestone,
    )
    share = new_share()
    sealed = seal_share(
        share,
        transcript,
        kem_algorithm=caller.kem_algorithm,
        public_key=caller.kem_public_key,
    )
    secret = derive_queue_secret(
        own,
        peer_key=offer.public_key,
        gateway_share=open_share(sealed_share, offer, key=kem),
        target_share=share,
        transcript=transcript,
    )
    return Exchanged(
        secret=secret,
        public_key=own.public_key,
        nonce=transcript.nonce,
        sealed_share=sealed,
    )
