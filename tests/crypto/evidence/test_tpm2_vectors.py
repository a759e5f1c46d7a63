"""Quotes and certifications of a software TPM and of Azure's vTPM, recorded by others."""

import base64
import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from sealane.crypto.evidence.tpm2_structures import (
    BORN_IN_TPM,
    parse_certification,
    parse_public,
    parse_quote,
    verify_signature,
)
from sealane.errors import VerificationError
from vendors.vectors import vector


def test_quote_of_the_software_tpm_is_read() -> None:
    quote = vector("tpm/swtpm/q.msg")
    key = load_pem_public_key(vector("tpm/swtpm/ak.pem"))
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert parse_public(vector("tpm/swtpm/ak.tss")[2:]).key == key
    verify_signature(key, vector("tpm/swtpm/q.sig"), quote)
    parsed = parse_quote(quote)
    assert parsed.indices == (0, 1, 2, 3, 4, 5, 6, 7, 16)
    assert parsed.attest.extra_data == vector("tpm/swtpm/nonce.bin")
    assert parsed.attest.is_safe
    assert (parsed.attest.reset_count, parsed.attest.restart_count) == (2, 0)


@pytest.mark.parametrize(
    ("name", "public", "is_born_there"),
    [("certify", "tls.tss", True), ("certify_ext", "ext.pub", False)],
)
def test_certification_tells_a_key_of_the_tpm_from_an_imported_one(
    name: str, public: str, is_born_there: bool
) -> None:
    certification = vector(f"tpm/swtpm/{name}.msg")
    signer = parse_public(vector("tpm/swtpm/ak.tss")[2:]).key
    assert isinstance(signer, ec.EllipticCurvePublicKey)
    # Recorded as DER, not as a TPMT_SIGNATURE.
    signer.verify(vector(f"tpm/swtpm/{name}.sig"), certification, ec.ECDSA(SHA256()))
    key = parse_public(vector(f"tpm/swtpm/{public}")[2:])
    assert parse_certification(certification).name == key.name
    assert key.has(required=BORN_IN_TPM) == is_born_there


@pytest.mark.parametrize("platform", ["az-snp-vtpm", "az-tdx-vtpm"])
def test_quote_of_a_cloud_tpm_matches_its_registers(platform: str) -> None:
    recorded = json.loads(vector(f"tpm/{platform}/tpm-quote-v1.json"))
    message, signature = (bytes.fromhex(recorded[k]) for k in ("message", "signature"))
    key = _hcl_attestation_key(platform)
    verify_signature(key, b"\x00\x14\x00\x0b\x01\x00" + signature, message)
    quote = parse_quote(message)
    assert quote.attest.extra_data == b"challenge"
    assert quote.indices == tuple(range(24))
    values = b"".join(bytes.fromhex(pcr) for pcr in recorded["pcrs"])
    assert hashlib.sha256(values).digest() == quote.digest


def test_quote_by_another_attestation_key_is_refused() -> None:
    message = vector("tpm/other-ak/quote.msg")
    assert parse_quote(message)
    signature = b"\x00\x14\x00\x0b\x01\x00" + vector("tpm/other-ak/quote.sig")
    with pytest.raises(VerificationError, match=r"tpm2\.signature"):
        verify_signature(_hcl_attestation_key("az-snp-vtpm"), signature, message)


def _hcl_attestation_key(platform: str) -> rsa.RSAPublicKey:
    """Read HCLAkPub from the runtime data behind the hardware report."""
    report = vector(f"tpm/{platform}/hcl-report.bin")
    start = 32 + 1184
    size = int.from_bytes(report[start + 16 : start + 20], "little")
    keys = json.loads(report[start + 20 : start + 20 + size])["keys"]
    (jwk,) = (k for k in keys if k["kid"] == "HCLAkPub")
    modulus, exponent = (_base64url(jwk[name]) for name in ("n", "e"))
    return rsa.RSAPublicNumbers(exponent, modulus).public_key()


def _base64url(text: str) -> int:

    return int.from_bytes(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), "big")
