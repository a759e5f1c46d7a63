"""NVMe/TCP connections of the control plane: the initiator, and the PDU stream of both sides."""

from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.connection_manager import ConnectionManager, PathEvent
from sealane.transport.nvme.discovery import DiscoveredPath, discover
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.handshake import Address, Digests
from sealane.transport.nvme.initiator import (
    ControllerEvent,
    EventKind,
    HostController,
)
from sealane.transport.nvme.paths import PathState, ReconnectPolicy
from sealane.transport.nvme.volume_queue import ConnectedQueue, VolumeQueue, bulk_queue

__all__ = [
    "Address",
    "ConnectedQueue",
    "ConnectionManager",
    "ControllerEvent",
    "Credentials",
    "Digests",
    "DiscoveredPath",
    "EventKind",
    "HostController",
    "NvmeStatusError",
    "PathEvent",
    "PathState",
    "ReconnectPolicy",
    "VolumeQueue",
    "bulk_queue",
    "discover",
]
