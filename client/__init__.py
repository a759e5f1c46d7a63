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

__all__ = [
    "Attachment",
    "Client",
    "NodeStatus",
    "Volume",
    "VolumeEvent",
    "Volumes",
    "connect",
    "translated",
]
