"""Runtime data: the keys and the challenge that a node commits to, in canonical JSON."""

import base64
import binascii
from dataclasses import dataclass
from typing import Final

from sealane.crypto.encoding import canonical_json, parse_canonical_json
from sealane.crypto.evidence.claims import Binding
from sealane.errors import VerificationError

DOMAIN: Final = "sealane-attestation/2"
NONCE_BYTES: Final = 32
INCARNATION_BYTES: Final = 16
RUNTIME_DATA_BYTES_MAX: Final = 4096
SECONDARY_EVIDENCE_MAX: Final = 15

# Public keys: X25519 (RFC 7748), or an uncompressed point on P-256 (RFC 9180, section 7.1.1).
KEM_KEY_BYTES: Final = {"x25519": 32, "p256": 65}

_REASON: Final = "attestation.runtime_data.malformed"
_NAMES: Final = frozenset(
    {
        "audience",
        "domain",
        "evidence_type",
        "incarnation",
        "kem_algorithm",
        "kem_public_key",
        "node",
        "nonce",
        "role",
        "secondary_evidence_sha256",
        "tls_public_key",
        "verifier_key_sha256",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeData:
    """A node's commitment; the verifier checks every field.

    `tls_public_key` is a SubjectPublicKeyInfo in DER, P-256; `kem_public_key` has the length of
    `kem_algorithm` (`KEM_KEY_BYTES`); `secondary_evidence_sha256` are the digests of all items of
    the evidence except the primary one, in the order of their labels.
    """

    nonce: bytes
    audience: str
    node: str
    role: str
    incarnation: bytes
    tls_public_key: bytes
    kem_public_key: bytes
    verifier_key_sha256: bytes
    evidence_type: str
    kem_algorithm: str = "x25519"
    secondary_evidence_sha256: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Return the canonical JSON."""
        return canonical_json(
            {
                "audience": self.audience,
                "domain": DOMAIN,
                "evidence_type": self.evidence_type,
                "incarnation": self.incarnation.hex(),
                "kem_algorithm": self.kem_algorithm,
                "kem_public_key": base64.b64encode(self.kem_public_key).decode(),
                "node": self.node,
                "nonce": self.nonce.hex(),
                "role": self.role,
                "secondary_evidence_sha256": [d.hex() for d in self.secondary_evidence_sha256],
                "tls_public_key": base64.b64encode(self.tls_public_key).decode(),
                "verifier_key_sha256": self.verifier_key_sha256.hex(),
            }
        )

    def binding(self) -> Binding:
        """Return the data that evidence must commit to."""
        return Binding(
            runtime_data=self.encode(),
            nonce=self.nonce,
            tls_public_key=self.tls_public_key,
            kem_public_key=self.kem_public_key,
        )

    @classmethod
    def decode(cls, encoded: bytes) -> "RuntimeData":
        """Parse; VerificationError `attestation.runtime_data.malformed` for anything else."""
        values = parse_canonical_json(
            encoded, bytes_max=RUNTIME_DATA_BYTES_MAX, what="runtime data", reason=_REASON
        )
        malformed = VerificationError(_REASON, f"runtime data does not follow {DOMAIN}")
        digests = values.pop("secondary_evidence_sha256", None)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        if (
            {*texts, "secondary_evidence_sha256"} != _NAMES
            or not isinstance(digests, list)
            or len(digests) > SECONDARY_EVIDENCE_MAX
        ):
            raise malformed
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
                evidence_type=texts["evidence_type"],
                kem_algorithm=texts["kem_algorithm"],
                secondary_evidence_sha256=tuple(bytes.fromhex(str(d)) for d in digests),
            )
        except (ValueError, binascii.Error) as error:
            raise malformed from error
        # Hexadecimal and base64 have several spellings; only the canonical one is accepted.
        if data.encode() != encoded or not data._has_lengths():
            raise malformed
        return data

    def _has_lengths(self) -> bool:
        return (
            len(self.nonce) == NONCE_BYTES
            and len(self.incarnation) == INCARNATION_BYTES
            and len(self.verifier_key_sha256) == 32
            and len(self.kem_public_key) == KEM_KEY_BYTES.get(self.kem_algorithm)
            and all(len(d) == 32 for d in self.secondary_evidence_sha256)
        )
