"""The broker role of a daemon: store, verifier, and their servers."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.crypto.roles import Role
from sealane.daemon.broker.anchor_files import AnchorFiles
from sealane.daemon.broker.assembly import (
    VerifierParts,
    configured_owners,
    offer_policy,
    open_verifier,
)
from sealane.daemon.broker.audit_forward import AuditForwarder
from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.device_books import DeviceBooks
from sealane.daemon.broker.device_servicer import DeviceRegistryServicer, DevicesServicer
from sealane.daemon.broker.health import end_with, keep_audit, keep_health
from sealane.daemon.broker.kek import open_keys
from sealane.daemon.broker.opening import FORWARDED_NAME, OpenedBroker, opened_broker
from sealane.daemon.broker.operator_servicer import OperatorServicer
from sealane.daemon.broker.policy_servicer import AuditLogServicer, PoliciesServicer
from sealane.daemon.broker.servicer import AttestationServicer, BrokerServicer
from sealane.daemon.broker.snapshot import Snapshots
from sealane.daemon.broker.trust_servicer import MembershipServicer, TrustServicer
from sealane.daemon.config import BrokerConfig, Config
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.node.role_context import RoleContext
from sealane.daemon.runtime.authorizers import TlsOnly
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import new_server
from sealane.protocol.v1 import (
    attestation_pb2_grpc,
    broker_pb2_grpc,
    devices_pb2_grpc,
    operator_pb2_grpc,
    policy_pb2_grpc,
    trust_pb2_grpc,
)

LOCAL_SERVICES: Final = (
    "sealane.v1.Policies",
    "sealane.v1.AuditLog",
    "sealane.v1.Operator",
    "sealane.v1.DeviceRegistry",
    "sealane.v1.Membership",
)
"""Services on the daemon's Unix socket."""
STORE_SERVICES: Final = tuple(name for name in LOCAL_SERVICES if name != "sealane.v1.AuditLog")
"""Services that are unhealthy while the store doesn't answer."""
AUDIT_SERVICES: Final = ("sealane.v1.AuditLog",)
"""Services that are unhealthy while the audit log has only its reserve left."""


async def start_broker(config: BrokerConfig, context: RoleContext) -> None:
    """Start the role: the store and its tasks, the verifier, and both servers for nodes."""
    node, metrics, spawn = context.config.node.name, context.metrics, context.spawn
    opened = await context.stack.enter_async_context(
        opened_broker(
            config, node=node, state=context.state, metrics=metrics, tcti=context.config.tpm.tcti
        )
    )
    broker, instance = opened.service, opened.instance
    store, rewrapping = broker.registry.store, opened.rewrapping
    spawn("broker-heads", instance.keep_anchored(seconds=config.head_seconds))
    spawn("broker-rewrapping", rewrapping.keep())
    spawn("broker-record-key", opened.record_keys.keep())
    spawn("broker-tenant-keys", opened.tenant_keys.keep())
    spawn("broker-store", end_with(store))
    spawn("broker-health", keep_health(store, partial(context.report, STORE_SERVICES)))
    spawn(
        "broker-audit",
        keep_audit(
            opened.log,
            partial(context.report, AUDIT_SERVICES),
            metrics=metrics,
            seconds=config.head_seconds,
        ),
    )
    if config.audit_forward is not None:
        position = context.state / FORWARDED_NAME
        forwarder = AuditForwarder(opened.log, config.audit_forward, node=node, position=position)
        log, shown = opened.log, metrics.broker
        shown.audit_forwarded_sequence.set_function(lambda: log.forwarded or 0)
        shown.audit_forward_lag.set_function(lambda: log.head.sequence - (log.forwarded or 0))
        spawn("broker-audit-forward", forwarder.run())
    authorities = broker.registry.authorities
    identity = _own_identity(authorities, lambda: authorities.signing, node=node, metrics=metrics)
    await context.enrolled.keep(identity)
    front = _own_identity(authorities, lambda: authorities.attesting, node=node, metrics=metrics)
    await front.renew()
    spawn("renew-attestation", front.keep_renewed())

    files = AnchorFiles(context.state, authorities)
    files.write()

    def follow() -> None:
        metrics.broker.authorities.set(len(authorities.anchors.certificates))
        opened.log.sign_with(authorities.signing.signing_key)

    follow()
    authorities.on_change += [follow, identity.outdate, front.outdate, files.try_to_write]
    spawn("broker-authorities", opened.succession.keep(files.try_to_write))
    verifier = await open_verifier(
        config, broker, instance, context.stack, node=node, metrics=metrics
    )
    spawn("broker-policy", verifier.keeper.keep_refreshed())
    context.enrolled.is_development |= verifier.keeper.policy.software_allowed

    async def reload(config: Config) -> None:
        if config.broker is not None:
            await rewrapping.announce(await asyncio.to_thread(open_keys, config.broker))
            await verifier.collateral.load()
            verifier.keeper.owners.configure(configured_owners(config.broker))
            await offer_policy(verifier.keeper, config.broker)

    context.reloads.append(reload)
    _serve_locally(opened, verifier, context)
    await _serve(config, opened, verifier, (identity, front), context)


def _own_identity(
    authorities: Authorities,
    certifying: Callable[[], CertificateAuthority],
    *,
    node: str,
    metrics: Metrics,
) -> Identity:
    """Return an identity of the broker, which its own authority certifies."""

    async def issue(keys: Keys) -> Issued:
        subject = Subject(
            node=node,
            role=Role.BROKER,
            tenant="",
            incarnation=keys.incarnation,
            kem_public_key=keys.kem_public,
        )
        return Issued(leaf=certifying().issue(subject, keys.tls.public_key(), now=utc_now()))

    return Identity(
        node=node, role=Role.BROKER, anchors=authorities.anchors, obtain=issue, metrics=metrics
    )


def _serve_locally(opened: OpenedBroker, verifier: VerifierParts, context: RoleContext) -> None:
    """Add the services for the operator: LOCAL_SERVICES."""
    local, broker, instance = context.local, opened.service, opened.instance
    policy_pb2_grpc.add_PoliciesServicer_to_server(PoliciesServicer(verifier.keeper), local)
    policy_pb2_grpc.add_AuditLogServicer_to_server(AuditLogServicer(opened.log), local)
    snapshots = Snapshots(
        broker.registry, node=context.config.node.name, audit=broker.audit, metrics=context.metrics
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(
        OperatorServicer(
            broker,
            rewrapping=opened.rewrapping,
            record_keys=opened.record_keys,
            tenant_keys=opened.tenant_keys,
            succession=opened.succession,
            snapshots=snapshots,
        ),
        local,
    )
    books = DeviceBooks(broker.registry, cover=instance.cover, audit=broker.audit)
    devices_pb2_grpc.add_DeviceRegistryServicer_to_server(DeviceRegistryServicer(books), local)
    trust_pb2_grpc.add_MembershipServicer_to_server(MembershipServicer(verifier.membership), local)
    context.services.extend(LOCAL_SERVICES)


async def _serve(
    config: BrokerConfig,
    opened: OpenedBroker,
    verifier: VerifierParts,
    identities: tuple[Identity, Identity],
    context: RoleContext,
) -> None:
    """Start both servers for nodes: for attested nodes, and for attestation."""
    broker, refused = opened.service, opened.audit.refused_call
    identity, front = identities
    authorities = broker.registry.authorities
    authorizer = context.authorizer(identity, verifier.membership.admit, refused=refused)
    open_server = new_server(context.metrics, TlsOnly(refused=refused))
    attestation_pb2_grpc.add_AttestationServicer_to_server(
        AttestationServicer(verifier.service), open_server
    )
    server = new_server(context.metrics, authorizer, context.traces)
    trust_pb2_grpc.add_TrustServicer_to_server(
        TrustServicer(verifier.membership, authorities, authorizer), server
    )
    broker_pb2_grpc.add_BrokerServicer_to_server(BrokerServicer(broker, authorizer), server)
    devices_pb2_grpc.add_DevicesServicer_to_server(
        DevicesServicer(verifier.devices, authorizer), server
    )
    await context.serve(server, identity, config.listen, name="broker", key="broker.listen")
    await context.serve(
        open_server,
        front,
        config.attestation_listen,
        name="attestation",
        key="broker.attestation_listen",
        mutual=False,
    )
