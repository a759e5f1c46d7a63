"""NVMe/TCP connections of the control side: the initiator, and the PDU stream of both sides."""

from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.discovery import DiscoveredPath, discover
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.handshake import Address, Digests
from sealane.transport.nvme.initiator import (
    ConnectedQueue,
    ControllerEvent,
    EventKind,
    HostController,
)
from sealane.transport.nvme.volume_queue import VolumeQueue

__all__ = [
    "Address",
    "ConnectedQueue",
    "ControllerEvent",
    "Credentials",
    "Digests",
    "DiscoveredPath",
    "EventKind",
    "HostController",
    "NvmeStatusError",
    "VolumeQueue",
    "discover",
]
