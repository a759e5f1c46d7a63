"""The gateway role of a daemon: data path, third parties, and the volume service."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from sealane.crypto.evidence.cmw import Item
from sealane.crypto.roles import Role
from sealane.daemon.config import Config, GatewayConfig
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.gateway.accelerator import APPRAISAL_SECONDS, CardKeeper, CardState
from sealane.daemon.gateway.attachments import AttachmentFiles
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.card_source import card_source, check_cards
from sealane.daemon.gateway.cards import Cards
from sealane.daemon.gateway.data_path import Gateway, GatewaySettings
from sealane.daemon.gateway.drain import GatewayDrain
from sealane.daemon.gateway.hold import DisabledCard
from sealane.daemon.gateway.offload import OffloadService
from sealane.daemon.gateway.offload_servicer import OffloadServicer
from sealane.daemon.gateway.servicer import VolumesServicer
from sealane.daemon.gateway.targets import TARGET_SERVICES, Targets
from sealane.daemon.gateway.third_parties import third_party_of
from sealane.daemon.gateway.third_party import ThirdPartyStores
from sealane.daemon.gateway.volumes import VolumeService
from sealane.daemon.node.authorizations import peer_of
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.role_context import RoleContext
from sealane.daemon.runtime.listeners import join_address, split_address
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.servers import listening
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import offload_pb2_grpc, volumes_pb2_grpc

_OFFLOAD: Final = ("sealane.v1.Offload",)
# For tests that detect reused IVs: a file in which every gateway of this daemon records each seal.
_LEDGER_VARIABLE: Final = "SEALANE_NONCE_LEDGERS"


async def start_gateway(config: GatewayConfig, context: RoleContext) -> None:
    """Start the role: restore attachments of an earlier process, then start the volume service."""
    identity, trust = await context.enrolled.enrol(Role.GATEWAY)
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
        listen=context.listeners.named("gateway.listen"),
    )
    check_cards(config.accelerator, context.enrolled.config)
    gateway.cards = cards = Cards(partial(context.report, _OFFLOAD))
    offload = OffloadService()
    for label in config.accelerator:
        disabled = DisabledCard(context.state, label)
        keeper = cards.keep(
            partial(
                CardKeeper,
                card_source(label, context.enrolled.config),
                accepted=partial(_evidence_of, label, identity),
                was_silent=partial(_was_silent, label, identity),
                attest=partial(identity.attest_again, seconds=APPRAISAL_SECONDS),
                hold=disabled.read(),
                is_disabled=disabled.has,
            )
        )
        offload.add(keeper, disabled)
    own = peer_of(identity.subject)
    third_parties = ThirdPartyStores(
        [third_party_of(party) for party in config.third_party],
        host_nqn=gateway_nqn(identity.node),
        directory=context.state / "third-party",
        authorized=lambda volume_id: authorizations.permitted(
            replace(own, volume_id=str(volume_id))
        ),
    )
    targets = Targets(
        config.addresses, identity=identity, report=partial(context.report, TARGET_SERVICES)
    )
    service = VolumeService(
        targets,
        identity=identity,
        broker=BrokerClient(context.enrolled.config, identity),
        devices=DeviceClient(context.enrolled.config, identity),
        gateway=gateway,
        third_parties=third_parties,
        files=AttachmentFiles(context.state, Path(context.config.node.run_dir)),
    )
    await service.expect_kept()
    with listening("gateway.listen", config.listen):
        await gateway.start()
    context.stack.push_async_callback(gateway.stop)
    context.addresses[Role.GATEWAY] = join_address(*gateway.address)
    context.count_faults(Role.GATEWAY, gateway.listener)
    await context.stack.enter_async_context(third_parties.running())
    # First, so that hosts see that the gateway is barred rather than that a queue was lost.
    identity.on_barred.append(service.bar)
    # The gateway's own authorization, for its volumes on third parties.
    authorizations = context.enrolled.authorize_peers(
        identity,
        trust.authorize,
        uses=third_parties.target.gateways,
        lost=third_parties.target.fence_gateway,
        fresh_seconds=config.authorization_seconds,
    )
    for keeper in cards:
        for state in CardState:
            context.metrics.accelerator_state.labels(keeper.source.label, state).set_function(
                partial(_is_in, keeper, state)
            )
    if config.accelerator:
        context.metrics.add_latencies("accelerator")
        context.spawn("gateway-accelerators", cards.run())
    await context.stack.enter_async_context(service.running())
    context.drained.append(GatewayDrain(service, gateway))
    context.event_logs.append(service.events)
    context.metrics.gateway_journals_bytes.set_function(partial(_taken, gateway))
    context.metrics.gateway_journals_limit_bytes.set(config.journals_bytes_max)
    context.metrics.add_latencies("gateway")
    context.metrics.add_statistics(
        "gateway_volume", ("volume", "mode", "target"), service.statistics
    )
    context.metrics.add_statistics("gateway_target", ("target",), targets.statistics)
    context.targets.append(targets.views)

    async def reload(config: Config) -> None:
        if config.gateway is not None:
            await targets.apply(config.gateway.addresses, volumes_of=service.on_targets)

    context.reloads.append(reload)
    volumes_pb2_grpc.add_VolumesServicer_to_server(VolumesServicer(service), context.local)
    context.services.append("sealane.v1.Volumes")
    offload_pb2_grpc.add_OffloadServicer_to_server(OffloadServicer(offload), context.local)
    context.services.extend(_OFFLOAD)
    # First at a stop, so that hosts wait for the next process rather than find no volume.
    context.stack.callback(gateway.listener.end_accepting)


def _evidence_of(label: str, identity: Identity) -> Item | None:
    return identity.devices.get(label)


def _was_silent(label: str, identity: Identity) -> bool:
    return label in identity.silent


def _is_in(keeper: CardKeeper, state: CardState) -> int:
    return int(keeper.state is state)


def _taken(gateway: Gateway) -> int:
    return gateway.journals.taken
