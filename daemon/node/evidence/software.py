"""The `software` driver: an Ed25519 key from a file. Development only."""

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.evidence.software import (
    HARDWARE_SCHEME,
    MEDIA_TYPE,
    SOFTWARE,
    SoftwareKey,
)
from sealane.crypto.kem import KemKey, X25519KemKey
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.runtime.files import read_secret


def check(config: EnrolmentConfig) -> None:
    """Read the attestation key; UsageError if its file holds none, or is open to others."""
    open_driver(config, tcti="")


def open_driver(config: EnrolmentConfig, *, tcti: str) -> "SoftwareDriver":  # noqa: ARG001
    """Read the attestation key; UsageError if its file holds none, or is open to others."""
    path = str(config.key_file)
    key = read_secret(path, key="enrolment.key_file")
    return SoftwareDriver(SoftwareKey.parse(key, source=f"enrolment.key_file {path}"))


class SoftwareDriver:
    """Signs the runtime data; proves possession of the key, and nothing about the machine."""

    evidence_type = SOFTWARE
    media_type = MEDIA_TYPE
    is_development = True

    def __init__(self, key: SoftwareKey) -> None:
        self._key = key
        self.hardware_id = f"{HARDWARE_SCHEME}:{key.fingerprint.removeprefix('sha256:')}"

    async def create_kem_key(self) -> KemKey:
        """Create a key in memory."""
        return X25519KemKey.create()

    async def introduction(self) -> bytes:
        """Return nothing."""
        return b""

    async def endorsements(self) -> Item | None:
        """Return nothing."""
        return None

    async def collect(
        self,
        runtime_data: RuntimeData,
        *,
        activation: bytes,  # noqa: ARG002 - for types with an introduction
    ) -> bytes:
        """Return the public key and the signature."""
        return self._key.evidence(runtime_data.binding())

    def close(self) -> None:
        """Do nothing: the key belongs to the process."""
