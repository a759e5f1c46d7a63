"""Evidence of an accelerator card: what is accepted, and that every part is checked."""

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_private_key
from cryptography.x509 import load_pem_x509_certificate

from accelerators.cards import Maker
from sealane.crypto.encoding import fields
from sealane.crypto.evidence.card import (
    EVIDENCE_BYTES_MAX,
    EVIDENCE_LABEL,
    STATEMENT_LABEL,
    CardVerifier,
)
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.verifier import NOT_INTRODUCED
from sealane.errors import VerificationError

NOW = dt.datetime.now(dt.UTC)
FIRMWARE = bytes(range(32))
BINDING = Binding(runtime_data=b"", nonce=bytes(32), tls_public_key=b"tls", kem_public_key=b"kem")


class Card:
    """A card whose statements can be wrong in each part."""

    def __init__(self, maker: Maker, *, curve: ec.EllipticCurve | None = None) -> None:
        arguments, self.hardware_id = maker.card("1", curve=curve)
        self.chain = Path(arguments[3]).read_bytes()
        key = load_der_private_key(Path(arguments[1]).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self.key = key

    def evidence(
        self,
        *parts: bytes,
        label: str = STATEMENT_LABEL,
        outer: str = EVIDENCE_LABEL,
        changed: Callable[[bytes], bytes] = bytes,
        more: tuple[bytes, ...] = (),
        padding: int = 0,
    ) -> bytes:
        said = parts or (BINDING.device_nonce, b"bf3", FIRMWARE, b"\1")
        statement = fields(label, *said)
        signature = self.key.sign(statement, ec.ECDSA(hashes.SHA384()))
        # Zeros may follow certificates.
        chain = self.chain + bytes(padding)
        return fields(outer, changed(statement), signature, chain, *more)


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory.mktemp("cards") / "maker")


@pytest.fixture(scope="module")
def card(maker: Maker) -> Card:
    return Card(maker)


def verify(maker: Maker, evidence: bytes, *, now: dt.datetime = NOW) -> Claims:
    root = load_pem_x509_certificate(maker.path.read_bytes())
    return CardVerifier([root]).verify(
        evidence, binding=BINDING, introduced=NOT_INTRODUCED, endorsements=b"", now=now
    )


def refused(maker: Maker, evidence: bytes, *, now: dt.datetime = NOW) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(maker, evidence, now=now)
    return caught.value.reason


def test_a_genuine_card_has_these_claims(maker: Maker, card: Card) -> None:
    claims = verify(maker, card.evidence())
    assert claims.hardware_id == card.hardware_id
    assert (claims.product, claims.measurements) == ("bf3", {"firmware": FIRMWARE})
    assert claims.flags == {"protected_bus": True}
    unprotected = card.evidence(BINDING.device_nonce, b"bf3", FIRMWARE, b"\0")
    assert verify(maker, unprotected).flags == {"protected_bus": False}


def test_what_was_not_signed_for_this_challenge_is_refused(maker: Maker, card: Card) -> None:
    def flip(statement: bytes) -> bytes:
        return statement[:-1] + b"\0"

    assert refused(maker, card.evidence(changed=flip)) == "attestation.card.signature"
    stale = card.evidence(bytes(32), b"bf3", FIRMWARE, b"\1")
    assert refused(maker, stale) == "attestation.card.nonce"


def test_only_cards_of_trusted_makers_count(maker: Maker, card: Card, tmp_path: Path) -> None:
    other = Maker(tmp_path / "other")
    assert refused(other, card.evidence()) == "attestation.card.chain"
    assert refused(maker, Card(maker, curve=ec.SECP256R1()).evidence()) == (
        "attestation.card.certificate"
    )
    later = NOW + dt.timedelta(days=3)
    assert refused(maker, card.evidence(), now=later) == "attestation.card.expired"


NONCE = BINDING.device_nonce


@pytest.mark.parametrize(
    "make",
    [
        lambda _: b"",
        lambda card: card.evidence(outer="sealane other evidence v1"),
        lambda card: card.evidence(more=(b"more",)),
        lambda card: card.evidence(label="sealane other statement v1"),
        lambda card: card.evidence(NONCE, b"bf3", FIRMWARE),
        lambda card: card.evidence(NONCE, b"bf3", FIRMWARE, b"\1", b""),
        lambda card: card.evidence(NONCE + b"\0", b"bf3", FIRMWARE, b"\1"),
        lambda card: card.evidence(NONCE, b"bf3", FIRMWARE[1:], b"\1"),
        lambda card: card.evidence(NONCE, b"bf3", FIRMWARE, b"\2"),
        lambda card: card.evidence(NONCE, b"", FIRMWARE, b"\1"),
        lambda card: card.evidence(NONCE, b"b" * 21, FIRMWARE, b"\1"),
        lambda card: card.evidence(NONCE, b"\xff", FIRMWARE, b"\1"),
        lambda card: card.evidence(padding=EVIDENCE_BYTES_MAX),
    ],
)
def test_malformed_evidence_is_refused(
    maker: Maker, card: Card, make: Callable[[Card], bytes]
) -> None:
    assert refused(maker, make(card)) == "attestation.card.malformed"


def test_a_card_is_not_introduced(maker: Maker) -> None:
    del maker
    with pytest.raises(VerificationError):
        CardVerifier().introduce(b"x", now=NOW)
