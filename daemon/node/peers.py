"""Identifiers of a node's peers, shared by broker, target and fabric."""

import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIncarnation:
    """One start of a peer's process: SPIFFE id and incarnation of the leaf it showed.

    With a `volume_id`: its use of another tenant's volume on this target.
    """

    spiffe_id: str
    incarnation: bytes
    volume_id: str = ""
    is_read_only: bool = False

    @property
    def name(self) -> str:
        """Name for people and metrics."""
        return f"{self.spiffe_id} at {self.volume_id}" if self.volume_id else self.spiffe_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDevice:
    """A device, as opened by one process of a target."""

    device_id: uuid.UUID
    fencing_epoch: int
