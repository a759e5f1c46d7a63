"""Record of an attached volume that the gateway's services share."""

import asyncio
from dataclasses import dataclass, field

from sealane.crypto.lease import LeaseHolder
from sealane.daemon.gateway.back_ends import VolumeBackEnd
from sealane.daemon.gateway.data_path import AttachedVolume
from sealane.daemon.gateway.grants import Export
from sealane.daemon.gateway.unflushed import Unflushed
from sealane.protocol.v1 import broker_pb2


@dataclass(slots=True, kw_only=True)
class Attached:
    """An attached volume; descriptor and leases are those of its newest key epoch."""

    descriptor: broker_pb2.VolumeDescriptor
    port: AttachedVolume
    leases: LeaseHolder
    host_nqn: str
    back_end: VolumeBackEnd
    unflushed: Unflushed
    is_read_only: bool = False
    is_withdrawn: bool = False
    following: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the newest descriptor is applied: each key epoch is entered once."""

    @property
    def export(self) -> Export:
        """Address and NQN that the host connects to."""
        return self.port.export
