"""Subsystems that a listener exports, their admission of queues, and hosts' associations."""

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
    """Refuses a Connect command with `status`; `result` is the offset of the field at fault."""

    def __init__(self, reason: Reason, message: str, *, status: Status, result: int = 0) -> None:
        super().__init__(reason, message)
        self.status = status
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class Portal:
    """The address and port of a subsystem."""

    traddr: str
    trsvcid: int

    @classmethod
    def of(cls, traddr: str, trsvcid: int) -> Self:
        """Return the portal for a listener's address."""
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
    """Address of this listener to which the host connected."""
    source: str
    """Address that the host connected from."""
    is_counted: bool = True
    """Whether its admin connection counts towards the limits on connections."""
    task: asyncio.Task[None] | None = None
    queues: dict[int, asyncio.Event] = field(default_factory=dict)
    """I/O queues, connecting or running; the event is set once none of its commands can run."""
    is_closed: bool = False
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the association is closed and no command of its queues can still run."""
    resets: int = 0
    """Controller resets: a queue whose connecting spans one must not start."""
    end_reason: Reason | None = None
    """Reason id, if this side ended the association."""


class Admission(Protocol):
    """An admitted I/O queue, to be started once its Connect is answered."""

    def start(self, descriptor: int) -> None:
        """Pass the connection to the engine, which duplicates the descriptor."""

    def close(self) -> None:
        """Release what was prepared, unless the queue was started."""


class Exported(Protocol):
    """A subsystem that hosts can connect to. Methods with a body are defaults to inherit."""

    @property
    def subsystem(self) -> Subsystem:
        """The subsystem's properties and namespaces."""

    def allows(self, host_nqn: str) -> bool:
        """Return True if this host may have a controller."""

    async def admit(self, association: Association, connect: Connect) -> Admission:
        """Prepare an I/O queue; ConnectRefusedError to refuse it."""

    async def association_closed(self, association_id: int) -> None:
        """Stop and drain the association's queues, at its end or at a controller reset."""

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        """Release the resources of an I/O queue that has stopped completely."""

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Report a refused Connect."""

    def shown_to(self, host_nqn: str) -> Subsystem:  # noqa: ARG002 - the default masks nothing
        """Return the subsystem as this host may see it."""
        return self.subsystem

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:  # noqa: ARG002
        """Return the host's and the controller's secret; None if no authentication is needed."""
        return None

    def resources(self, association: Association) -> ControllerResources:  # noqa: ARG002
        """Return the data path's resources, for log pages and Abort."""
        return NoResources()

    def idle_ms(self, association_id: int) -> int | None:  # noqa: ARG002
        """Return the time since the last byte on any I/O queue; None if unknown or no queue."""
        return None


class Provider(Protocol):
    """Finds subsystems by name."""

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Return the subsystem, or None if there is none of that name."""

    async def awaited(self, subsystem_nqn: str) -> Exported | None:  # noqa: ARG002 - by default none
        """Wait for a subsystem that `find` doesn't return yet but that is about to come back.

        None if there is no such subsystem. ConnectRefusedError if the host should try again later.
        """
        return None

    def exported(self) -> Iterable[Exported]:
        """Return the subsystems that discovery lists for the hosts allowed to use them."""
        return ()
