"""`software` evidence: a signature with a key on disk.

It proves possession of that key and nothing about the machine. For development only: it is refused
unless the policy allows it, and both ends log a warning at every start.
"""

import datetime as dt
import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sealane.crypto.encoding import fields
from sealane.crypto.evidence.claims import Binding, Claims, Memory
from sealane.crypto.evidence.verifier import Introduced, refuse_introduction
from sealane.crypto.private_keys import parse_private_key, private_key_pem
from sealane.errors import UsageError, VerificationError

SOFTWARE: Final = "software"
MEDIA_TYPE: Final = "application/vnd.sealane.software-evidence"
HARDWARE_SCHEME: Final = "key-sha256"

_DOMAIN: Final = "sealane software evidence v1"
_KEY_BYTES: Final = 32
_EVIDENCE_BYTES: Final = _KEY_BYTES + 64
# This evidence doesn't expire; certificates based on it do.
_VALIDITY: Final = dt.timedelta(days=1)


class SoftwareKey:
    """An Ed25519 key from a file, which signs evidence."""

    __slots__ = ("_key",)

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls) -> "SoftwareKey":
        """Create a new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def parse(cls, pem: bytes, *, source: str) -> "SoftwareKey":
        """Parse PKCS #8 PEM; UsageError `attestation.key.malformed` names `source`."""
        key = parse_private_key(pem)
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(
                "attestation.key.malformed",
                f"{source}: allowed: an Ed25519 key in PKCS #8 PEM (sealanectl key attestation "
                "makes one)",
            )
        return cls(key)

    def pem(self) -> bytes:
        """Return the private key as PKCS #8 PEM."""
        return private_key_pem(self._key)

    @property
    def fingerprint(self) -> str:
        """Return its name in a policy: `sha256:` and the hash of the raw public key, in hex."""
        return f"sha256:{hashlib.sha256(self._key.public_key().public_bytes_raw()).hexdigest()}"

    def evidence(self, binding: Binding) -> bytes:
        """Return public key ‖ signature over the report data."""
        return self._key.public_key().public_bytes_raw() + self._key.sign(_signed(binding))


class SoftwareVerifier:
    """Verifier of `software` evidence."""

    evidence_type = SOFTWARE
    media_type = MEDIA_TYPE
    endorsements_media_type = ""
    safe_flags: Mapping[str, bool] = MappingProxyType({})

    def introduce(self, introduction: bytes, *, now: dt.datetime) -> Introduced:  # noqa: ARG002
        """Refuse an introduction: this type has none."""
        return refuse_introduction(introduction, evidence_type=SOFTWARE)

    def verify(
        self,
        evidence: bytes,
        *,
        binding: Binding,
        introduced: Introduced,  # noqa: ARG002
        endorsements: bytes,  # noqa: ARG002
        now: dt.datetime,
    ) -> Claims:
        """Check the signature; VerificationError `attestation.software.…`."""
        if len(evidence) != _EVIDENCE_BYTES:
            raise VerificationError(
                "attestation.software.malformed",
                f"software evidence of {len(evidence)} bytes; allowed: {_EVIDENCE_BYTES}",
            )
        public_key, signature = evidence[:_KEY_BYTES], evidence[_KEY_BYTES:]
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed(binding))
        except (InvalidSignature, ValueError) as error:
            raise VerificationError(
                "attestation.software.signature", "the evidence does not sign this runtime data"
            ) from error
        return Claims(
            evidence_type=SOFTWARE,
            memory=Memory.ISOLATED,
            hardware_id=f"{HARDWARE_SCHEME}:{hashlib.sha256(public_key).hexdigest()}",
            product=SOFTWARE,
            measurements={},
            tcb={},
            flags={},
            valid_until=now + _VALIDITY,
        )


def _signed(binding: Binding) -> bytes:
    return fields(_DOMAIN, binding.report_data)
