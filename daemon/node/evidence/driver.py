"""What enrolment asks of the driver for one type of evidence."""

from typing import Protocol

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.kem import KemKey


class Driver(Protocol):
    """Collects one node's evidence; shared by the node's roles."""

    @property
    def evidence_type(self) -> str:
        """The name of the type: `software`, `tpm2`, `snp`, `tdx`."""

    @property
    def media_type(self) -> str:
        """The media type of the primary item of the collection."""

    @property
    def hardware_id(self) -> str:
        """What a policy's allow-list calls this machine; empty if only its evidence tells."""

    @property
    def is_development(self) -> bool:
        """Whether the evidence proves nothing about the machine."""

    async def create_kem_key(self) -> KemKey:
        """Make a KEM key for one role of this start, where the hardware can keep it."""

    async def introduction(self) -> bytes:
        """Return what `GetChallenge` says of the hardware; empty if the type has none."""

    async def endorsements(self) -> Item | None:
        """Return the item `collateral`: what the host gives to verify by; None if nothing.

        It is asked for before the runtime data, which name its digest.
        """

    async def collect(self, runtime_data: RuntimeData, *, activation: bytes) -> bytes:
        """Return the primary item over `runtime_data`; `activation` came with the challenge.

        Raises UsageError `evidence.key.foreign` if the hardware keeps KEM keys and the runtime data
        name one that isn't among them; UnavailableError if the hardware doesn't answer.
        """

    def close(self) -> None:
        """Let go of the hardware."""


class SecondarySource(Protocol):
    """Has one device beside the machine speak; shared by the node's roles."""

    @property
    def label(self) -> str:
        """The label of its item in the collection: `gpu0`."""

    @property
    def evidence_type(self) -> str:
        """The name of the type: `nvidia`."""

    async def collect(self, nonce: bytes) -> Item:
        """Return the item that answers `nonce` (`device_nonce`, 32 bytes).

        It is asked for before the runtime data, which name its digest. Raises UnavailableError
        `evidence.secondary.…` if the device can't be asked.
        """
