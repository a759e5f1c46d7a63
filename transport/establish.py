"""Keys of a session: offer, transcript, both directions' keys and the confirmation.

Pure: no sockets, no clock. Each side assembles the transcript from what it sent and received; only
equal transcripts give equal keys. The transcript includes the identities that mutual TLS proved,
and each end adds a share sealed to the other's attested KEM key (session-establishment.md). If the
two jobs share a secret, it is part of the keys, and the offer proves that the initiator's job knows
it.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from sealane.crypto.certificates import Subject
from sealane.crypto.encoding import fields
from sealane.crypto.exchange import PUBLIC_KEY_BYTES, Exchange, wipe
from sealane.errors import UsageError, VerificationError

VERSION: Final = 6
"""Version that this release offers first."""
VERSIONS: Final = (VERSION, 5)
"""What it accepts; 5 is that of the release before."""
CONNECTION_ID_BYTES: Final = 8
NONCE_BYTES: Final = 32
DIGEST_BYTES: Final = 32

_OFFER: Final = "sealane session offer v{}"
_TRANSCRIPT: Final = "sealane session v{}"
_INITIATOR_KEY: Final = "sealane session v{} initiator to responder"
_RESPONDER_KEY: Final = "sealane session v{} responder to initiator"
_CONFIRMATION_KEY: Final = "sealane session v{} confirmation"
_SECRET: Final = b"sealane session secret v5"
_LATER: Final = b"sealane6"
"""Ends the nonce of a responder that answers an earlier version than it knows. The release before
carries it in its transcript as it is; by chance it is there once in 2^64 sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An end's credentials on the control channel, as thumbprints (SHA-256, 32 bytes)."""

    certificate: bytes
    """Thumbprint of its leaf (DER)."""
    token: bytes
    """Thumbprint of its attestation result (the compact JWS), whose `cnf` is that leaf."""

    def __post_init__(self) -> None:
        _check_length("certificate", self.certificate, DIGEST_BYTES)
        _check_length("token", self.token, DIGEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOffer:
    """The initiator's request; its share is sealed to the responder for this request only."""

    version: int
    display_name: str
    initiator: Subject
    """From its certificate: node, incarnation, KEM key."""
    responder: Subject
    initiator_shown: Shown
    """On the channel of this exchange."""
    connection_id: bytes
    """8 bytes, in packets sent to the initiator."""
    public_key: bytes
    nonce: bytes
    units: tuple[int, ...]
    """Candidates for the payload of a packet, in bytes, descending."""
    rate_bits_per_second: int
    addresses: tuple[str, ...]
    """host:port that the initiator sends packets from, per path, before any relay."""

    def __post_init__(self) -> None:
        check_version(self.version)
        _check_end(self.connection_id, self.public_key, self.nonce)

    def encode(self) -> bytes:
        """Return the bytes that the initiator's sealed share and the transcript bind."""
        return fields(
            _OFFER.format(self.version),
            struct.pack(">Q", self.version),
            self.display_name.encode(),
            *_subject(self.initiator),
            *_subject(self.responder),
            self.initiator_shown.certificate,
            self.initiator_shown.token,
            self.connection_id,
            self.public_key,
            self.nonce,
            *_numbers(self.units),
            struct.pack(">Q", self.rate_bits_per_second),
            *_texts(self.addresses),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Everything that both sides must agree on before any data moves.

    The responder's share is sealed to the initiator for this transcript only.
    """

    offer: SessionOffer
    responder_shown: Shown
    """With its answer; the leaf is one that its TLS end may show."""
    connection_id: bytes
    """8 bytes, in packets sent to the responder."""
    public_key: bytes
    nonce: bytes
    units: tuple[int, ...]
    """Candidates that the responder accepts."""
    addresses: tuple[str, ...]
    """host:port that the responder sends packets from, per path."""

    def __post_init__(self) -> None:
        _check_end(self.connection_id, self.public_key, self.nonce)

    def encode(self) -> bytes:
        """Return the bytes that both sides hash."""
        return fields(
            _TRANSCRIPT.format(self.offer.version),
            self.offer.encode(),
            self.responder_shown.certificate,
            self.responder_shown.token,
            self.connection_id,
            self.public_key,
            self.nonce,
            *_numbers(self.units),
            *_texts(self.addresses),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """Keys of one side; the engine wipes the arrays when it takes them over."""

    send: bytearray
    receive: bytearray

    def wipe(self) -> None:
        """Overwrite both keys if they were not handed over."""
        wipe(self.send)
        wipe(self.receive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Established:
    """Result of one side: keys, and the responder's proof that it derived the same ones."""

    keys: SessionKeys
    confirmation: bytes


def check_version(version: int) -> None:
    """UsageError `session.establish.version` for a version that this release lacks."""
    if version not in VERSIONS:
        allowed = " and ".join(str(known) for known in VERSIONS)
        raise UsageError(
            "session.establish.version",
            f"session version {version} is not supported; allowed: {allowed}",
        )


def responder_nonce(version: int) -> bytes:
    """Return the nonce of a responder to an offer of this version, 32 bytes.

    With an earlier version than its newest it says so, for an initiator that would know it, too.
    """
    if version == VERSION:
        return secrets.token_bytes(NONCE_BYTES)
    return secrets.token_bytes(NONCE_BYTES - len(_LATER)) + _LATER


def check_not_lowered(version: int, nonce: bytes) -> None:
    """VerificationError `session.establish.lowered` unless both ends used their newest version.

    An initiator offers an earlier one only if its peer refused the newest. A responder that knows
    the newest never does, so somebody between them did.
    """
    if version != VERSION and nonce.endswith(_LATER):
        raise VerificationError(
            "session.establish.lowered",
            f"the peer knows session version {VERSION}, but somebody refused it in its name: "
            f"version {version} was to be used",
        )


def session_secret(secret: bytes) -> bytearray:
    """Return the key derived from the secret of two jobs, 32 bytes; the caller wipes it."""
    return bytearray(hmac.digest(secret, _SECRET, "sha256"))


def prove_secret(secret: bytearray, offer: SessionOffer) -> bytes:
    """Return the proof for this offer that the initiator's job knows the secret, 32 bytes."""
    return hmac.digest(secret, offer.encode(), "sha256")


def check_secret(secret: bytearray, offer: SessionOffer, proof: bytes) -> None:
    """VerificationError `session.secret.mismatch` unless the offer's initiator knows the secret."""
    if not hmac.compare_digest(prove_secret(secret, offer), proof):
        raise VerificationError(
            "session.secret.mismatch", "the peer's job doesn't know the secret of this session"
        )


def derive(
    exchange: Exchange,
    transcript: Transcript,
    *,
    initiator_share: bytearray,
    responder_share: bytearray,
    secret: bytearray | None,
    is_initiator: bool,
) -> Established:
    """Derive both keys and the confirmation MAC. Wipes both shares.

    `secret` is the result of `session_secret` for the jobs' secret. Raises VerificationError for an
    unusable public key.
    """
    encoded = transcript.encode()
    peer = transcript.public_key if is_initiator else transcript.offer.public_key
    shares = initiator_share + responder_share + (secret or b"")
    try:
        forward, backward, confirming = (
            exchange.derive(peer, encoded, label.format(transcript.offer.version), also=shares)
            for label in (_INITIATOR_KEY, _RESPONDER_KEY, _CONFIRMATION_KEY)
        )
    finally:
        for used in (shares, initiator_share, responder_share):
            wipe(used)
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
    """Compare the responder's confirmation with the own one, in constant time, and return the keys.

    Raises VerificationError if they differ: a value was changed in transit, or the responder could
    not open the initiator's share.
    """
    if not hmac.compare_digest(established.confirmation, confirmation):
        established.keys.wipe()
        raise VerificationError(
            "session.establish.confirmation",
            "the peer derived different keys: a value of the exchange was changed in transit",
        )
    return established.keys


def _subject(subject: Subject) -> tuple[bytes, ...]:
    return (
        subject.spiffe_id.encode(),
        subject.tenant.encode(),
        subject.incarnation,
        subject.kem_algorithm.encode(),
        subject.kem_public_key,
    )


def _numbers(numbers: tuple[int, ...]) -> tuple[bytes, ...]:
    return tuple(struct.pack(">Q", number) for number in (len(numbers), *numbers))


def _texts(texts: tuple[str, ...]) -> tuple[bytes, ...]:
    return (struct.pack(">Q", len(texts)), *(text.encode() for text in texts))


def _check_end(connection_id: bytes, public_key: bytes, nonce: bytes) -> None:
    _check_length("connection_id", connection_id, CONNECTION_ID_BYTES)
    _check_length("public_key", public_key, PUBLIC_KEY_BYTES)
    _check_length("nonce", nonce, NONCE_BYTES)


def _check_length(name: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise VerificationError(
            "session.establish.malformed", f"{name} of {len(value)} bytes; allowed: {length}"
        )
