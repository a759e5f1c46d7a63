"""Attestation results (draft-ietf-rats-ear): a JWS by the verifier, for one certificate.

ES384 and one fixed header: any other header (algorithms, keys, key locations) is refused without
being interpreted. `cnf` names the certificate by its thumbprint (RFC 8705), so a result is
worthless with any other certificate. It expires when the certificate does.
"""

import base64
import binascii
import datetime as dt
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from sealane import __version__
from sealane.crypto.attestation.appraisal import Appraisal, ItemAppraisal
from sealane.crypto.attestation.ar4si import CLAIMS, Tier, worst
from sealane.crypto.certificates import SKEW, CertificateAuthority, spiffe_id
from sealane.errors import VerificationError

PROFILE: Final = "tag:github.com,2023:veraison/ear"
ALGORITHM: Final = "ES384"
TOKEN_CHARACTERS_MAX: Final = 6144  # with a certificate within gRPC's 8 KiB of metadata

_HEADER: Final = {"alg": ALGORITHM, "typ": "JWT"}
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submodule:
    """Result for one item of evidence."""

    status: Tier
    vector: Mapping[str, int]
    evidence_type: str
    reference: str
    hardware_id_sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationResult:
    """A verified result. `submodules` are by label; `certificate_sha256` names its certificate."""

    token_id: str
    subject: str
    issued_at: dt.datetime
    expires_at: dt.datetime
    nonce: bytes
    certificate_sha256: bytes
    policy_version: int
    policy_id: str
    submodules: Mapping[str, Submodule]

    @property
    def status(self) -> Tier:
        """Tier of the worst item."""
        return max(s.status for s in self.submodules.values())

    def check(self, *, leaf: x509.Certificate, subject: str, now: dt.datetime) -> None:
        """Raise VerificationError unless the result is for `leaf` of `subject`, and valid at `now`.

        `token.holder.mismatch`, `token.subject.mismatch`, `token.not_yet_valid`, `token.expired`.
        The verifier's clock may be up to 30 s ahead; that does not extend the validity.
        """
        if leaf.fingerprint(hashes.SHA256()) != self.certificate_sha256:
            raise VerificationError(
                "token.holder.mismatch", "the attestation result is for another certificate"
            )
        if subject != self.subject:
            raise VerificationError(
                "token.subject.mismatch",
                f"the attestation result is for {self.subject}, the certificate for {subject}",
            )
        if self.issued_at > now + SKEW:
            raise VerificationError(
                "token.not_yet_valid",
                f"the attestation result was issued at {self.issued_at:%H:%M:%S} UTC; it is now "
                f"{now:%H:%M:%S}",
            )
        if now >= self.expires_at:
            raise VerificationError(
                "token.expired",
                f"the attestation result expired at {self.expires_at:%H:%M:%S} UTC; it is now "
                f"{now:%H:%M:%S}",
            )


class ResultSigner:
    """Signs the results of one broker, with a key of its own that exists as long as the process."""

    def __init__(self, authority: CertificateAuthority, *, broker: str, now: dt.datetime) -> None:
        self._authority = authority
        self._broker = broker
        self._key = ec.generate_private_key(ec.SECP384R1())
        self._certificate = self._certify(now)

    def succeed(self, authority: CertificateAuthority, *, now: dt.datetime) -> None:
        """Have the key certified by another authority from now on."""
        self._authority = authority
        self._certificate = self._certify(now)

    def certificate(self, *, now: dt.datetime) -> x509.Certificate:
        """Return the key's certificate; it is replaced at half of its lifetime."""
        begin, end = self._certificate.not_valid_before_utc, self._certificate.not_valid_after_utc
        if now >= begin + (end - begin) / 2:
            self._certificate = self._certify(now)
        return self._certificate

    def sign(
        self,
        appraisal: Appraisal,
        *,
        leaf: x509.Certificate,
        subject: str,
        nonce: bytes,
        now: dt.datetime,
    ) -> str:
        """Return the result for `leaf`, which was just issued to `subject`."""
        policy = appraisal.policy
        claims = {
            "eat_profile": PROFILE,
            "iss": spiffe_id(self._broker, "verifier"),
            "sub": subject,
            "iat": int(now.timestamp()),
            "exp": int(leaf.not_valid_after_utc.timestamp()),
            "jti": str(uuid.uuid4()),
            "eat_nonce": _encode(nonce),
            "cnf": {"x5t#S256": _encode(leaf.fingerprint(hashes.SHA256()))},
            "ear.verifier-id": {"developer": "Sealane", "build": f"sealane {__version__}"},
            "sealane.policy-version": policy.version,
            "submods": {
                label: _submodule(item, policy.policy_id) for label, item in appraisal.items.items()
            },
        }
        return jwt.encode(claims, self._key, algorithm=ALGORITHM, headers={"typ": "JWT"})

    def _certify(self, now: dt.datetime) -> x509.Certificate:
        return self._authority.issue_verifier(self._key.public_key(), broker=self._broker, now=now)


def _submodule(item: ItemAppraisal, policy_id: str) -> dict[str, object]:
    return {
        "ear.status": item.status.label,
        "ear.trustworthiness-vector": dict(item.vector),
        "ear.appraisal-policy-id": policy_id,
        "sealane.evidence-type": item.claims.evidence_type,
        "sealane.reference": item.reference,
        "sealane.hardware-id-sha256": sha256(item.claims.hardware_id.encode()).hexdigest(),
    }


def verify_result(token: str, *, verifier_key: ec.EllipticCurvePublicKey) -> AttestationResult:
    """Verify form and signature; `verifier_key` is the result of `certificates.verify_verifier`.

    VerificationError `token.malformed` or `token.signature`. Holder and time are checked by
    `AttestationResult.check`, at every use.
    """
    _check_form(token)
    try:
        # `AttestationResult.check` checks the times, against its own argument.
        claims = jwt.decode(
            token,
            verifier_key,
            algorithms=[ALGORITHM],
            options={
                "verify_exp": False,
                "verify_iat": False,
                "verify_nbf": False,
                "verify_aud": False,
            },
        )
    except jwt.InvalidSignatureError as error:
        raise VerificationError(
            "token.signature", "the attestation result is not signed by this verifier"
        ) from error
    except jwt.PyJWTError as error:
        raise VerificationError(
            "token.malformed", "the attestation result is not a valid signed token"
        ) from error
    return _parsed(claims)


def read_unverified(token: str) -> AttestationResult:
    """Return the content of a result without verifying its signature: only for display.

    VerificationError `token.malformed`.
    """
    _check_form(token)
    return _parsed(_parse_object(_decode(token.split(".")[1])))


def _check_form(token: str) -> None:
    if len(token) > TOKEN_CHARACTERS_MAX:
        raise VerificationError(
            "token.malformed",
            f"an attestation result of {len(token)} characters; allowed: {TOKEN_CHARACTERS_MAX}",
        )
    parts = token.split(".")
    if len(parts) != 3 or not all(_is_canonical(part) for part in parts):
        raise VerificationError("token.malformed", "the attestation result is not a compact JWS")
    if _parse_object(_decode(parts[0])) != _HEADER:
        raise VerificationError(
            "token.malformed", f"the attestation result's header is not {json.dumps(_HEADER)}"
        )


def _parsed(claims: Any) -> AttestationResult:
    try:
        return _parse(claims)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise VerificationError(
            "token.malformed", "the attestation result does not follow its profile"
        ) from error


def _parse(claims: Mapping[str, Any]) -> AttestationResult:
    if claims["eat_profile"] != PROFILE:
        raise ValueError("the profile is another one")
    submodules = {str(label): _parse_submodule(s) for label, s in claims["submods"].items()}
    first = claims["submods"]["primary"]
    thumbprint = _decode(claims["cnf"]["x5t#S256"])
    if len(thumbprint) != 32:
        raise ValueError("a thumbprint has 32 bytes")
    return AttestationResult(
        token_id=str(claims["jti"]),
        subject=str(claims["sub"]),
        issued_at=dt.datetime.fromtimestamp(int(claims["iat"]), dt.UTC),
        expires_at=dt.datetime.fromtimestamp(int(claims["exp"]), dt.UTC),
        nonce=_decode(claims["eat_nonce"]),
        certificate_sha256=thumbprint,
        policy_version=int(claims["sealane.policy-version"]),
        policy_id=str(first["ear.appraisal-policy-id"]),
        submodules=submodules,
    )


def _parse_submodule(values: Mapping[str, Any]) -> Submodule:
    vector = {name: int(v) for name, v in values["ear.trustworthiness-vector"].items()}
    status = Tier[str(values["ear.status"]).upper()]
    if not vector.keys() <= set(CLAIMS) or status < worst(vector):
        raise ValueError("the status is better than its worst claim")
    return Submodule(
        status=status,
        vector=vector,
        evidence_type=str(values["sealane.evidence-type"]),
        reference=str(values["sealane.reference"]),
        hardware_id_sha256=bytes.fromhex(values["sealane.hardware-id-sha256"]),
    )


def _encode(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _is_canonical(text: str) -> bool:
    """Return whether `text` is canonical base64url: no padding, no stray bits."""
    try:
        return _BASE64URL.fullmatch(text) is not None and _encode(_decode(text)) == text
    except binascii.Error:
        return False


def _parse_object(encoded: bytes) -> object:
    try:
        return json.loads(encoded)
    except (ValueError, RecursionError):
        return None
