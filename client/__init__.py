"""The client of a training job: `async with sealane.client.connect() as client: …`."""

from sealane._native import ChunkBitmap
from sealane.client.calls import translated
from sealane.client.connection import Client, NodeStatus, SpaceStatus, TargetStatus, connect
from sealane.client.disk import Disk, DiskHandle
from sealane.client.disk_queues import FrontEnd
from sealane.client.fan_out import send_to_all
from sealane.client.grants import listen_session, listen_sessions, open_session
from sealane.client.listener import Listener
from sealane.client.messages import (
    Auto,
    ErasureCoded,
    Received,
    SelectiveRepeat,
    Sent,
    Unreliable,
)
from sealane.client.operation import Operation, wait_all
from sealane.client.operations import ReceiveOperation, SendOperation, StreamOperation
from sealane.client.session import Session
from sealane.client.volume import Attachment, Volume, VolumeEvent, VolumeShare
from sealane.client.volume_store import JobFinding, VolumeJob, VolumeStore
from sealane.client.volumes import Volumes

__all__ = [
    "Attachment",
    "Auto",
    "ChunkBitmap",
    "Client",
    "Disk",
    "DiskHandle",
    "ErasureCoded",
    "FrontEnd",
    "JobFinding",
    "Listener",
    "NodeStatus",
    "Operation",
    "ReceiveOperation",
    "Received",
    "SelectiveRepeat",
    "SendOperation",
    "Sent",
    "Session",
    "SpaceStatus",
    "StreamOperation",
    "TargetStatus",
    "Unreliable",
    "Volume",
    "VolumeEvent",
    "VolumeJob",
    "VolumeShare",
    "VolumeStore",
    "Volumes",
    "connect",
    "listen_session",
    "listen_sessions",
    "open_session",
    "send_to_all",
    "translated",
    "wait_all",
]
