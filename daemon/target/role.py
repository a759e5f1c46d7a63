"""The target role of a daemon: its device, its data path, and the servers in front of them."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sealane.crypto.roles import Role
from sealane.daemon.config import VOLUMES_PLACE, Config, TargetConfig
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.node.role_context import RoleContext
from sealane.daemon.nvme.exported import Portal
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.runtime.listeners import join_address, split_address
from sealane.daemon.runtime.metrics import by_owner
from sealane.daemon.runtime.servers import listening, new_server
from sealane.daemon.runtime.space import Space
from sealane.daemon.target.control import StorageService
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.device import DeviceRecorder, authorize_at, keep_served, opened_device
from sealane.daemon.target.drain import TargetDrain
from sealane.daemon.target.health import (
    DEVICE_SERVICES,
    STORE_SERVICES,
    Serving,
    end_with_stores,
)
from sealane.daemon.target.reports import Reports
from sealane.daemon.target.scrub_schedule import keep_jobs
from sealane.daemon.target.servicer import StorageServicer
from sealane.daemon.target.subsystems import PlainSubsystems
from sealane.daemon.target.subsystems_servicer import SubsystemsServicer
from sealane.daemon.volume.store_kinds import STORE_KINDS
from sealane.protocol.kinds import AnchorKind
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import storage_pb2_grpc, subsystems_pb2_grpc


async def start_target(config: TargetConfig, context: RoleContext) -> None:
    """Start the role: the device, its volumes, plain subsystems and the control server."""
    identity, trust = await context.enrolled.enrol(Role.TARGET)
    traddr, trsvcid = split_address(config.listen)
    directory, device, catalogue, reopen = None, None, None, None
    if STORE_KINDS[config.store].is_kept:
        directory = Path(context.config.target_directory)
        client = DeviceClient(context.enrolled.config, identity)
        # Before the target, so that it is released only after the target's last writes.
        device, catalogue, reopen = await context.stack.enter_async_context(
            opened_device(
                config,
                directory=directory,
                state=context.state,
                client=client,
                timeout_seconds=context.enrolled.config.timeout_seconds,
                tcti=context.config.tpm.tcti,
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
        listen=context.listeners.named("target.listen"),
    )
    with listening("target.listen", config.listen):
        await target.open()
    context.stack.push_async_callback(target.stop)
    context.addresses[Role.TARGET] = join_address(*target.address)
    context.metrics.add_latencies("target")
    plain = await _start_plain(config, target, context)
    authorizations = context.enrolled.authorize_peers(
        identity,
        trust.authorize if device is None else authorize_at(trust, device),
        uses=target.gateways,
        lost=target.fence_gateway,
        fresh_seconds=config.authorization_seconds,
    )
    reports = None if device is None else Reports(DeviceRecorder(client, device))
    if reports is not None:
        # When peers' calls have ended, and before the device is closed.
        context.stack.push_async_callback(reports.send_last)
    service = StorageService(
        target,
        node=context.config.node.name,
        store=config.store,
        store_anchor=AnchorKind.NONE if device is None else config.anchor,
        anchors=identity.anchors,
        kem=identity.keys.kem,
        authorizations=authorizations,
        device=device,
        catalogue=catalogue,
        room=partial(_room, config, context.spaces),
        reports=reports,
    )
    context.drained.append(TargetDrain(service, target, plain, own_nqn=gateway_nqn(identity.node)))
    context.event_logs.append(service.events)
    context.metrics.add_statistics("target_opening", ("volume",), target.openings.statistics)
    authorizer = context.authorizer(identity, authorizations.admit)
    server = new_server(context.metrics, authorizer, context.traces)
    storage_pb2_grpc.add_StorageServicer_to_server(StorageServicer(service, authorizer), server)
    await context.serve(
        server,
        identity,
        config.control_listen,
        name="target_control",
        key="target.control_listen",
    )
    # Opening large volumes takes a while; callers get the progress meanwhile.
    began = time.monotonic()
    await service.restore()
    serving = Serving(
        opening_seconds=time.monotonic() - began, endings=context.run_directory.failed_stores
    )
    if device is not None and reopen is not None:
        context.spawn(
            "target-device",
            keep_served(
                device,
                reopen,
                client=client,
                trust=trust,
                authorizations=authorizations,
                service=service,
                report=partial(context.report, DEVICE_SERVICES),
            ),
        )
    context.spawn(
        "target-stores",
        end_with_stores(
            service.failed_stores,
            partial(context.report, STORE_SERVICES),
            unopened=service.unopened.ids,
            serving=serving,
        ),
    )
    context.spawn("target-unopened", service.keep_opening())
    context.spawn("target-events", service.poll_events())
    context.spawn(
        "target-jobs",
        keep_jobs(target, volume_ids=service.volume_ids, config=config.scrub, reports=reports),
    )
    context.metrics.add_statistics("target_volume", ("volume", "mode"), service.statistics)


def _room(config: TargetConfig, spaces: Callable[[], Sequence[Space]]) -> Space | None:
    """Return the space of the directory, if the volumes' sectors are in it."""
    kind = STORE_KINDS[config.store]
    if not kind.is_kept or kind.lies_on_namespaces:
        return None
    return next((space for space in spaces() if space.place == VOLUMES_PLACE), None)


async def _start_plain(
    config: TargetConfig, target: Target, context: RoleContext
) -> PlainSubsystems:
    """Serve plain subsystems at the target's listener, and discovery if configured."""
    context.count_faults(Role.TARGET, target.listener)
    discovery = []
    if config.discovery_listen is not None:
        traddr, trsvcid = split_address(config.discovery_listen)
        listener = Listener(
            target,
            traddr=traddr,
            trsvcid=trsvcid,
            portals=lambda: [Portal.of(*target.address)],
            offers_digests=True,
            listen=context.listeners.named("target.discovery_listen"),
        )
        with listening("target.discovery_listen", config.discovery_listen):
            listener.open()
        context.stack.push_async_callback(listener.stop)
        context.addresses["discovery"] = join_address(*listener.address)
        context.count_faults("discovery", listener)
        discovery.append(listener)
    plain = PlainSubsystems(target.listener, discovery=discovery)
    context.stack.push_async_callback(plain.close)
    context.metrics.add_statistics(
        "plain_namespace", ("namespace",), lambda: by_owner(plain.statistics())
    )
    await plain.apply(config.subsystems)
    # Hosts that wait since the last process ended come at once, and want what it served.
    for each in (target.listener, *discovery):
        await each.start()
        context.stack.callback(each.end_accepting)

    async def reload(config: Config) -> None:
        if config.target is not None:
            await plain.apply(config.target.subsystems)

    context.reloads.append(reload)
    subsystems_pb2_grpc.add_SubsystemsServicer_to_server(
        SubsystemsServicer(plain, target.listener), context.local
    )
    context.services.append("sealane.v1.Subsystems")
    return plain
