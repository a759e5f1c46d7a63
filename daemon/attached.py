"""An attached volume, as the gateway's services share it."""

from dataclasses import dataclass

from sealane.crypto.lease import LeaseHolder
from sealane.daemon.ports import AttachedPort, Export, ThirdPartyVolumePort
from sealane.protocol.v1 import broker_pb2


@dataclass(slots=True, kw_only=True)
class Attached:
    """One attached volume; descriptor and leases are those of its newest key epoch."""

    descriptor: broker_pb2.VolumeDescriptor
    port: AttachedPort
    leases: LeaseHolder
    host_nqn: str
    third_party: ThirdPartyVolumePort | None = None

    @property
    def export(self) -> Export:
        """Where its host connects."""
        return self.port.export
