"""Composition root: builds the roles of one daemon, starts them in order, drains them in reverse.

Order: metrics, broker, target, gateway, fabric, Unix socket. A role needs only those before it.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from sealane.crypto.certificates import verify_leaf
from sealane.daemon.broker.assembly import VerifierParts, offer_policy
from sealane.daemon.broker.role import LOCAL_SERVICES, start_broker
from sealane.daemon.config import (
    BrokerConfig,
    Config,
    FabricConfig,
    GatewayConfig,
    TargetConfig,
)
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.fabric.service import FabricService, Peer
from sealane.daemon.fabric.servicer import (
    PeerChannel,
    SessionPeerServicer,
    SessionsServicer,
    reach_over,
)
from sealane.daemon.fabric.settings import FabricSettings, JobLimits
from sealane.daemon.fabric.shown import own_result, own_shown, responder_shown
from sealane.daemon.gateway.attachments import AttachmentFiles
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.data_path import Gateway, GatewaySettings
from sealane.daemon.gateway.servicer import VolumesServicer
from sealane.daemon.gateway.third_parties import third_party_of
from sealane.daemon.gateway.third_party import ThirdPartyStores
from sealane.daemon.gateway.volumes import VolumeService
from sealane.daemon.node.authorizations import peer_of
from sealane.daemon.node.enrolled import EnrolledRoles
from sealane.daemon.node.servicer import NodesServicer
from sealane.daemon.nvme.exported import Portal
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.runtime.calls import Authorizer
from sealane.daemon.runtime.clock import monotonic_ns, utc_now
from sealane.daemon.runtime.directories import Reloaded, RunDirectory, claimed_state
from sealane.daemon.runtime.health import Health
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics, MetricsServer, by_owner
from sealane.daemon.runtime.notify import Notifier
from sealane.daemon.runtime.servers import (
    bind_tcp,
    bind_unix,
    join_address,
    new_server,
    running,
    split_address,
)
from sealane.daemon.target.control import StorageService
from sealane.daemon.target.data_path import KEPT_STORES, Target
from sealane.daemon.target.device import authorize_at, keep_served, opened_device, report_of
from sealane.daemon.target.finding_reports import FindingReports
from sealane.daemon.target.scrub_schedule import keep_jobs
from sealane.daemon.target.servicer import StorageServicer
from sealane.daemon.target.subsystems import PlainSubsystems
from sealane.daemon.target.subsystems_servicer import SubsystemsServicer
from sealane.daemon.volume.events import EventLog
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import (
    nodes_pb2_grpc,
    sessions_pb2_grpc,
    storage_pb2_grpc,
    subsystems_pb2_grpc,
    volumes_pb2_grpc,
)
from sealane.transport.establish import Shown

# For tests that look for an IV used twice: a file that every gateway here notes each seal in.
_LEDGER_VARIABLE: Final = "SEALANE_NONCE_LEDGERS"


async def serve(
    config: Config,
    *,
    hangup: asyncio.Event | None = None,
    reread: Callable[[], Config] | None = None,
) -> None:
    """Run the daemon until cancelled; start-up failures leave as sealane errors in a group.

    Each time `hangup` is set, what can change while it runs is taken from `reread`.
    """
    notifier = Notifier()
    run_directory = RunDirectory(Path(config.node.run_dir))
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as stack:
        daemon = Daemon(config, tasks, stack)
        stack.enter_context(run_directory.claimed())
        stack.enter_context(claimed_state(Path(config.node.state_dir)))
        await daemon.start(run_directory)
        daemon.spawn("watchdog", notifier.keep_watchdog())
        write_ready = partial(
            run_directory.write_ready, node=config.node.name, addresses=daemon.addresses
        )
        write_ready()
        if hangup is not None and reread is not None:
            daemon.spawn(
                "reload",
                daemon.keep_reloaded(hangup, reread, lambda reload: write_ready(reload=reload)),
            )
        notifier.ready(f"serving as {', '.join(config.roles)}")
        get_logger().info("ready", roles=config.roles, addresses=daemon.addresses)
        try:
            await asyncio.Event().wait()
        finally:
            notifier.stopping(drain_seconds=daemon.drain_seconds)
            run_directory.ready_file.unlink(missing_ok=True)
            get_logger().info("stopping")
            await daemon.stop_serving()
            await daemon.drain()


class Daemon:
    """The parts of one daemon; `stack` owns what must be closed, `tasks` what runs."""

    def __init__(
        self, config: Config, tasks: asyncio.TaskGroup, stack: contextlib.AsyncExitStack
    ) -> None:
        self.config = config
        self.metrics = Metrics(is_broker=config.broker is not None)
        self.addresses: dict[str, str] = {}
        self._tasks = tasks
        self._stack = stack
        self._started = utc_now()
        self._services: list[str] = []
        self._event_logs: list[EventLog] = []
        self._enrolled = EnrolledRoles(config, metrics=self.metrics, spawn=self.spawn, stack=stack)
        self._local = new_server(self.metrics, None)
        self._health = Health()
        self._plain: PlainSubsystems | None = None
        self._fabric: FabricService | None = None
        self._verifier: VerifierParts | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the daemon stops."""
        task = self._tasks.create_task(work, name=name)
        self._stack.callback(task.cancel)

    @property
    def drain_seconds(self) -> int:
        """How long a stop may wait for what is under way."""
        return 0 if self.config.fabric is None else self.config.fabric.drain_timeout_seconds

    async def drain(self) -> None:
        """Let sessions finish what is under way, while everything else still answers."""
        if self._fabric is not None:
            await self._fabric.drain.run(self.drain_seconds)

    async def stop_serving(self) -> None:
        """Say NOT_SERVING from now on, of the daemon and each of its services."""
        await self._health.stop()

    async def start(self, run_directory: RunDirectory) -> None:
        """Start every role of the configuration."""
        config = self.config
        if config.metrics is not None:
            server = MetricsServer(self.metrics, config.metrics.listen)
            self._stack.callback(server.close)
            self.addresses["metrics"] = server.address
        if config.broker is not None:
            await self._start_broker(config.broker)
        if config.target is not None:
            await self._start_target(config.target)
        if config.gateway is not None:
            await self._start_gateway(config.gateway)
        if config.fabric is not None:
            await self._start_fabric(config.fabric, run_directory)
        await self._start_local(run_directory)

    async def _start_broker(self, config: BrokerConfig) -> None:
        started = await start_broker(
            config,
            node=self.config.node.name,
            state=Path(self.config.node.state_dir),
            tcti=self.config.tpm.tcti,
            metrics=self.metrics,
            enrolled=self._enrolled,
            local=self._local,
            spawn=self.spawn,
            report=self._health.report,
            stack=self._stack,
        )
        self._verifier = started.verifier
        self.addresses |= started.addresses
        self._services += LOCAL_SERVICES

    async def _start_target(self, config: TargetConfig) -> None:
        identity, trust = await self._enrolled.enrol("target")
        traddr, trsvcid = split_address(config.listen)
        directory, device, catalogue, reopen = None, None, None, None
        if config.store in KEPT_STORES:
            directory = Path(self.config.target_directory)
            client = DeviceClient(self._enrolled.config, identity)
            # Before the target, so that it is let go after all that the target still writes.
            device, catalogue, reopen = await self._stack.enter_async_context(
                opened_device(
                    config,
                    directory=directory,
                    state=Path(self.config.node.state_dir),
                    client=client,
                    timeout_seconds=self._enrolled.config.timeout_seconds,
                    tcti=self.config.tpm.tcti,
                )
            )
        target = Target(
            traddr=traddr,
            trsvcid=trsvcid,
            store_kind=config.store,
            drive=config.drive,
            namespaces=[Path(path) for path in config.namespaces],
            directory=directory,
            device=device,
            thin=config.thin,
        )
        with _listening("target.listen", config.listen):
            await target.start()
        self._stack.push_async_callback(target.stop)
        self.addresses["target"] = join_address(*target.address)
        await self._start_plain(config, target)
        authorizations = self._enrolled.authorize_peers(
            identity,
            trust.authorize if device is None else authorize_at(trust, device),
            uses=target.gateways,
            lost=target.fence_gateway,
            fresh_seconds=config.authorization_seconds,
        )
        service = StorageService(
            target,
            node=self.config.node.name,
            store=config.store,
            store_anchor="none" if device is None else config.anchor,
            anchor=identity.anchor,
            kem=identity.keys.kem,
            authorizations=authorizations,
            device=device,
            catalogue=catalogue,
        )
        self._event_logs.append(service.events)
        self.metrics.add_statistics("target_opening", ("volume",), target.openings.statistics)
        authorizer = Authorizer(
            identity.anchor,
            server=identity.spiffe_id,
            admit=authorizations.admit,
            metrics=self.metrics,
        )
        self._stack.callback(authorizer.call_keys.close)
        server = new_server(self.metrics, authorizer)
        storage_pb2_grpc.add_StorageServicer_to_server(StorageServicer(service, authorizer), server)
        self.addresses["target_control"] = bind_tcp(
            server,
            config.control_listen,
            identity.server_credentials(mutual=True),
            key="target.control_listen",
        )
        await self._stack.enter_async_context(running(server))
        # Opening large volumes takes a while: who asks meanwhile hears how far it is.
        await service.restore()
        if device is not None and reopen is not None:
            self.spawn(
                "target-device",
                keep_served(
                    device,
                    reopen,
                    client=client,
                    trust=trust,
                    authorizations=authorizations,
                    service=service,
                ),
            )
        self.spawn("target-events", service.poll_events())
        reports = None
        if device is not None:
            reports = FindingReports(report_of(client, device))
        self.spawn(
            "target-jobs",
            keep_jobs(target, volume_ids=service.volume_ids, config=config.scrub, reports=reports),
        )
        self.metrics.add_statistics("target_volume", ("volume", "mode"), service.statistics)

    async def _start_plain(self, config: TargetConfig, target: Target) -> None:
        """Serve plain subsystems at the target's listener, and discovery where it is asked for."""
        self._observe("target", target.listener)
        discovery = []
        if config.discovery_listen is not None:
            traddr, trsvcid = split_address(config.discovery_listen)
            listener = Listener(
                target,
                traddr=traddr,
                trsvcid=trsvcid,
                portals=lambda: [Portal.of(*target.address)],
                offers_digests=True,
            )
            with _listening("target.discovery_listen", config.discovery_listen):
                await listener.start()
            self._stack.push_async_callback(listener.stop)
            self.addresses["discovery"] = join_address(*listener.address)
            self._observe("discovery", listener)
            discovery.append(listener)
        self._plain = PlainSubsystems(target.listener, discovery=discovery)
        self._stack.push_async_callback(self._plain.close)
        plain = self._plain
        self.metrics.add_statistics(
            "plain_namespace", ("namespace",), lambda: by_owner(plain.statistics())
        )
        await self._plain.apply(config.subsystems)
        subsystems_pb2_grpc.add_SubsystemsServicer_to_server(
            SubsystemsServicer(self._plain, target.listener), self._local
        )
        self._services.append("sealane.v1.Subsystems")

    def _observe(self, name: str, listener: Listener) -> None:
        listener.observe(lambda reason: self.metrics.nvme_faults.labels(name, reason).inc())

    async def keep_reloaded(
        self,
        hangup: asyncio.Event,
        reread: Callable[[], Config],
        tell: Callable[[Reloaded], None],
    ) -> None:
        """Apply plain subsystems, collateral and policy each time the files are to be read again.

        A file with a fault, or a store that can't be opened, changes nothing and is logged. `tell`
        hears how each reload ended.
        """
        while True:
            await hangup.wait()
            hangup.clear()
            began = monotonic_ns()
            try:
                config = await asyncio.to_thread(reread)
                if self._plain is not None and config.target is not None:
                    await self._plain.apply(config.target.subsystems)
                if self._verifier is not None and config.broker is not None:
                    await self._verifier.collateral.load()
                    await offer_policy(self._verifier.keeper, config.broker)
            except Error as error:
                get_logger().error("reload_failed", reason=error.reason, message=error.args[0])
                tell(
                    Reloaded(
                        began_ns=began,
                        reason=error.reason,
                        message=str(error.args[0]),
                        exit_code=error.exit_code,
                    )
                )
                continue
            get_logger().info("reloaded")
            tell(Reloaded(began_ns=began))

    async def _start_gateway(self, config: GatewayConfig) -> None:
        identity, trust = await self._enrolled.enrol("gateway")
        traddr, trsvcid = split_address(config.listen)
        ledgers = os.environ.get(_LEDGER_VARIABLE)
        if ledgers:
            get_logger().warning("nonce_ledger_is_on", path=ledgers)
        gateway = Gateway(
            traddr=traddr,
            trsvcid=trsvcid,
            settings=GatewaySettings(
                command_timeout_seconds=config.command_timeout_seconds,
                hold_seconds=config.hold_seconds,
                journal_bytes_max=config.journal_bytes_max,
                journals_bytes_max=config.journals_bytes_max,
                nonce_ledgers=Path(ledgers) if ledgers else None,
            ),
        )
        own = peer_of(identity.subject)
        third_parties = ThirdPartyStores(
            [third_party_of(party) for party in config.third_party],
            host_nqn=gateway_nqn(identity.node),
            directory=Path(self.config.node.state_dir) / "third-party",
            authorized=lambda volume_id: authorizations.permitted(
                replace(own, volume_id=str(volume_id))
            ),
        )
        service = VolumeService(
            config,
            identity=identity,
            broker=BrokerClient(self._enrolled.config, identity),
            devices=DeviceClient(self._enrolled.config, identity),
            gateway=gateway,
            third_parties=third_parties,
            files=AttachmentFiles(Path(self.config.node.state_dir), Path(self.config.node.run_dir)),
        )
        await service.expect_kept()
        with _listening("gateway.listen", config.listen):
            await gateway.start()
        self._stack.push_async_callback(gateway.stop)
        self.addresses["gateway"] = join_address(*gateway.address)
        self._observe("gateway", gateway.listener)
        await self._stack.enter_async_context(third_parties.running())
        # First, so that hosts are told that the gateway is barred, and not that a queue was lost.
        identity.on_barred.append(service.bar)
        # Its own authorization, for what it has at third parties.
        authorizations = self._enrolled.authorize_peers(
            identity,
            trust.authorize,
            uses=third_parties.target.gateways,
            lost=third_parties.target.fence_gateway,
            fresh_seconds=config.authorization_seconds,
        )
        await self._stack.enter_async_context(service.running())
        self._event_logs.append(service.events)
        self.metrics.add_statistics("gateway_volume", ("volume", "mode"), service.statistics)
        volumes_pb2_grpc.add_VolumesServicer_to_server(VolumesServicer(service), self._local)
        self._services.append("sealane.v1.Volumes")

    async def _start_fabric(self, config: FabricConfig, run_directory: RunDirectory) -> None:
        identity, trust = await self._enrolled.enrol("fabric")

        @contextlib.asynccontextmanager
        async def connect_peer(address: str, node: str) -> AsyncIterator[PeerChannel]:
            async with identity.connection(address, node, "fabric") as connection:
                subject = verify_leaf(connection.pins[0], anchor=identity.anchor, now=utc_now())
                await authorizations.require(peer_of(subject))
                yield PeerChannel(
                    channel=connection.channel,
                    shown=own_shown(connection.own),
                    subject=subject,
                    check_result=lambda result: responder_shown(
                        result, pins=connection.pins, anchor=identity.anchor, now=utc_now()
                    ),
                )

        service = FabricService(
            FabricSettings(
                ring_socket=run_directory.ring_socket,
                rate_max_bits_per_second=config.rate_max_bits_per_second,
                region_bytes_max=config.region_bytes_max,
                sessions_max=config.sessions_max,
                limits=JobLimits(**config.limits.model_dump()),
                listen_data=config.data_listen,
                paths=config.paths,
                idle_timeout_seconds=config.idle_timeout_seconds,
                reordering_micros=config.reordering_micros,
                drain_timeout_seconds=config.drain_timeout_seconds,
                unit_bytes=None if config.unit_bytes == "auto" else config.unit_bytes,
                assumed_loss=config.assumed_loss,
                plan_objective=config.plan_objective,
            ),
            own=lambda: identity.subject,
            own_result=lambda: own_result(identity.own),
            kem=identity.keys.kem,
            reach_peer=reach_over(connect_peer),
            permit=lambda peer: authorizations.permit(peer),  # noqa: PLW0108 - made below
        )
        # First, so that peers are told that this fabric is barred, and not that they are refused.
        identity.on_barred.append(service.bar)
        authorizations = self._enrolled.authorize_peers(
            identity,
            trust.authorize,
            uses=service.peers,
            lost=service.end_peer,
            keep_seconds=config.trust_grace_seconds,
        )
        await self._stack.enter_async_context(service.running())
        self._fabric = service
        snapshots = service.snapshots
        self.spawn("session-statistics", snapshots.keep())
        self.metrics.add_statistics("session", ("session",), lambda: by_owner(snapshots.sessions))
        self.metrics.add_statistics("session_path", ("session", "path"), lambda: snapshots.paths)
        self.metrics.add_statistics("job", ("job",), lambda: by_owner(snapshots.jobs))
        self.addresses["ring_socket"] = str(run_directory.ring_socket)
        authorizer = Authorizer(
            identity.anchor,
            server=identity.spiffe_id,
            admit=authorizations.admit,
            metrics=self.metrics,
        )
        self._stack.callback(authorizer.call_keys.close)

        def identify(context: Any) -> Peer:
            return Peer(
                subject=authorizer.caller(context),
                shown=Shown(
                    certificate=authorizer.certificate_digest(context),
                    token=authorizer.token_digest(context),
                ),
            )

        server = new_server(self.metrics, authorizer)
        sessions_pb2_grpc.add_SessionPeerServicer_to_server(
            SessionPeerServicer(service, identify=identify), server
        )
        self.addresses["fabric_control"] = bind_tcp(
            server,
            config.control_listen,
            identity.server_credentials(mutual=True),
            key="fabric.control_listen",
        )
        await self._stack.enter_async_context(running(server))
        sessions_pb2_grpc.add_SessionsServicer_to_server(SessionsServicer(service), self._local)
        self._services.append("sealane.v1.Sessions")

    async def _start_local(self, run_directory: RunDirectory) -> None:
        nodes_pb2_grpc.add_NodesServicer_to_server(
            NodesServicer(
                node=self.config.node.name,
                roles=self.config.roles,
                identities=self._enrolled.identities,
                addresses=self.addresses,
                evidence=self.config.enrolment.evidence if self.config.enrolment else "",
                is_development=self._enrolled.is_development,
                started=self._started,
            ),
            self._local,
        )
        self._services.append("sealane.v1.Nodes")
        await self._health.serve(self._local, self._services)
        reflection.enable_server_reflection(
            [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME], self._local
        )
        bind_unix(self._local, run_directory.socket)
        self.addresses["socket"] = str(run_directory.socket)
        await self._stack.enter_async_context(running(self._local))
        for log in self._event_logs:
            self._stack.callback(log.close)


@contextlib.contextmanager
def _listening(key: str, listen: str) -> Iterator[None]:
    """Name the configuration key of a data-path listener that can't be bound."""
    try:
        yield
    except UsageError as error:
        raise UnavailableError("listen.refused", f"{key} {listen}: {error.args[0]}") from error
