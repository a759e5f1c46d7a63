"""The fabric role of a daemon: session services for local jobs and for peer fabrics."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sealane.crypto.roles import Role
from sealane.daemon.config import FabricConfig, UserLimitsConfig
from sealane.daemon.fabric import ring_socket
from sealane.daemon.fabric.buffers import warn_of_small_buffers
from sealane.daemon.fabric.node_drain import FabricDrain
from sealane.daemon.fabric.responder import Peer
from sealane.daemon.fabric.service import FabricService
from sealane.daemon.fabric.servicer import (
    PeerChannel,
    SessionPeerServicer,
    SessionsServicer,
    reach_over,
)
from sealane.daemon.fabric.settings import FabricSettings, JobLimits
from sealane.daemon.fabric.shown import own_result, own_shown, responder_shown
from sealane.daemon.fabric.steering import Steering
from sealane.daemon.node.authorizations import peer_of
from sealane.daemon.node.role_context import RoleContext
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.local_servers import ANY_USER, Shared
from sealane.daemon.runtime.metrics import by_owner
from sealane.daemon.runtime.servers import new_server
from sealane.protocol.v1 import sessions_pb2_grpc
from sealane.transport.establish import Shown


async def start_fabric(config: FabricConfig, context: RoleContext) -> None:
    """Start the role: the session service for jobs of this machine and for peers."""
    identity, trust = await context.enrolled.enrol(Role.FABRIC)

    @contextlib.asynccontextmanager
    async def connect_peer(address: str, node: str) -> AsyncIterator[PeerChannel]:
        async with identity.connection(address, node, Role.FABRIC) as connection:
            subject = identity.verified(connection.pins[0])
            await authorizations.require(peer_of(subject))
            yield PeerChannel(
                channel=connection.channel,
                shown=own_shown(connection.own),
                subject=subject,
                check_result=lambda result: responder_shown(
                    result, pins=connection.pins, anchors=identity.anchors, now=utc_now()
                ),
            )

    service = FabricService(
        FabricSettings(
            ring_socket=context.run_directory.ring_socket,
            rate_max_bits_per_second=config.rate_max_bits_per_second,
            region_bytes_max=config.region_bytes_max,
            sessions_max=config.sessions_max,
            limits=JobLimits(**config.limits.model_dump()),
            user_limits=_user_limits(config, context),
            listen_data=config.data_listen,
            paths=config.paths,
            idle_timeout_seconds=config.idle_timeout_seconds,
            reordering_micros=config.reordering_micros,
            path_threads=config.path_threads,
            wires=config.wires,
            verbs_mode=config.verbs_mode,
            pinned_bytes_max=config.pinned_bytes_max,
            steering=Steering(
                congestion=config.congestion,
                allowed=config.congestion_allowed,
                marking=config.marking,
                line_bits_per_second=config.line_bits_per_second or 0,
                near_rtt_micros=config.near_rtt_micros or 0,
                far_rtt_micros=config.far_rtt_micros or 0,
            ),
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
    # First, so that peers see that this fabric is barred, and not that they are refused.
    identity.on_barred.append(service.bar)
    authorizations = context.enrolled.authorize_peers(
        identity,
        trust.authorize,
        uses=service.peers,
        lost=service.end_peer,
        keep_seconds=config.trust_grace_seconds,
    )
    warn_of_small_buffers()
    await context.stack.enter_async_context(service.running())
    context.drained.append(FabricDrain(service))
    context.drains.append(lambda: service.drain.run(config.drain_timeout_seconds))
    statistics = service.statistics
    context.spawn("session-rate-cuts", statistics.log_rate_cuts())
    context.metrics.add_latencies("fabric")
    context.metrics.add_statistics("session", ("session",), lambda: by_owner(statistics.sessions()))
    context.metrics.add_statistics("session_path", ("session", "path"), statistics.paths)
    context.metrics.add_statistics("job", ("job",), lambda: by_owner(statistics.jobs()))
    context.addresses["ring_socket"] = str(context.run_directory.ring_socket)
    authorizer = context.authorizer(identity, authorizations.admit)

    def identify(context: Any) -> Peer:
        return Peer(
            subject=authorizer.caller(context),
            shown=Shown(
                certificate=authorizer.certificate_digest(context),
                token=authorizer.token_digest(context),
            ),
        )

    server = new_server(context.metrics, authorizer, context.traces)
    sessions_pb2_grpc.add_SessionPeerServicer_to_server(
        SessionPeerServicer(service, identify=identify), server
    )
    await context.serve(
        server,
        identity,
        config.control_listen,
        name="fabric_control",
        key="fabric.control_listen",
    )
    origins = context.local_servers.origins
    sessions_pb2_grpc.add_SessionsServicer_to_server(
        SessionsServicer(
            service,
            ring_socket=str(context.run_directory.ring_socket),
            user_of=origins.user_of,
            seen_by=origins.seen_by,
            is_own_socket=origins.is_own_socket,
        ),
        context.local,
    )
    context.services.append("sealane.v1.Sessions")
    if context.local_servers.shared is not None:
        await _share_rings(context.local_servers.shared, service, context)


def _user_limits(config: FabricConfig, context: RoleContext) -> JobLimits | None:
    """Return the limits of each user's jobs; None if no other user may call the daemon."""
    if not context.config.is_shared:
        return None
    limits = UserLimitsConfig() if config.jobs is None else config.jobs.limits
    return JobLimits(**limits.model_dump())


async def _share_rings(shared: Shared, service: FabricService, context: RoleContext) -> None:
    await context.stack.enter_async_context(
        ring_socket.serve(
            shared.directory.ring_socket,
            service.grants.claim,
            service.jobs.introduce,
            admit=shared.access.admit_job,
            note_refused=shared.refused.note,
            mode=ANY_USER,
        )
    )
    context.addresses["jobs_ring_socket"] = str(shared.directory.ring_socket)
