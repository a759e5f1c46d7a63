"""What a training job imports: `async with sealane.client.connect() as client: …`."""

from sealane.client.connection import (
    Attachment,
    Client,
    NodeStatus,
    Volume,
    VolumeEvent,
    Volumes,
    connect,
    translated,
)
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
    "ErasureCoded",
    "NodeStatus",
    "ReceiveSession",
    "SelectiveRepeat",
    "SendSession",
    "Volume",
    "VolumeEvent",
    "Volumes",
    "connect",
    "listen_session",
    "open_session",
    "translated",
]
