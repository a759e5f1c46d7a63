"""The discovery subsystem of a listener: the subsystems and addresses open to each host."""

import ipaddress
from collections.abc import Callable, Iterable

from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Portal,
)
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import DISCOVERY_NQN, FRONT_TRANSFER_BYTES, Status
from sealane.protocol.nvme.discovery import DiscoveryRecord, encode_discovery_log
from sealane.protocol.nvme.subsystem import Subsystem


class DiscoverySubsystem(Exported):
    """Discovery controllers: an admin queue, the log, and events when it changes.

    `portals` are the addresses of the I/O listeners; a wildcard address is replaced by the one that
    the host connected to.
    """

    def __init__(
        self,
        exported: Callable[[], Iterable[Exported]],
        portals: Callable[[], Iterable[Portal]],
    ) -> None:
        self._exported = exported
        self._portals = portals
        self._generation = 1
        self._subsystem = Subsystem(
            nqn=DISCOVERY_NQN,
            serial="discovery",
            transfer_max=FRONT_TRANSFER_BYTES,
            is_discovery=True,
        )

    @property
    def subsystem(self) -> Subsystem:
        """The properties of discovery controllers."""
        return self._subsystem

    def allows(self, host_nqn: str) -> bool:  # noqa: ARG002 - each host gets its own log
        """Return True: any host may use discovery."""
        return True

    def changed(self) -> None:
        """Start a new generation of the log, since it changed for some host."""
        self._generation += 1

    def log_of(self, association: Association) -> bytes:
        """Return log page 70h for an association's host."""
        reached = association.portal
        records = [
            DiscoveryRecord(
                subsystem_nqn=DISCOVERY_NQN,
                traddr=reached.traddr,
                trsvcid=reached.trsvcid,
                is_discovery=True,
            )
        ]
        for number, portal in enumerate(self._portals(), start=1):
            wildcard = ipaddress.ip_address(portal.traddr).is_unspecified
            records += [
                DiscoveryRecord(
                    subsystem_nqn=exported.subsystem.nqn,
                    traddr=reached.traddr if wildcard else portal.traddr,
                    trsvcid=portal.trsvcid,
                    port_id=number,
                )
                for exported in self._exported()
                if exported.allows(association.host_nqn)
            ]
        return encode_discovery_log(records, generation=self._generation)

    async def admit(self, association: Association, connect: Connect) -> Admission:  # noqa: ARG002
        """Refuse: discovery controllers have no I/O queues."""
        raise ConnectRefusedError(
            "connect.parameter",
            f"queue {connect.queue_id} of a discovery controller",
            status=Status.CONNECT_PARAMETERS,
            result=42,
        )

    async def association_closed(self, association_id: int) -> None:
        """Do nothing: discovery associations have no I/O queues."""

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        """Do nothing: discovery associations have no I/O queues."""

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Do nothing: the listener logs it."""
