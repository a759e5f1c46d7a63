"""Keys of a session: transcript, both directions' keys and the confirmation (DESIGN §7).

Pure: no sockets, no clock. Each side puts together what it sent and what it received; the same
transcript, and only that, gives the same keys. What mutual TLS proved about both nodes is in it.
"""

import hmac
import struct
from dataclasses import dataclass, fields

from sealane.crypto.exchange import Exchange, wipe
from sealane.errors import VerificationError

VERSION = 1
CONNECTION_ID_BYTES = 8
NONCE_BYTES = 32
CONFIRMATION_BYTES = 32
CERTIFICATE_DIGEST_BYTES = 32

_DOMAIN = b"sealane session v1"
_INITIATOR_KEY = "sealane session v1 initiator to responder"
_RESPONDER_KEY = "sealane session v1 responder to initiator"
_CONFIRMATION_KEY = "sealane session v1 confirmation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Everything that both sides must agree on before a byte of data moves."""

    version: int
    display_name: str
    initiator_node: str
    """Identity in the initiator's certificate."""
    responder_node: str
    initiator_certificate: bytes
    """SHA-256 (DER) of the leaf that the initiator showed on this very channel."""
    initiator_connection_id: bytes
    """8 bytes; names packets sent to the initiator."""
    responder_connection_id: bytes
    initiator_public_key: bytes
    responder_public_key: bytes
    initiator_nonce: bytes
    responder_nonce: bytes
    unit_bytes: int
    rate_bits_per_second: int
    initiator_address: str
    """host:port that the initiator sends packets from, before any relay."""
    responder_address: str

    def __post_init__(self) -> None:
        for name, length in (
            ("initiator_certificate", CERTIFICATE_DIGEST_BYTES),
            ("initiator_connection_id", CONNECTION_ID_BYTES),
            ("responder_connection_id", CONNECTION_ID_BYTES),
            ("initiator_nonce", NONCE_BYTES),
            ("responder_nonce", NONCE_BYTES),
        ):
            found = len(getattr(self, name))
            if found != length:
                raise VerificationError(
                    "session.establish.malformed", f"{name} has {found} bytes, not {length}"
                )

    def encode(self) -> bytes:
        """Every field in order, with its length before it, so no two transcripts look alike."""
        parts = [_DOMAIN]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int):
                encoded = struct.pack(">Q", value)
            elif isinstance(value, str):
                encoded = value.encode()
            else:
                encoded = value
            parts.append(struct.pack(">I", len(encoded)))
            parts.append(encoded)
        return b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """One side's keys; the engine wipes the arrays when it takes them over."""

    send: bytearray
    receive: bytearray

    def wipe(self) -> None:
        """Overwrite both keys, when they were not handed over."""
        wipe(self.send)
        wipe(self.receive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Established:
    """What one side derives: keys, and the responder's proof that it derived the same."""

    keys: SessionKeys
    confirmation: bytes


def derive(exchange: Exchange, transcript: Transcript, *, is_initiator: bool) -> Established:
    """Derive both keys and the confirmation MAC.

    Raises VerificationError for an unusable share or a transcript of another version.
    """
    if transcript.version != VERSION:
        raise VerificationError(
            "session.establish.version",
            f"session version {transcript.version} is not supported, only {VERSION}",
        )
    encoded = transcript.encode()
    peer = transcript.responder_public_key if is_initiator else transcript.initiator_public_key
    forward = exchange.derive(peer, encoded, _INITIATOR_KEY)
    backward = exchange.derive(peer, encoded, _RESPONDER_KEY)
    confirming = exchange.derive(peer, encoded, _CONFIRMATION_KEY)
    try:
        confirmation = hmac.digest(confirming, encoded, "sha256")
    finally:
        wipe(confirming)
    keys = (
        SessionKeys(send=forward, receive=backward)
        if is_initiator
        else SessionKeys(send=backward, receive=forward)
    )
    return Established(keys=keys, confirmation=confirmation)


def confirm(established: Established, confirmation: bytes) -> SessionKeys:
    """Compare the responder's confirmation with ours, in constant time, and release the keys.

    Raises VerificationError if it is another: something in between changed a value.
    """
    if not hmac.compare_digest(established.confirmation, confirmation):
        established.keys.wipe()
        raise VerificationError(
            "session.establish.confirmation",
            "the peer derived other keys: a value of the exchange was changed on the way",
        )
    return established.keys
