"""A plain subsystem of a target: namespaces of the engine, visible to the hosts allowed."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sealane import _native
from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
)
from sealane.daemon.nvme.subsystem_config import (
    AnaStateName,
    NamespaceConfig,
    SubsystemConfig,
)
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.engine_events import EventFeed, StorageEvent
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import (
    FRONT_TRANSFER_BYTES,
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    NAMESPACES_MAX,
    AnaState,
)
from sealane.protocol.nvme.logs import Notification
from sealane.protocol.nvme.subsystem import (
    ALL_COMMANDS,
    CommandFailure,
    Health,
    Namespace,
    Subsystem,
)

_FUSED_BLOCKS = 1
_SECTORS_OF_A_BLOCK = 8
_NOTIFICATIONS = {
    "reservation.registration_preempted": Notification.REGISTRATION_PREEMPTED,
    "reservation.released": Notification.RESERVATION_RELEASED,
    "reservation.preempted": Notification.RESERVATION_PREEMPTED,
}
_ANA_STATES = {
    "optimized": AnaState.OPTIMIZED,
    "non-optimized": AnaState.NON_OPTIMIZED,
    "inaccessible": AnaState.INACCESSIBLE,
    "persistent-loss": AnaState.PERSISTENT_LOSS,
    "change": AnaState.CHANGE,
}

Secrets = Mapping[str, tuple[HostSecret, HostSecret | None]]


@dataclass(slots=True, kw_only=True, eq=False)
class OpenNamespace:
    """A namespace opened in the engine."""

    config: NamespaceConfig
    native: _native.Namespace
    opened: float

    @classmethod
    def open(cls, config: NamespaceConfig) -> "OpenNamespace":
        """Open the store, or create it if it doesn't exist. Blocks. OSError or ValueError.

        Never overwrites an existing store: the path may name a device with data.
        """
        is_there = config.path is not None and Path(config.path).exists()
        native = _native.Namespace(
            store=config.store,
            block_count=config.block_count,
            sealed=False,
            path=config.path,
            exist="open" if is_there else "create",
            drive=config.drive,
            in_place=config.in_place,
            metadata=config.metadata_bytes > 0,
        )
        opened = cls(config=config, native=native, opened=time.monotonic())
        opened.configure(config)
        return opened

    def configure(self, config: NamespaceConfig) -> None:
        """Apply the settings that can change while it is open."""
        self.config = config
        self.native.set_limits(**config.limits.model_dump())

    def health(self) -> Health:
        """Return its figures since it was opened."""
        figures = self.native.statistics()
        return Health(
            sectors_read=figures["sectors_read"] * _SECTORS_OF_A_BLOCK,
            sectors_written=figures["sectors_stored"] * _SECTORS_OF_A_BLOCK,
            host_reads=figures["host_reads"],
            host_writes=figures["host_writes"],
            busy_ms=figures["busy_ms"],
            power_on_ms=int((time.monotonic() - self.opened) * 1000),
            media_errors=figures["media_errors"],
        )


@dataclass(slots=True, kw_only=True)
class _Admitted:
    """An admitted I/O queue."""

    controller: _native.Controller
    connect: Connect

    def start(self, descriptor: int) -> None:
        self.controller.start_queue(
            descriptor,
            queue_id=self.connect.queue_id,
            queue_depth=self.connect.queue_size,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            transfer_max=FRONT_TRANSFER_BYTES,
            header_digest=self.connect.header_digest,
            data_digest=self.connect.data_digest,
            success_flag=self.connect.disable_flow_control,
        )

    def close(self) -> None:
        """Do nothing: only the controller was prepared, which its association closes."""


class PlainSubsystem(Exported):
    """One plain subsystem. Calls `wake` for associations that have events to send."""

    def __init__(
        self,
        config: SubsystemConfig,
        *,
        secrets: Secrets,
        namespaces: list[OpenNamespace],
        on_closed: Callable[[StorageEvent], None],
        wake: Callable[[Association], None],
    ) -> None:
        self._config = config
        self._secrets = secrets
        self._namespaces = {each.config.nsid: each for each in namespaces}
        self._on_closed = on_closed
        self._wake = wake
        self._controllers: dict[int, tuple[_native.Controller, EventFeed]] = {}
        self._associations: dict[int, Association] = {}
        self._is_draining = False
        self._loop = asyncio.get_running_loop()
        for each in namespaces:
            self._listen(each)

    # Configuration

    @property
    def config(self) -> SubsystemConfig:
        """Its current configuration."""
        return self._config

    @property
    def namespaces(self) -> Mapping[int, OpenNamespace]:
        """Open namespaces by id."""
        return self._namespaces

    async def reconfigure(
        self, config: SubsystemConfig, *, secrets: Secrets, opened: list[OpenNamespace]
    ) -> None:
        """Apply a new configuration; `opened` are the namespaces that it adds.

        A namespace whose store changed is one removed and one added. The caller notifies the
        listener afterwards.
        """
        wanted = {each.nsid: each for each in config.namespaces}
        added = {each.config.nsid: each for each in opened}
        gone = [
            each for nsid, each in self._namespaces.items() if nsid not in wanted or nsid in added
        ]
        self._config, self._secrets = config, secrets
        self._namespaces = {
            nsid: added.get(nsid) or self._namespaces[nsid] for nsid in sorted(wanted)
        }
        for nsid, each in self._namespaces.items():
            each.configure(wanted[nsid])
        for each in opened:
            self._listen(each)
        self._assign_all()
        for each in gone:
            await self._close(each)

    def set_draining(self, *, is_draining: bool) -> None:
        """Refuse I/O by the ANA state "inaccessible", or not any longer.

        The caller notifies the listener afterwards.
        """
        self._is_draining = is_draining
        self._assign_all()

    def busy(self, settle_seconds: float) -> list[str]:
        """Return the host NQNs of associations that were heard on I/O queues within this time."""
        return [
            association.host_nqn
            for association_id, association in self._associations.items()
            if (idle := self.idle_ms(association_id)) is not None and idle < settle_seconds * 1000
        ]

    async def close(self) -> None:
        """Close the stores; all associations must be closed."""
        for each in self._namespaces.values():
            await self._close(each)
        self._namespaces = {}

    # Interface for the listener

    @property
    def subsystem(self) -> Subsystem:
        """The subsystem with all namespaces."""
        return self._show(lambda _: True)

    def shown_to(self, host_nqn: str) -> Subsystem:
        """Return the subsystem with the namespaces that this host may see."""
        return self._show(lambda config: config.shows_to(host_nqn))

    def allows(self, host_nqn: str) -> bool:
        """Return True if the host is listed, or any host is allowed."""
        return self._config.allow_any_host or any(
            host.nqn == host_nqn for host in self._config.hosts
        )

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:
        """Return the secrets from the host's key files; None if it has none."""
        return self._secrets.get(host_nqn)

    def resources(self, association: Association) -> "PlainResources":
        """Return the figures and aborts of one association."""
        return PlainResources(self, association)

    def idle_ms(self, association_id: int) -> int | None:
        """Return the time since the last byte on the association's I/O queues; None without any."""
        controller = self.controller(association_id)
        return controller.idle_ms() if controller and controller.queues_running() else None

    def controller(self, association_id: int) -> _native.Controller | None:
        """Return the engine's controller of an association, if it has I/O queues."""
        known = self._controllers.get(association_id)
        return None if known is None else known[0]

    async def admit(self, association: Association, connect: Connect) -> Admission:
        """Admit a queue; create the association's controller at the first one."""
        controller = self.controller(association.association_id)
        if controller is None:
            controller = _native.Controller(
                association=association.association_id,
                host_nqn=association.host_nqn,
                host_id=association.host_id.bytes,
                controller_id=association.controller_id,
            )
            self._assign(controller, association)
            feed = EventFeed(controller, self._on_closed)
            self._controllers[association.association_id] = (controller, feed)
            self._associations[association.association_id] = association
        return _Admitted(controller=controller, connect=connect)

    async def association_closed(self, association_id: int) -> None:
        """Stop and drain the association's queues."""
        known = self._controllers.pop(association_id, None)
        self._associations.pop(association_id, None)
        if known is not None:
            controller, feed = known
            try:
                await asyncio.to_thread(controller.close)
            finally:
                feed.remove(controller)

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        """Do nothing: queues have no state here, as the engine's controller serves them all."""

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Do nothing: the listener logs it."""

    def _show(self, is_shown: Callable[[NamespaceConfig], bool]) -> Subsystem:
        shown = [each.config for each in self._namespaces.values() if is_shown(each.config)]
        return Subsystem(
            nqn=self._config.nqn,
            serial=self._config.serial_number,
            transfer_max=FRONT_TRANSFER_BYTES,
            namespaces=tuple(
                Namespace(
                    nsid=config.nsid,
                    namespace_uuid=config.name(self._config.nqn),
                    block_count=config.block_count,
                    metadata_bytes=config.metadata_bytes,
                    eui64=bytes.fromhex(config.eui64 or ""),
                    ana_state=_ANA_STATES[self._access(config)],
                )
                for config in shown
            ),
            commands=ALL_COMMANDS,
            fused_blocks=_FUSED_BLOCKS,
            nsid_max=NAMESPACES_MAX,
            is_multipath=True,
        )

    def _access(self, config: NamespaceConfig) -> AnaStateName:
        """Return the ANA state of a namespace."""
        is_lost = config.ana_state == "persistent-loss"
        return "inaccessible" if self._is_draining and not is_lost else config.ana_state

    def _assign_all(self) -> None:
        for association_id, (controller, _) in self._controllers.items():
            self._assign(controller, self._associations[association_id])

    def _assign(self, controller: _native.Controller, association: Association) -> None:
        controller.set_namespaces(
            [
                (nsid, each.native, self._access(each.config))
                for nsid, each in self._namespaces.items()
                if each.config.shows_to(association.host_nqn)
            ]
        )

    def _listen(self, namespace: OpenNamespace) -> None:
        self._loop.add_reader(namespace.native.event_fd(), self._take_events, namespace)

    def _take_events(self, namespace: OpenNamespace) -> None:
        nsid = namespace.config.nsid
        for event in namespace.native.take_events():
            kind = _NOTIFICATIONS.get(event.reason)
            if kind is None:
                get_logger().warning(
                    "namespace_fault",
                    subsystem=self._config.nqn,
                    nsid=nsid,
                    reason=event.reason,
                    message=event.detail,
                )
                continue
            for association in self._associations.values():
                if association.host_id.bytes.hex() == event.detail:
                    association.admin.notify_reservation(nsid, kind)
                    self._wake(association)

    async def _close(self, namespace: OpenNamespace) -> None:
        self._take_events(namespace)
        self._loop.remove_reader(namespace.native.event_fd())
        await asyncio.to_thread(namespace.native.close)


class PlainResources:
    """The data path's resources of one association."""

    def __init__(self, subsystem: PlainSubsystem, association: Association) -> None:
        self._subsystem = subsystem
        self._association = association

    def health(self, nsid: int | None) -> Health:
        """Return one namespace's figures, or (None) the sum over those that this host may see."""
        figures = [
            each.health()
            for each in self._subsystem.namespaces.values()
            if each.config.shows_to(self._association.host_nqn) and nsid in {None, each.config.nsid}
        ]
        return Health(
            sectors_read=sum(each.sectors_read for each in figures),
            sectors_written=sum(each.sectors_written for each in figures),
            host_reads=sum(each.host_reads for each in figures),
            host_writes=sum(each.host_writes for each in figures),
            busy_ms=max((each.busy_ms for each in figures), default=0),
            power_on_ms=max((each.power_on_ms for each in figures), default=0),
            media_errors=sum(each.media_errors for each in figures),
        )

    def failures(self) -> list[CommandFailure]:
        """Return the failed I/O commands, newest first."""
        controller = self._subsystem.controller(self._association.association_id)
        entries = [] if controller is None else controller.errors()
        return [
            CommandFailure(
                count=count,
                queue_id=queue_id,
                command_id=command_id,
                status=field >> 1,  # without the phase bit
                lba=lba,
                nsid=nsid,
            )
            for count, queue_id, command_id, field, lba, nsid in entries
        ]

    def abort(self, *, queue_id: int, command_id: int) -> bool:
        """Abort a command whose data hasn't fully arrived; return whether it was aborted."""
        controller = self._subsystem.controller(self._association.association_id)
        return controller is not None and controller.abort(queue_id, command_id)
