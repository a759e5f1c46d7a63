"""Controller properties: capabilities, configuration, status (NVMe Base 2.0 §3.1.3, §3.6)."""

from enum import IntEnum
from typing import Final

from sealane.protocol.nvme.constants import (
    QUEUE_DEPTH_MAX,
    VERSION_2_0,
    ControllerStatus,
    Property,
)

_READY_HALF_SECONDS = 20
_CAPABILITIES: Final = (
    (QUEUE_DEPTH_MAX - 1)
    | 1 << 16  # queues are contiguous
    | _READY_HALF_SECONDS << 24
    | 1 << 37  # the NVM command set
    | 1 << 43  # Identify supports command sets
)
_ENABLE = 0x0000_0001
_SHUTDOWN = 0x0000_C000
_ENTRY_SIZES = 0x0046_0000  # 2^6 bytes of a submission, 2^4 of a completion entry
_ENTRY_SIZES_MASK = 0x00FF_0000
_PAGE_AND_ARBITRATION = 0x0000_3F80  # must be zero: 4 KiB pages, round robin
_COMMAND_SET_MASK = 0x0000_0070
_COMMAND_SETS = frozenset({0x00, 0x60})  # the NVM command set, or all supported ones

# Sizes of properties according to their attribute bits.
_SIZES: Final = {
    Property.CAPABILITIES: 1,
    Property.VERSION: 0,
    Property.CONFIGURATION: 0,
    Property.STATUS: 0,
}


class Transition(IntEnum):
    """Effect of setting the configuration on the controller."""

    NONE = 0
    ENABLED = 1
    RESET = 2
    SHUT_DOWN = 3


class Properties:
    """The property registers of one controller."""

    def __init__(self, *, is_discovery: bool) -> None:
        self._is_discovery = is_discovery
        self._configuration = 0
        self._is_failed = False

    def configure(self, value: int) -> Transition:
        """Set the configuration. An unsupported value makes the controller fail."""
        before, self._configuration = self._configuration, value & 0xFFFF_FFFF
        if not self._configuration & _ENABLE:
            self._is_failed = False
            return Transition.RESET if before & _ENABLE else Transition.NONE
        if not before & _ENABLE:
            self._is_failed = not self._can_enable()
            return Transition.ENABLED
        if self._configuration & _SHUTDOWN and not before & _SHUTDOWN:
            return Transition.SHUT_DOWN
        return Transition.NONE

    def read(self, offset: int, size: int) -> int | None:
        """Return the value of a property; None if there is none at `offset` with that size."""
        values = {
            Property.CAPABILITIES: _CAPABILITIES,
            Property.VERSION: VERSION_2_0,
            Property.CONFIGURATION: self._configuration,
            Property.STATUS: int(self.status),
        }
        try:
            known = Property(offset)
        except ValueError:
            return None
        return values[known] if _SIZES[known] == size else None

    @property
    def status(self) -> ControllerStatus:
        """Return the status: ready, failed, shut down."""
        status = ControllerStatus(0)
        if self._is_failed:
            status |= ControllerStatus.FATAL
        elif self._configuration & _ENABLE:
            # A controller that was shut down stays ready, although it accepts no more commands.
            status |= ControllerStatus.READY
        if self._configuration & _SHUTDOWN:
            status |= ControllerStatus.SHUTDOWN_COMPLETE
        return status

    @property
    def is_ready(self) -> bool:
        """Whether the host has enabled the controller and not shut it down."""
        return self.status == ControllerStatus.READY

    def _can_enable(self) -> bool:
        is_sized = self._configuration & _ENTRY_SIZES_MASK == _ENTRY_SIZES
        return (
            (is_sized or self._is_discovery)  # a discovery controller has no I/O queues
            and not self._configuration & _PAGE_AND_ARBITRATION
            and self._configuration & _COMMAND_SET_MASK in _COMMAND_SETS
        )
