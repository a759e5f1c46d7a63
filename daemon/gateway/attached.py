"""Record of an attached volume that the gateway's services share."""

import asyncio
from dataclasses import dataclass, field

from sealane.crypto.lease import LeaseHolder
from sealane.daemon.gateway.back_ends import VolumeBackEnd
from sealane.daemon.gateway.data_path import AttachedVolume
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.grants import Export
from sealane.daemon.gateway.unflushed import Unflushed
from sealane.daemon.runtime.statistics import GatewayVolumeState, only_in
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import broker_pb2


@dataclass(slots=True, kw_only=True)
class Attached:
    """An attached volume; descriptor and leases are those of its newest key epoch.

    The descriptor names the target that queues are opened at.
    """

    descriptor: broker_pb2.VolumeDescriptor
    port: AttachedVolume
    leases: LeaseHolder
    host_nqn: str
    back_end: VolumeBackEnd
    unflushed: Unflushed
    member: GroupMember | None = None
    """Its place in a fail-over group, if it was attached with fail-over."""
    is_read_only: bool = False
    is_withdrawn: bool = False
    unlisted_target: str = ""
    """The target outside the configuration that its device has moved to, once reported."""
    followed: broker_pb2.VolumeDescriptor | None = None
    """The broker's newest descriptor that was applied."""
    following: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the newest descriptor is applied: each key epoch is entered once."""

    @property
    def is_fenced(self) -> bool:
        """Whether another gateway took over from this one; see `BackEnd.is_fenced`."""
        return self.member is not None and self.port.back_end.is_fenced

    def statistics(self) -> dict[str, int]:
        """Return the engine's statistics, and the volume's state and size; on any thread."""
        state = GatewayVolumeState.ATTACHED
        standby: dict[str, int] = {}
        if self.member is not None:
            standby["is_standby"] = int(not self.member.is_serving)
            if standby["is_standby"]:
                state = GatewayVolumeState.STANDBY
        return {
            **self.port.statistics(),
            **standby,
            **only_in(state),
            "size_bytes": self.descriptor.sector_count * SECTOR_BYTES,
        }

    @property
    def target(self) -> str:
        """The node on which it is stored; this gateway's own if it is on a third party."""
        return self.descriptor.target_node

    @property
    def export(self) -> Export:
        """Address and NQN that the host connects to."""
        return self.port.export
