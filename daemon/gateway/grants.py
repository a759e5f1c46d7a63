"""Grants to a gateway for a volume: its keys and its queues; and the address of its export."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

VolumeFailure = Literal["gateway.barred", "volume.withdrawn"]
"""Reasons for which the control plane fails a volume: the gateway may no longer act, or no longer
use the volume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeKey:
    """Keys to seal and open a volume's sectors: one for each key epoch."""

    volume_id: uuid.UUID
    generation: int
    sector_count: int
    keys: Mapping[int, bytearray]
    fully_sealed: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGrant:
    """A secure back-end queue that the target admits once."""

    ticket: bytes
    secret: bytearray
    association_epoch: int
    target_incarnation: int
    traddr: str
    trsvcid: int
    subsystem_nqn: str
    host_nqn: str
    confirmed: bytes = b""
    """The milestone sent in the request, which the target's store contains."""
    milestone: bytes = b""
    """Current milestone of the target's store; empty: it keeps no freshness."""


class OpenQueue(Protocol):
    """Opens a queue. The first queue of an association epoch fences all older ones."""

    async def __call__(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Return the queue that the target grants.

        VerificationError `volume.rolled_back` if its store doesn't contain `milestone`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Address and NQN of an attached volume's plain namespace."""

    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int
