"""What the listener serves: subsystems, their admission of queues, and hosts' associations."""

import asyncio
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, Self

from sealane.errors import ProtocolError, Reason
from sealane.protocol.nvme.admin import AdminController
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import Status
from sealane.protocol.nvme.subsystem import ControllerResources, NoResources, Subsystem


class ConnectRefusedError(ProtocolError):
    """A Connect command is answered with `status`; `result` names the field at fault."""

    def __init__(self, reason: Reason, message: str, *, status: Status, result: int = 0) -> None:
        super().__init__(reason, message)
        self.status = status
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class Portal:
    """Where a subsystem is reached."""

    traddr: str
    trsvcid: int

    @classmethod
    def of(cls, traddr: str, trsvcid: int) -> Self:
        """Make one of a listener's address."""
        return cls(traddr=traddr, trsvcid=trsvcid)


@dataclass(slots=True, kw_only=True, eq=False)
class Association:
    """A host and one controller: an admin queue and its I/O queues."""

    association_id: int
    controller_id: int
    host_nqn: str
    host_id: uuid.UUID
    exported: "Exported"
    admin: AdminController
    portal: Portal
    """Address at which the host reached this listener."""
    task: asyncio.Task[None] | None = None
    queues: dict[int, asyncio.Event] = field(default_factory=dict)
    """I/O queues that connect or run; the event is set when nothing of one can run any more."""
    is_closed: bool = False
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is closed and nothing of its queues can run any more."""
    resets: int = 0
    """Controller resets: a queue that was being connected across one must not start."""
    end_reason: Reason | None = None
    """Reason id, if this end has ended it."""


class Admission(Protocol):
    """An I/O queue that may start once its Connect is answered."""

    def start(self, descriptor: int) -> None:
        """Hand the connection to the engine, which duplicates the descriptor."""

    def close(self) -> None:
        """Give up what was prepared, if it wasn't started."""


class Exported(Protocol):
    """A subsystem that hosts can connect to. What has a body is a default to inherit."""

    @property
    def subsystem(self) -> Subsystem:
        """What it shows."""

    def allows(self, host_nqn: str) -> bool:
        """Whether this host may have a controller."""

    async def admit(self, association: Association, connect: Connect) -> Admission:
        """Prepare an I/O queue; ConnectRefusedError to refuse it."""

    async def association_closed(self, association_id: int) -> None:
        """Stop and drain the association's queues. Also after a reset, which it survives."""

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        """Let go of what belonged to one I/O queue, of which nothing runs any more."""

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Report a refused Connect."""

    def shown_to(self, host_nqn: str) -> Subsystem:  # noqa: ARG002 - the default masks nothing
        """Return what it shows this host."""
        return self.subsystem

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:  # noqa: ARG002
        """Return the host's and the controller's secret; None if there is no authentication."""
        return None

    def resources(self, association: Association) -> ControllerResources:  # noqa: ARG002
        """Return what the data path knows, for log pages and Abort."""
        return NoResources()

    def idle_ms(self, association_id: int) -> int | None:  # noqa: ARG002
        """Time since the last byte on any I/O queue; None if unknown or there is none."""
        return None


class Provider(Protocol):
    """Finds subsystems by name."""

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Find a subsystem; None if there is no such."""

    async def awaited(self, subsystem_nqn: str) -> Exported | None:  # noqa: ARG002 - none is, here
        """Wait for a subsystem that `find` doesn't know yet but that will be there again.

        None: it is not known here. ConnectRefusedError: the host should come again.
        """
        return None

    def exported(self) -> Iterable[Exported]:
        """Return every subsystem that discovery shows to hosts that may use it."""
        return ()
