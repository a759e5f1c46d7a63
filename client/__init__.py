"""What a training job imports: `async with sealane.client.connect() as client: …`."""

from sealane.client.connection import (
    Attachment,
    Client,
    NodeStatus,
    Volume,
    VolumeEvent,
    Volumes,
    VolumeShare,
    connect,
    translated,
)
from sealane.client.disk import Disk
from sealane.client.disk_queues import FrontEnd
from sealane.client.session import (
    ErasureCoded,
    ReceiveSession,
    SelectiveRepeat,
    SendSession,
    listen_session,
    open_session,
)

__all__ = [
    "Attachment",
    "Client",
    "Disk",
    "ErasureCoded",
    "FrontEnd",
    "NodeStatus",
    "ReceiveSession",
    "SelectiveRepeat",
    "SendSession",
    "Volume",
    "VolumeEvent",
    "VolumeShare",
    "Volumes",
    "connect",
    "listen_session",
    "open_session",
    "translated",
]
