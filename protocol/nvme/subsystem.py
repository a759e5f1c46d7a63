"""A subsystem as one host sees it: identity, namespaces, supported commands, health.

Immutable values. A change is a new value: the admin queue compares it with the old one and derives
the events (`AdminController.update`).
"""

import uuid
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self

from sealane.protocol.nvme.constants import NAMESPACE_ID, AnaState, IoOpcode

BASIC_COMMANDS: Final = frozenset({IoOpcode.FLUSH, IoOpcode.WRITE, IoOpcode.READ})
RESERVATION_COMMANDS: Final = frozenset(
    {
        IoOpcode.RESERVATION_REGISTER,
        IoOpcode.RESERVATION_REPORT,
        IoOpcode.RESERVATION_ACQUIRE,
        IoOpcode.RESERVATION_RELEASE,
    }
)
ALL_COMMANDS: Final = frozenset(IoOpcode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One active namespace of 4096-byte blocks. `eui64` is empty or has 8 bytes."""

    nsid: int
    namespace_uuid: uuid.UUID
    block_count: int
    metadata_bytes: int = 0
    eui64: bytes = b""
    ana_state: AnaState = AnaState.OPTIMIZED
    is_write_protected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Subsystem:
    """Properties of a subsystem. Sizes in bytes; `namespaces` are in ascending order of nsid.

    `fused_blocks` is the largest fused compare-and-write in blocks, 0 for none; `is_multipath` says
    that hosts may have several controllers at once and asks them to use ANA.
    """

    nqn: str
    serial: str
    transfer_max: int
    namespaces: tuple[Namespace, ...] = ()
    commands: frozenset[IoOpcode] = BASIC_COMMANDS
    fused_blocks: int = 0
    nsid_max: int = NAMESPACE_ID
    is_multipath: bool = False
    is_discovery: bool = False
    model: str = "Sealane"
    firmware: str = "0.1"

    @property
    def has_reservations(self) -> bool:
        """Whether hosts can reserve namespaces."""
        return self.commands >= RESERVATION_COMMANDS

    def namespace(self, nsid: int) -> Namespace | None:
        """Return the active namespace with this id, or None."""
        return next((each for each in self.namespaces if each.nsid == nsid), None)

    def with_access(self, ana_state: AnaState) -> Self:
        """Return the subsystem with every namespace in this ANA state."""
        namespaces = tuple(replace(each, ana_state=ana_state) for each in self.namespaces)
        return replace(self, namespaces=namespaces)


def volume_subsystem(
    *,
    nqn: str,
    volume_id: uuid.UUID,
    serial: str,
    block_count: int,
    metadata_bytes: int,
    transfer_max: int,
    commands: frozenset[IoOpcode] = BASIC_COMMANDS,
    fused_blocks: int = 0,
    is_write_protected: bool = False,
    is_multipath: bool = False,
    ana_state: AnaState = AnaState.OPTIMIZED,
) -> Subsystem:
    """Return the subsystem of one volume: a single namespace whose UUID is the volume's."""
    namespace = Namespace(
        nsid=NAMESPACE_ID,
        namespace_uuid=volume_id,
        block_count=block_count,
        metadata_bytes=metadata_bytes,
        ana_state=ana_state,
        is_write_protected=is_write_protected,
    )
    return Subsystem(
        nqn=nqn,
        serial=serial,
        transfer_max=transfer_max,
        namespaces=(namespace,),
        commands=commands,
        fused_blocks=fused_blocks,
        is_multipath=is_multipath,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """SMART log values since the store was opened; sectors of 512 bytes."""

    sectors_read: int = 0
    sectors_written: int = 0
    host_reads: int = 0
    host_writes: int = 0
    busy_ms: int = 0
    power_on_ms: int = 0
    media_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailure:
    """A command that ended with an error. `status` is the status field without its phase bit."""

    queue_id: int
    command_id: int
    status: int
    lba: int = 0
    nsid: int = 0
    count: int = field(default=0)
    """Increasing number within its source; 0 if the source doesn't count."""


class ControllerResources(Protocol):
    """Requests of an admin queue to the data path. None of them waits."""

    def health(self, nsid: int | None) -> Health:
        """Return the values of one namespace, or of the whole subsystem as this host sees it."""

    def failures(self) -> list[CommandFailure]:
        """Return failed I/O commands of this controller, newest first."""

    def abort(self, *, queue_id: int, command_id: int) -> bool:
        """Abort a command if that is still possible; return whether it was."""


class NoResources:
    """A controller whose data path keeps no statistics."""

    def health(self, nsid: int | None) -> Health:  # noqa: ARG002 - the protocol's
        """Return zeros."""
        return Health()

    def failures(self) -> list[CommandFailure]:
        """Return nothing."""
        return []

    def abort(self, *, queue_id: int, command_id: int) -> bool:  # noqa: ARG002 - the protocol's
        """Abort nothing."""
        return False
