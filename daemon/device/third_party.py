"""A volume on a third party as a device: its anchor at the brokers, for one opening of it.

The anchor belongs to the volume, not to the gateway: a volume that moves keeps it (devices.md).
"""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from sealane.daemon.device.anchors.anchor import Anchor
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error

Tell: TypeAlias = Callable[[], Awaitable[None]]
"""Reports something about this opening to the brokers."""


class VolumeDevice:
    """Open for this process until it is closed, or another opening takes over."""

    def __init__(
        self, anchor: Anchor, *, is_believed: bool, tell_anchored: Tell, tell_closed: Tell
    ) -> None:
        """`is_believed`: nothing of it is anchored, or the operator accepts the state as found."""
        self.anchors = DeviceAnchors(anchor, lost=self._lose)
        self.is_believed = is_believed
        self.loss: Error | None = None
        """Reason why it no longer belongs to this process."""
        self.on_loss: Callable[[], None] | None = None
        self._tell_anchored = tell_anchored
        self._tell_closed = tell_closed

    async def confirm(self) -> None:
        """Accept only anchored state from now on; raises the errors of the call."""
        if self.is_believed:
            await self._tell_anchored()
            self.is_believed = False

    async def close(self) -> None:
        """Anchor requested states if possible, and let the next opening have it at once."""
        await self.anchors.close()
        try:
            await self._tell_closed()
        except Error as error:
            get_logger().warning(
                "device_close_untold", reason=error.reason, message=str(error.args[0])
            )

    def _lose(self, error: Error) -> None:
        self.loss = error
        get_logger().error("volume_device_lost", reason=error.reason, message=str(error.args[0]))
        if self.on_loss is not None:
            self.on_loss()


OpenDevice: TypeAlias = Callable[[], Awaitable[VolumeDevice]]
"""Opens a volume as a device. VerificationError `device.…`; UnavailableError: try again."""
