"""The verifier of accelerator cards' evidence: secondary evidence of a gateway.

A card signs a statement with a key on P-384, which a card maker's authority certified: nonce,
product, digest of its firmware, and whether its bus is protected. The emulated card (`sealane-dpu`)
speaks this format; a card with another one needs a module of its own.
"""

import datetime as dt
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.encoding import parse_fields
from sealane.crypto.evidence import media_types
from sealane.crypto.evidence.chain import (
    issuing_root,
    key_sha256,
    parse_certificates,
    verify_chain,
)
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.verifier import Introduced, refuse_introduction
from sealane.errors import VerificationError
from sealane.reasons import ReasonId

CARD: Final = "card"
MEDIA_TYPE: Final = media_types.CARD_EVIDENCE
SAFE_FLAGS: Final[Mapping[str, bool]] = {"protected_bus": True}
"""Over a bus without protection, whoever controls the host reads keys and plaintext."""

EVIDENCE_LABEL: Final = "sealane card evidence v1"
STATEMENT_LABEL: Final = "sealane card statement v1"
EVIDENCE_BYTES_MAX: Final = 64 << 10
_NONCE_BYTES: Final = 32
_DIGEST_BYTES: Final = 32
_PRODUCT_BYTES_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A card's parsed evidence. `signature` (ECDSA with SHA-384, DER) covers `signed`."""

    nonce: bytes
    product: str
    firmware: bytes
    has_protected_bus: bool
    signed: bytes
    signature: bytes
    chain: Sequence[x509.Certificate]

    @property
    def identity(self) -> tuple[object, ...]:
        """What stays the same while it is the same card."""
        return self.card_id, self.product, self.firmware, self.has_protected_bus

    @property
    def card_id(self) -> str:
        """Hardware id: the digest of the key that signs."""
        return f"key-sha256:{key_sha256(self.chain[0]).hex()}"


def parse_statement(evidence: bytes) -> Statement:
    """Parse evidence; VerificationError `attestation.card.malformed` or `.certificate`."""
    if len(evidence) > EVIDENCE_BYTES_MAX:
        raise _malformed(f"it has {len(evidence)} bytes; allowed: {EVIDENCE_BYTES_MAX}")
    parts = parse_fields(EVIDENCE_LABEL, evidence, count_max=3)
    if parts is None or len(parts) != 3:
        raise _malformed("it is not a statement with signature and certificates")
    signed, signature, certificates = parts
    said = parse_fields(STATEMENT_LABEL, signed, count_max=4)
    if said is None or len(said) != 4:
        raise _malformed("it does not hold a card's statement")
    nonce, product, firmware, bus = said
    if len(nonce) != _NONCE_BYTES or len(firmware) != _DIGEST_BYTES or bus not in {b"\0", b"\1"}:
        raise _malformed("a field of the statement has another length")
    if not 0 < len(product) <= _PRODUCT_BYTES_MAX or not product.isascii():
        raise _malformed("the product has no name of ASCII characters")
    return Statement(
        nonce=nonce,
        product=product.decode("ascii"),
        firmware=firmware,
        has_protected_bus=bus == b"\1",
        signed=signed,
        signature=signature,
        chain=parse_certificates(certificates, kind=CARD),
    )


def check_statement(statement: Statement, *, nonce: bytes) -> None:
    """Raise VerificationError unless the statement's first certificate signed it for `nonce`.

    `attestation.card.certificate`, `.signature`, `.nonce`. Whether that certificate is to be
    trusted is the caller's to know.
    """
    key = statement.chain[0].public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise _fault("attestation.card.certificate", "the card's key is not on P-384")
    try:
        key.verify(statement.signature, statement.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature as error:
        raise _fault(
            "attestation.card.signature", "the card's key did not sign this statement"
        ) from error
    if not secrets.compare_digest(statement.nonce, nonce):
        raise _fault("attestation.card.nonce", "the statement does not answer this challenge")


class CardVerifier:
    """Verifier of cards' evidence. `roots` are the card makers' authorities that are trusted."""

    evidence_type = CARD
    media_type = MEDIA_TYPE
    endorsements_media_type = ""
    safe_flags = SAFE_FLAGS

    def __init__(self, roots: Sequence[x509.Certificate] = ()) -> None:
        self._roots = tuple(roots)

    def introduce(self, introduction: bytes, *, now: dt.datetime) -> Introduced:  # noqa: ARG002
        """Refuse an introduction: this type has none."""
        return refuse_introduction(introduction, evidence_type=self.evidence_type)

    def verify(
        self,
        evidence: bytes,
        *,
        binding: Binding,
        introduced: Introduced,  # noqa: ARG002
        endorsements: bytes,  # noqa: ARG002 - evidence comes with its chain
        now: dt.datetime,
    ) -> Claims:
        """Return the claims of a genuine card; VerificationError `attestation.card.<fault>`."""
        statement = parse_statement(evidence)
        root = issuing_root(statement.chain[-1], self._roots, kind=CARD)
        verified = verify_chain(statement.chain, root=root, revocation_lists={}, kind=CARD, now=now)
        check_statement(statement, nonce=binding.device_nonce)
        return Claims(
            evidence_type=CARD,
            hardware_id=statement.card_id,
            product=statement.product,
            measurements={"firmware": statement.firmware},
            tcb={},
            flags={"protected_bus": statement.has_protected_bus},
            properties={},
            valid_until=verified.valid_until,
        )


def _malformed(message: str) -> VerificationError:
    return _fault("attestation.card.malformed", f"the card's evidence: {message}")


def _fault(reason: ReasonId, message: str) -> VerificationError:
    return VerificationError(reason, message)
