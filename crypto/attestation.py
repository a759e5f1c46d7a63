"""Attestation: runtime data, the `software` evidence driver, and the verifier.

A node says what it generated (TLS key, KEM key) and what it answers (nonce, audience, verifier
key) in canonical runtime data, and proves by evidence over SHA-512 of it that it may say so. The
`software` driver signs with a key on disk: it proves possession of that key and nothing about the
machine. Development only, refused unless the policy allows it. docs/attestation.md.
"""

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sealane.crypto.certificates import NAME_PATTERN, ROLES, Subject
from sealane.crypto.encoding import canonical_json, fields, parse_canonical_json
from sealane.errors import UnavailableError, UsageError, VerificationError

DOMAIN: Final = "sealane-attestation/1"
SOFTWARE: Final = "software"
NONCE_BYTES: Final = 32
SESSION_ID_BYTES: Final = 16
CHALLENGE_SECONDS: Final = 60
RUNTIME_DATA_BYTES_MAX: Final = 4096

# Bounds of the verifier's memory: enough for a cluster that starts at once, and one address can't
# fill it alone.
CHALLENGES_MAX: Final = 4096
CHALLENGES_PER_PEER_MAX: Final = 256

_EVIDENCE_DOMAIN: Final = "sealane software evidence v1"
_EVIDENCE_BYTES: Final = 32 + 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeData:
    """What a node commits to; every field is checked by the verifier."""

    nonce: bytes
    audience: str
    node: str
    role: str
    incarnation: bytes
    tls_public_key: bytes  # SubjectPublicKeyInfo, DER, P-256
    kem_public_key: bytes  # X25519, 32 bytes
    verifier_key_sha256: bytes

    def encode(self) -> bytes:
        """Return the canonical JSON."""
        return canonical_json(
            {
                "audience": self.audience,
                "domain": DOMAIN,
                "incarnation": self.incarnation.hex(),
                "kem_public_key": base64.b64encode(self.kem_public_key).decode(),
                "node": self.node,
                "nonce": self.nonce.hex(),
                "role": self.role,
                "tls_public_key": base64.b64encode(self.tls_public_key).decode(),
                "verifier_key_sha256": self.verifier_key_sha256.hex(),
            }
        )

    @classmethod
    def decode(cls, encoded: bytes) -> "RuntimeData":
        """Parse; VerificationError `attestation.runtime_data.malformed` at anything else."""
        values = parse_canonical_json(encoded, bytes_max=RUNTIME_DATA_BYTES_MAX)
        if values.keys() != _NAMES or values["domain"] != DOMAIN:
            raise VerificationError(
                "attestation.runtime_data.malformed", f"runtime data does not follow {DOMAIN}"
            )
        texts = {name: str(value) for name, value in values.items()}
        try:
            data = cls(
                nonce=bytes.fromhex(texts["nonce"]),
                audience=texts["audience"],
                node=texts["node"],
                role=texts["role"],
                incarnation=bytes.fromhex(texts["incarnation"]),
                tls_public_key=base64.b64decode(texts["tls_public_key"], validate=True),
                kem_public_key=base64.b64decode(texts["kem_public_key"], validate=True),
                verifier_key_sha256=bytes.fromhex(texts["verifier_key_sha256"]),
            )
        except (ValueError, binascii.Error) as error:
            raise VerificationError(
                "attestation.runtime_data.malformed",
                f"runtime data does not follow {DOMAIN}: {error}",
            ) from error
        if (
            data.encode() != encoded
            or len(data.incarnation) != 16
            or len(data.kem_public_key) != 32
        ):
            raise VerificationError(
                "attestation.runtime_data.malformed", f"runtime data does not follow {DOMAIN}"
            )
        return data


_NAMES: Final = {
    "audience",
    "domain",
    "incarnation",
    "kem_public_key",
    "node",
    "nonce",
    "role",
    "tls_public_key",
    "verifier_key_sha256",
}


class SoftwareKey:
    """The `software` driver: an Ed25519 key from a file."""

    __slots__ = ("_key",)

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls) -> "SoftwareKey":
        """Make a new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def parse(cls, pem: bytes, *, source: str) -> "SoftwareKey":
        """Read PKCS #8 PEM; UsageError names `source` if it holds no Ed25519 key."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise UsageError(
                "attestation.key.malformed",
                f"{source}: not a key; allowed is an Ed25519 key in PKCS #8 PEM "
                "(sealanectl key attestation makes one)",
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(
                "attestation.key.malformed",
                f"{source}: holds a {type(key).__name__}; allowed is an Ed25519 key",
            )
        return cls(key)

    def pem(self) -> bytes:
        """Return the private key as PKCS #8 PEM."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def fingerprint(self) -> str:
        """How a policy names the key: `sha256:` and the hash of the raw public key, in hex."""
        return _fingerprint(self._key.public_key().public_bytes_raw())

    def evidence(self, runtime_data: RuntimeData) -> bytes:
        """Return public key ‖ signature over SHA-512 of the runtime data."""
        return self._key.public_key().public_bytes_raw() + self._key.sign(
            _signed(runtime_data.encode())
        )


def _fingerprint(public_key: bytes) -> str:
    return f"sha256:{hashlib.sha256(public_key).hexdigest()}"


def _signed(runtime_data: bytes) -> bytes:
    return fields(_EVIDENCE_DOMAIN, hashlib.sha512(runtime_data).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedKey:
    """What a policy lets the holder of one software key be."""

    fingerprint: str
    nodes: Sequence[str]
    roles: Sequence[str]
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The verifier's policy; what it doesn't allow is refused."""

    software_allowed: bool = False
    keys: Sequence[AllowedKey] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """One open challenge; `expires_ns` is on the verifier's monotonic clock."""

    session_id: bytes
    nonce: bytes
    node: str
    role: str
    evidence_type: str
    peer: str
    expires_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraised:
    """A verifier's positive result: issue a certificate for exactly this key and subject."""

    subject: Subject
    tls_public_key: ec.EllipticCurvePublicKey
    evidence_type: str


class Verifier:
    """Challenges nodes and appraises their evidence. Pure: time comes in with every call."""

    def __init__(self, *, policy: Policy, audience: str, verifier_key_sha256: bytes) -> None:
        self._policy = policy
        self._keys = {k.fingerprint: k for k in policy.keys}
        self._open: dict[bytes, Challenge] = {}
        self.audience = audience
        self._verifier_key_sha256 = verifier_key_sha256

    def challenge(
        self, *, node: str, role: str, evidence_type: str, peer: str, now_ns: int
    ) -> Challenge:
        """Open a challenge for `node` in `role`; `peer` is the address that asks.

        Raises VerificationError `attestation.policy.driver_refused`, UsageError
        `attestation.role.unknown` or `attestation.node.malformed`, UnavailableError
        `attestation.challenge.limit`.
        """
        self._allow_driver(evidence_type)
        # Anyone can ask: what is kept until the challenge expires must be small.
        if NAME_PATTERN.fullmatch(node) is None:
            raise UsageError("attestation.node.malformed", f"node {node[:80]!r} can't be named")
        if role not in ROLES[1:]:
            raise UsageError(
                "attestation.role.unknown", f"role {role[:80]!r} can't enrol; allowed: {ROLES[1:]}"
            )
        self._open = {k: c for k, c in self._open.items() if c.expires_ns > now_ns}
        from_peer = sum(1 for c in self._open.values() if c.peer == peer)
        if len(self._open) >= CHALLENGES_MAX or from_peer >= CHALLENGES_PER_PEER_MAX:
            raise UnavailableError(
                "attestation.challenge.limit",
                f"{len(self._open)} challenges are open, {from_peer} from {peer}: try again later",
            )
        challenge = Challenge(
            session_id=secrets.token_bytes(SESSION_ID_BYTES),
            nonce=secrets.token_bytes(NONCE_BYTES),
            node=node,
            role=role,
            evidence_type=evidence_type,
            peer=peer,
            expires_ns=now_ns + CHALLENGE_SECONDS * 10**9,
        )
        self._open[challenge.session_id] = challenge
        return challenge

    def attest(
        self, *, session_id: bytes, runtime_data: bytes, evidence: bytes, now_ns: int
    ) -> Appraised:
        """Appraise; raises VerificationError with the reason of the first check that fails."""
        # Taken out whatever follows: a nonce is for one attempt.
        challenge = self._open.pop(session_id, None)
        if challenge is None or challenge.expires_ns <= now_ns:
            raise VerificationError(
                "attestation.nonce.stale",
                "the challenge is unknown, used or expired: ask for a new one",
            )
        data = RuntimeData.decode(runtime_data)
        self._check_binding(data, challenge)
        self._allow_driver(challenge.evidence_type)
        allowed = self._check_software(runtime_data, evidence)
        if data.node not in allowed.nodes:
            raise VerificationError(
                "attestation.policy.node_refused",
                f"this key may not be node {data.node!r}; the policy allows {list(allowed.nodes)}",
            )
        if data.role not in allowed.roles:
            raise VerificationError(
                "attestation.policy.role_refused",
                f"this key may not be a {data.role}; the policy allows {list(allowed.roles)}",
            )
        return Appraised(
            subject=Subject(
                node=data.node,
                role=data.role,
                tenant=allowed.tenant,
                incarnation=data.incarnation,
                kem_public_key=data.kem_public_key,
            ),
            tls_public_key=_parse_tls_key(data.tls_public_key),
            evidence_type=challenge.evidence_type,
        )

    def _allow_driver(self, evidence_type: str) -> None:
        if evidence_type != SOFTWARE or not self._policy.software_allowed:
            raise VerificationError(
                "attestation.policy.driver_refused",
                f"the policy does not allow evidence of type {evidence_type[:80]!r}",
            )

    def _check_binding(self, data: RuntimeData, challenge: Challenge) -> None:
        if not secrets.compare_digest(data.nonce, challenge.nonce):
            raise VerificationError(
                "attestation.nonce.mismatch", "the runtime data answers another challenge"
            )
        if (data.node, data.role) != (challenge.node, challenge.role):
            raise VerificationError(
                "attestation.subject.mismatch",
                f"the challenge was for {challenge.role} {challenge.node}, the runtime data says "
                f"{data.role} {data.node}",
            )
        if data.audience != self.audience:
            raise VerificationError(
                "attestation.audience.mismatch",
                f"the runtime data is for {data.audience!r}, this is {self.audience!r}",
            )
        if data.verifier_key_sha256 != self._verifier_key_sha256:
            raise VerificationError(
                "attestation.verifier.mismatch", "the node trusts another verifier's key"
            )

    def _check_software(self, runtime_data: bytes, evidence: bytes) -> AllowedKey:
        if len(evidence) != _EVIDENCE_BYTES:
            raise VerificationError(
                "attestation.evidence.malformed",
                f"software evidence has {_EVIDENCE_BYTES} bytes, not {len(evidence)}",
            )
        public_key, signature = evidence[:32], evidence[32:]
        allowed = self._keys.get(_fingerprint(public_key))
        if allowed is None:
            raise VerificationError(
                "attestation.key.unknown", f"the policy does not list {_fingerprint(public_key)}"
            )
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed(runtime_data))
        except (InvalidSignature, ValueError) as error:
            raise VerificationError(
                "attestation.evidence.signature", "the evidence does not sign this runtime data"
            ) from error
        return allowed


def _parse_tls_key(encoded: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(encoded)
    except (ValueError, TypeError) as error:
        raise VerificationError(
            "attestation.tls_key.malformed", "the TLS key is not a SubjectPublicKeyInfo"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise VerificationError("attestation.tls_key.malformed", "the TLS key is not on P-256")
    return key
