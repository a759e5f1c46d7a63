"""What a gateway is granted for a volume: its keys, its queues, and where it exports it."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

VolumeFailure = Literal["gateway.barred", "volume.withdrawn"]
"""Why the control plane ends a volume: it may not act, or may not use the volume any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeKey:
    """What a gateway needs to seal and open a volume's sectors: keys by key epoch, all of them."""

    volume_id: uuid.UUID
    generation: int
    sector_count: int
    keys: Mapping[int, bytearray]
    fully_sealed: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGrant:
    """A secure back-end queue the target admits once."""

    ticket: bytes
    secret: bytearray
    association_epoch: int
    target_incarnation: int
    traddr: str
    trsvcid: int
    subsystem_nqn: str
    host_nqn: str
    confirmed: bytes = b""
    """The milestone asked for: the target's store contains it."""
    milestone: bytes = b""
    """How far the target's store has come; empty: it keeps no freshness."""


class OpenQueue(Protocol):
    """Opens a queue. The first of an association epoch fences all older ones."""

    async def __call__(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Return what the target grants.

        VerificationError `volume.rolled_back` if its store doesn't contain `milestone`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Where the plain namespace of an attached volume is."""

    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int
