"""The broker role of a daemon: store, verifier, and the servers in front of them."""

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.daemon.broker.assembly import VerifierParts, open_verifier
from sealane.daemon.broker.device_books import DeviceBooks
from sealane.daemon.broker.device_servicer import DeviceRegistryServicer, DevicesServicer
from sealane.daemon.broker.health import end_with, keep_audit, keep_health
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.opening import AUDIT_NAME, OpenedBroker, opened_broker
from sealane.daemon.broker.operator_servicer import OperatorServicer
from sealane.daemon.broker.policy_servicer import AuditLogServicer, PoliciesServicer
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.servicer import AttestationServicer, BrokerServicer
from sealane.daemon.broker.trust_servicer import MembershipServicer, TrustServicer
from sealane.daemon.config import BrokerConfig
from sealane.daemon.node.enrolled import EnrolledRoles
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.runtime.calls import Authorizer, TlsOnly
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.directories import replace_file
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import bind_tcp, new_server, running
from sealane.protocol.v1 import (
    attestation_pb2_grpc,
    broker_pb2_grpc,
    devices_pb2_grpc,
    operator_pb2_grpc,
    policy_pb2_grpc,
    trust_pb2_grpc,
)

TRUST_ANCHOR_NAME: Final = "trust-anchor.pem"
LOCAL_SERVICES: Final = (
    "sealane.v1.Policies",
    "sealane.v1.AuditLog",
    "sealane.v1.Operator",
    "sealane.v1.DeviceRegistry",
    "sealane.v1.Membership",
)
"""What it serves on the daemon's Unix socket."""
STORE_SERVICES: Final = tuple(name for name in LOCAL_SERVICES if name != "sealane.v1.AuditLog")
"""What isn't healthy while the store doesn't answer."""
AUDIT_SERVICES: Final = ("sealane.v1.AuditLog",)
"""What isn't healthy while the audit log has no space left but its reserve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedBroker:
    """What others need of it: the verifier, and where its listeners are."""

    verifier: VerifierParts
    addresses: dict[str, str]


async def start_broker(
    config: BrokerConfig,
    *,
    node: str,
    state: Path,
    tcti: str,
    metrics: Metrics,
    enrolled: EnrolledRoles,
    local: grpc.aio.Server,
    spawn: Callable[[str, Coroutine[Any, Any, None]], None],
    report: Callable[[Sequence[str], bool], Awaitable[None]],
    stack: contextlib.AsyncExitStack,
) -> StartedBroker:
    """Start the role. `spawn` runs what lasts as long as the daemon, `stack` closes the rest.

    `state` is the daemon's directory, `tcti` where its TPM is, `local` the Unix socket's server;
    `report` sets whether services are healthy.
    """
    opened = await stack.enter_async_context(
        opened_broker(config, node=node, state=state, metrics=metrics, tcti=tcti)
    )
    broker, instance = opened.service, opened.instance
    spawn("broker-heads", instance.keep_anchored(seconds=config.head_seconds))
    spawn("broker-store", end_with(broker.registry.store))
    spawn("broker-health", keep_health(broker.registry.store, partial(report, STORE_SERVICES)))
    spawn(
        "broker-audit",
        keep_audit(
            opened.log,
            partial(report, AUDIT_SERVICES),
            metrics=metrics,
            seconds=config.head_seconds,
        ),
    )
    replace_file(state / TRUST_ANCHOR_NAME, broker.authority.anchor_pem)
    identity = _own_identity(broker.authority, node=node, metrics=metrics)
    await enrolled.keep(identity)
    verifier = await open_verifier(config, broker, instance, stack, node=node, metrics=metrics)
    spawn("broker-policy", verifier.keeper.keep_refreshed())
    enrolled.is_development |= verifier.keeper.policy.software_allowed
    _serve_locally(local, broker, instance, verifier, state=state)
    addresses = await _serve(config, opened, verifier, identity, metrics=metrics, stack=stack)
    return StartedBroker(verifier=verifier, addresses=addresses)


def _own_identity(authority: CertificateAuthority, *, node: str, metrics: Metrics) -> Identity:
    """Return the broker's identity, which its own authority certifies."""

    async def issue(keys: Keys) -> Issued:
        subject = Subject(
            node=node,
            role="broker",
            tenant="",
            incarnation=keys.incarnation,
            kem_public_key=keys.kem_public,
        )
        return Issued(leaf=authority.issue(subject, keys.tls.public_key(), now=utc_now()))

    return Identity(
        node=node, role="broker", anchor=authority.certificate, obtain=issue, metrics=metrics
    )


def _serve_locally(
    local: grpc.aio.Server,
    broker: BrokerService,
    instance: Instance,
    verifier: VerifierParts,
    *,
    state: Path,
) -> None:
    """Add what the operator calls: LOCAL_SERVICES."""
    policy_pb2_grpc.add_PoliciesServicer_to_server(PoliciesServicer(verifier.keeper), local)
    policy_pb2_grpc.add_AuditLogServicer_to_server(
        AuditLogServicer(state / AUDIT_NAME, lambda: broker.audit.head), local
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(OperatorServicer(broker), local)
    books = DeviceBooks(broker.registry, cover=instance.cover, audit=broker.audit)
    devices_pb2_grpc.add_DeviceRegistryServicer_to_server(DeviceRegistryServicer(books), local)
    trust_pb2_grpc.add_MembershipServicer_to_server(MembershipServicer(verifier.membership), local)


async def _serve(
    config: BrokerConfig,
    opened: OpenedBroker,
    verifier: VerifierParts,
    identity: Identity,
    *,
    metrics: Metrics,
    stack: contextlib.AsyncExitStack,
) -> dict[str, str]:
    """Listen to nodes; returns the addresses, by what the listener is for."""
    broker, refused = opened.service, opened.audit.refused_call
    authority = broker.authority
    authorizer = Authorizer(
        authority.certificate,
        server=identity.spiffe_id,
        admit=verifier.membership.admit,
        metrics=metrics,
        refused=refused,
    )
    stack.callback(authorizer.call_keys.close)
    open_server = new_server(metrics, TlsOnly(refused=refused))
    attestation_pb2_grpc.add_AttestationServicer_to_server(
        AttestationServicer(verifier.service, anchor_pem=authority.anchor_pem), open_server
    )
    server = new_server(metrics, authorizer)
    trust_pb2_grpc.add_TrustServicer_to_server(
        TrustServicer(verifier.membership, authority, authorizer), server
    )
    broker_pb2_grpc.add_BrokerServicer_to_server(BrokerServicer(broker, authorizer), server)
    devices_pb2_grpc.add_DevicesServicer_to_server(
        DevicesServicer(verifier.devices, authorizer), server
    )
    addresses = {
        "attestation": bind_tcp(
            open_server,
            config.attestation_listen,
            identity.server_credentials(mutual=False),
            key="broker.attestation_listen",
        ),
        "broker": bind_tcp(
            server, config.listen, identity.server_credentials(mutual=True), key="broker.listen"
        ),
    }
    await stack.enter_async_context(running(server))
    await stack.enter_async_context(running(open_server))
    return addresses
