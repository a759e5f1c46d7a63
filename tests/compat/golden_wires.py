"""The bytes that two daemons must agree on before they exchange anything, as digests."""

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import replace

from sealane.crypto.certificates import Subject
from sealane.crypto.queue import QueueOffer, QueueTranscript
from sealane.transport.establish import SessionOffer, Shown, Transcript


def queue_offer() -> QueueOffer:
    """Return a gateway's request for a queue."""
    return QueueOffer(
        volume_id=uuid.UUID(int=1),
        host_nqn="nqn.2026-11.dev.sealane:gateway:g",
        target_node="s",
        gateway_node="g",
        queue_id=2,
        association_epoch=3,
        is_read_only=False,
        nonce=b"n" * 16,
        public_key=b"k" * 32,
        milestone=b"m" * 32,
    )


def session_offer(version: int) -> SessionOffer:
    """Return a fabric's offer of a session of this version."""
    return SessionOffer(
        version=version,
        display_name="gradients",
        initiator=_subject("a"),
        responder=_subject("b"),
        initiator_shown=Shown(certificate=b"c" * 32, token=b"t" * 32),
        connection_id=bytes(range(8)),
        public_key=b"k" * 32,
        nonce=b"i" * 32,
        units=(8896, 1408),
        rate_bits_per_second=200_000_000,
        addresses=("192.0.2.1:1000", "192.0.2.1:1001"),
    )


def _subject(node: str) -> Subject:
    return Subject(
        node=node, role="fabric", tenant="t", incarnation=b"n" * 16, kem_public_key=b"k" * 32
    )


def wires() -> Mapping[str, str]:
    """Return SHA-256 of offers and transcripts with fixed values, in hexadecimal."""
    queue = QueueTranscript(
        offer=queue_offer(),
        target_incarnation=4,
        nonce=b"o" * 16,
        public_key=b"l" * 32,
        milestone=b"p" * 32,
    )
    session = Transcript(
        offer=session_offer(5),
        responder_shown=Shown(certificate=b"d" * 32, token=b"u" * 32),
        connection_id=bytes(range(8, 16)),
        public_key=b"l" * 32,
        nonce=b"r" * 32,
        units=(1408,),
        addresses=("192.0.2.2:2000",),
    )
    encoded = {
        "queue offer": queue.offer.encode(),
        "queue transcript": queue.encode(),
        "session offer": session.offer.encode(),
        "session transcript": session.encode(),
        "session offer 6": session_offer(6).encode(),
        "session transcript 6": replace(session, offer=session_offer(6)).encode(),
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in encoded.items()}
