"""TPM 2.0 evidence: endorsement key, attestation key, quote, certified KEM key.

The introduction contains the endorsement key (EK) with its certificates and the attestation key
(AK). The challenge contains a credential that only a TPM with both keys can open. Evidence is a
proof that it was opened, a quote by the AK over the runtime data, the PCR values, the firmware's
event log, and the AK's certification of a KEM key that this TPM created and keeps. attestation.md.

It does not prove that the running kernel is unchanged since it was measured into the PCRs.
"""

import datetime as dt
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

from sealane.crypto.encoding import fields, parse_fields
from sealane.crypto.evidence import tpm2_event_log
from sealane.crypto.evidence.chain import (
    CERTIFICATES_MAX,
    issuing_root,
    parse_certificate,
    verify_chain,
)
from sealane.crypto.evidence.claims import Binding, Claims, HardwareClock, Memory
from sealane.crypto.evidence.tpm2_credential import make_credential
from sealane.crypto.evidence.tpm2_structures import (
    ALG_AES,
    ALG_CFB,
    ALG_ECDSA,
    ALG_NULL,
    ALG_RSASSA,
    ALG_SHA256,
    BORN_IN_TPM,
    DECRYPT,
    PCR_BYTES,
    RESTRICTED,
    RH_ENDORSEMENT,
    RH_NULL,
    RH_OWNER,
    RH_PLATFORM,
    SIGN,
    Attest,
    Public,
    PublicKey,
    malformed,
    parse_certification,
    parse_public,
    parse_quote,
    qualified_name,
    verify_signature,
)
from sealane.crypto.evidence.verifier import Introduced
from sealane.errors import VerificationError

TPM2: Final = "tpm2"
MEDIA_TYPE: Final = "application/vnd.sealane.tpm2-evidence"
# Required value of each flag unless the policy says otherwise by name. `clock_unsafe` has no safe
# value: after a power failure no clock is safe for an hour, and the comparison
# `HardwareClock.has_gone_back` is valid regardless.
SAFE_FLAGS: Final[Mapping[str, bool]] = {"ek_uncertified": False}
HARDWARE_SCHEME: Final = "ek-sha256"
SECRET_BYTES: Final = 32

_INTRODUCTION: Final = "sealane tpm2 introduction v1"
_EVIDENCE: Final = "sealane tpm2 evidence v1"
_PROOF: Final = "sealane tpm2 activation v1"
_PARTS: Final = 8
_EK_CERTIFICATE: Final = x509.ObjectIdentifier("2.23.133.8.1")  # tcg-kp-EKCertificate
_STORAGE_SYMMETRIC: Final = (ALG_AES, 128, ALG_CFB)
_OTHER_HIERARCHIES: Final = {RH_OWNER: "owner", RH_PLATFORM: "platform", RH_NULL: "null"}
# An EK without a certificate doesn't expire; it can only be removed from the allow-list.
_NO_END: Final = dt.datetime.max.replace(tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Identity of a TPM: TPMT_PUBLIC of EK and AK, and the EK's chain in DER, leaf first."""

    endorsement_key: bytes
    attestation_key: bytes
    certificates: Sequence[bytes] = ()

    def encode(self) -> bytes:
        """Return the bytes of GetChallenge's introduction."""
        return fields(_INTRODUCTION, self.endorsement_key, self.attestation_key, *self.certificates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The node's evidence; structures are as the TPM returned them.

    `proof` is `activation_proof` of the opened credential. `pcr_values` are the quoted digests, in
    the order of their indices. `event_log` may be empty; so may the last three, which are the KEM
    key's TPMT_PUBLIC, its certification by the AK, and the signature of that.
    """

    proof: bytes
    quote: bytes
    quote_signature: bytes
    pcr_values: bytes
    event_log: bytes = b""
    kem_public: bytes = b""
    certification: bytes = b""
    certification_signature: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes of the evidence item."""
        return fields(
            _EVIDENCE,
            self.proof,
            self.quote,
            self.quote_signature,
            self.pcr_values,
            self.event_log,
            self.kem_public,
            self.certification,
            self.certification_signature,
        )


def hardware_id(endorsement_key: bytes) -> str:
    """Return the name in a policy's allow-list of the TPM with this EK (TPMT_PUBLIC)."""
    return _hardware_id(_subject_public_key_info(parse_public(endorsement_key).key))


def _hardware_id(encoded_key: bytes) -> str:
    return f"{HARDWARE_SCHEME}:{hashlib.sha256(encoded_key).hexdigest()}"


def activation_proof(secret: bytes, qualifying_data: bytes) -> bytes:
    """Return a proof of knowing the credential's `secret`, for this runtime data only."""
    return hmac.digest(secret, fields(_PROOF, qualifying_data), "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """State of a challenge: the TPM that it was made for."""

    secret: bytes
    attestation_key: Public
    hardware_id: str
    is_certified: bool
    valid_until: dt.datetime


class Tpm2Verifier:
    """Verifier of TPM 2.0 evidence. `roots` are the CAs of TPM makers that the operator trusts."""

    evidence_type = TPM2
    media_type = MEDIA_TYPE
    endorsements_media_type = ""
    safe_flags = SAFE_FLAGS

    def __init__(self, roots: Sequence[x509.Certificate] = ()) -> None:
        self._roots = tuple(roots)

    def introduce(self, introduction: bytes, *, now: dt.datetime) -> Introduced:
        """Check the EK and its certificates, and make a credential for the AK.

        VerificationError `attestation.tpm2.` plus `malformed`, `endorsement_key` (not an EK, or not
        the certificate's key), `attestation_key` (a key that could sign other data or be outside
        this TPM), `chain`, `expired`.
        """
        parts = parse_fields(_INTRODUCTION, introduction, count_max=2 + CERTIFICATES_MAX)
        if parts is None or len(parts) < 2:
            raise malformed("not the introduction of a TPM")
        endorsement_key, attestation_key = parse_public(parts[0]), parse_public(parts[1])
        if (
            not endorsement_key.has(required=BORN_IN_TPM | RESTRICTED | DECRYPT, forbidden=SIGN)
            or endorsement_key.symmetric != _STORAGE_SYMMETRIC
        ):
            raise VerificationError(
                "attestation.tpm2.endorsement_key",
                "the key introduced as endorsement key (EK) has the wrong type or attributes",
            )
        if not attestation_key.has(
            required=BORN_IN_TPM | RESTRICTED | SIGN, forbidden=DECRYPT
        ) or attestation_key.scheme not in {(ALG_ECDSA, ALG_SHA256), (ALG_RSASSA, ALG_SHA256)}:
            raise VerificationError(
                "attestation.tpm2.attestation_key",
                "the attestation key is not a restricted signing key that the TPM created and "
                "keeps",
            )
        encoded_key = _subject_public_key_info(endorsement_key.key)
        valid_until = self._check_certificates(parts[2:], encoded_key, now)
        secret = secrets.token_bytes(SECRET_BYTES)
        return Introduced(
            activation=make_credential(
                secret, endorsement_key=endorsement_key.key, name=attestation_key.name
            ),
            context=_Expected(
                secret=secret,
                attestation_key=attestation_key,
                hardware_id=_hardware_id(encoded_key),
                is_certified=bool(parts[2:]),
                valid_until=valid_until,
            ),
        )

    def verify(
        self,
        evidence: bytes,
        *,
        binding: Binding,
        introduced: Introduced,
        endorsements: bytes,  # noqa: ARG002 - a TPM's come with its introduction
        now: dt.datetime,  # noqa: ARG002 - certificates were checked seconds ago
    ) -> Claims:
        """Return the TPM's claims.

        VerificationError `attestation.tpm2.` plus `malformed`, `not_activated` (the credential was
        not opened: AK and EK are not in one TPM), `signature`, `hierarchy` (the AK is not a primary
        key of the endorsement hierarchy), `binding` (it answers something else), `pcrs` (the values
        are not the quoted ones), `event_log`, `kem_key` (not created or not kept by this TPM, or
        not the runtime data's).
        """
        expected = introduced.context
        if not isinstance(expected, _Expected):
            raise VerificationError(
                "attestation.tpm2.not_activated", "the challenge was not for an introduced TPM"
            )
        parsed = _parse_evidence(evidence)
        proof = activation_proof(expected.secret, binding.qualifying_data)
        if not hmac.compare_digest(parsed.proof, proof):
            raise VerificationError(
                "attestation.tpm2.not_activated",
                "the TPM did not open the credential: the attestation key is not in that TPM",
            )
        signer = expected.attestation_key
        verify_signature(signer.key, parsed.quote_signature, parsed.quote)
        quote = parse_quote(parsed.quote)
        _check_attest(quote.attest, signer, binding)
        values = _pcr_values(parsed.pcr_values, quote.indices, quote.digest)
        explained = tpm2_event_log.explain(parsed.event_log, values) if parsed.event_log else {}
        is_kem_certified = bool(parsed.kem_public)
        if is_kem_certified:
            _check_kem_key(parsed, signer, binding)
        attest = quote.attest
        return Claims(
            evidence_type=TPM2,
            memory=Memory.ISOLATED,
            hardware_id=expected.hardware_id,
            product=TPM2,
            measurements={f"pcr{index}": value for index, value in values.items()},
            tcb={"firmware": attest.firmware_version},
            flags={"ek_uncertified": not expected.is_certified, "clock_unsafe": not attest.is_safe},
            valid_until=expected.valid_until,
            events={f"pcr{index}": digests for index, digests in explained.items()},
            certified_keys=frozenset({"kem"} if is_kem_certified else ()),
            clock=HardwareClock(
                reset_count=attest.reset_count,
                restart_count=attest.restart_count,
                millis=attest.clock,
            ),
        )

    def _check_certificates(
        self, encoded: Sequence[bytes], endorsement_key: bytes, now: dt.datetime
    ) -> dt.datetime:
        """Check the chain of the EK's certificate, if there is one; return when it expires."""
        if not encoded:
            return _NO_END
        certificates = [parse_certificate(part, kind=TPM2) for part in encoded]
        leaf = certificates[0]
        if _subject_public_key_info(leaf.public_key()) != endorsement_key:
            raise VerificationError(
                "attestation.tpm2.endorsement_key", "the EK's certificate is for another key"
            )
        try:
            usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except x509.ExtensionNotFound:
            usage = x509.ExtendedKeyUsage([])
        if _EK_CERTIFICATE not in usage:
            raise VerificationError(
                "attestation.tpm2.endorsement_key", "the certificate is not an EK certificate"
            )
        root = issuing_root(certificates[-1], self._roots, kind=TPM2)
        chain = verify_chain(certificates, root=root, revocation_lists={}, kind=TPM2, now=now)
        return chain.valid_until


def _parse_evidence(evidence: bytes) -> Evidence:
    parts = parse_fields(_EVIDENCE, evidence, count_max=_PARTS)
    if parts is None or len(parts) != _PARTS:
        raise malformed("not the evidence of a TPM")
    parsed = Evidence(
        proof=parts[0],
        quote=parts[1],
        quote_signature=parts[2],
        pcr_values=parts[3],
        event_log=parts[4],
        kem_public=parts[5],
        certification=parts[6],
        certification_signature=parts[7],
    )
    if not parsed.kem_public and (parsed.certification or parsed.certification_signature):
        raise malformed("a certification of the KEM key without the key's public area")
    return parsed


def _check_attest(attest: Attest, signer: Public, binding: Binding) -> None:
    """Check what both attestations have in common: the signing key, and the signed data."""
    _check_hierarchy(attest, signer)
    if not hmac.compare_digest(attest.extra_data, binding.qualifying_data):
        raise VerificationError(
            "attestation.tpm2.binding", "the TPM did not attest this runtime data"
        )


def _check_hierarchy(attest: Attest, signer: Public) -> None:
    """Refuse an AK of another hierarchy.

    For other hierarchies the TPM obfuscates reset count, restart count and firmware version by
    adding secret numbers that differ from key to key, so an attacker could choose the sums by
    trying keys.
    """
    if attest.signer == qualified_name(signer.name, hierarchy=RH_ENDORSEMENT):
        return
    for handle, hierarchy in _OTHER_HIERARCHIES.items():
        if attest.signer == qualified_name(signer.name, hierarchy=handle):
            raise VerificationError(
                "attestation.tpm2.hierarchy",
                f"the attestation key is in the {hierarchy} hierarchy, not in the endorsement "
                "hierarchy",
            )
    raise VerificationError(
        "attestation.tpm2.hierarchy",
        "the attestation key is not a primary key: its parent is unknown",
    )


def _pcr_values(encoded: bytes, indices: Sequence[int], digest: bytes) -> dict[int, bytes]:
    if len(encoded) != PCR_BYTES * len(indices) or hashlib.sha256(encoded).digest() != digest:
        raise VerificationError(
            "attestation.tpm2.pcrs", "the PCR values are not those that were quoted"
        )
    starts = range(0, len(encoded), PCR_BYTES)
    values = (encoded[start : start + PCR_BYTES] for start in starts)
    return dict(zip(indices, values, strict=True))


def _check_kem_key(evidence: Evidence, signer: Public, binding: Binding) -> None:
    """Check that the quoting TPM created the KEM key of the runtime data, and keeps it."""
    verify_signature(signer.key, evidence.certification_signature, evidence.certification)
    certification = parse_certification(evidence.certification)
    _check_attest(certification.attest, signer, binding)
    public = parse_public(evidence.kem_public)
    if not hmac.compare_digest(certification.name, public.name):
        raise VerificationError(
            "attestation.tpm2.kem_key", "the attestation key certified another key"
        )
    if (
        not public.has(required=BORN_IN_TPM | DECRYPT, forbidden=SIGN | RESTRICTED)
        or public.scheme != (ALG_NULL,)
        or _point(public.key) != binding.kem_public_key
    ):
        raise VerificationError(
            "attestation.tpm2.kem_key",
            "the KEM key in the runtime data is not one that the TPM created and keeps",
        )


def _point(key: PublicKey) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return b""
    return key.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )


def _subject_public_key_info(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
