"""Peers of a node, as broker, target and fabric name them to each other."""

import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIncarnation:
    """One start of a peer's process: SPIFFE id and incarnation of the leaf it showed.

    With a `volume_id`: its use of a volume of this target that is another tenant's.
    """

    spiffe_id: str
    incarnation: bytes
    volume_id: str = ""
    is_read_only: bool = False

    @property
    def name(self) -> str:
        """For people and metrics."""
        return f"{self.spiffe_id} at {self.volume_id}" if self.volume_id else self.spiffe_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDevice:
    """A device as one process of a target has it open."""

    device_id: uuid.UUID
    fencing_epoch: int
