"""Interface between enrolment and the driver for one type of evidence."""

from typing import Protocol

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.kem import KemKey


class Driver(Protocol):
    """Collects one node's evidence; shared by the node's roles."""

    @property
    def evidence_type(self) -> str:
        """Name of the type: `software`, `tpm2`, `snp`, `tdx`."""

    @property
    def media_type(self) -> str:
        """Media type of the primary item of the collection."""

    @property
    def hardware_id(self) -> str:
        """Name of this machine in a policy's allow-list; empty if only its evidence tells."""

    @property
    def is_development(self) -> bool:
        """Whether the evidence proves nothing about the machine."""

    async def create_kem_key(self) -> KemKey:
        """Create a KEM key for one role of this start, held by the hardware where it can."""

    async def introduction(self) -> bytes:
        """Return the hardware's introduction for `GetChallenge`; empty if the type has none."""

    async def endorsements(self) -> Item | None:
        """Return the item `collateral`: the host's data for verification; None if there is none.

        It is requested before the runtime data, which contain its digest.
        """

    async def collect(self, runtime_data: RuntimeData, *, activation: bytes) -> bytes:
        """Return the primary item over `runtime_data`; `activation` came with the challenge.

        Raises UsageError `evidence.key.foreign` if the hardware holds KEM keys and the runtime data
        name a different one; UnavailableError if the hardware doesn't answer.
        """

    def close(self) -> None:
        """Release the hardware."""


class SecondarySource(Protocol):
    """Source of evidence of one further device; shared by the node's roles."""

    @property
    def label(self) -> str:
        """Label of its item in the collection: `gpu0`."""

    @property
    def evidence_type(self) -> str:
        """Name of the type: `nvidia`."""

    async def collect(self, nonce: bytes) -> Item:
        """Return the item that answers `nonce` (`device_nonce`, 32 bytes).

        It is requested before the runtime data, which contain its digest. Raises UnavailableError
        `evidence.secondary.…` if the device can't be asked.
        """
