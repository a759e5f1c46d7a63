"""gRPC services of the fabric: `Sessions` for local jobs, `SessionPeer` for other fabrics."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import empty_pb2

from sealane.crypto.certificates import Subject
from sealane.daemon.fabric.establishment import Answer, CheckResult, Offer, Result
from sealane.daemon.fabric.grants import Grant
from sealane.daemon.fabric.responder import Peer
from sealane.daemon.fabric.service import FabricService, PeerLink, ReachPeer
from sealane.daemon.fabric.session import PathReport, Session, State
from sealane.daemon.fabric.settings import FabricSettings, JobLimits
from sealane.daemon.fabric.statistics import job_usage
from sealane.daemon.runtime.directories import RING_SOCKET_NAME
from sealane.errors import UsageError
from sealane.protocol.status import error_of
from sealane.protocol.v1 import sessions_pb2, sessions_pb2_grpc
from sealane.transport.establish import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChannel:
    """A channel to a fabric that is authenticated as that node's and may act."""

    channel: grpc.aio.Channel
    shown: Shown
    """Leaf and attestation result that this end shows."""
    subject: Subject
    """Subject of the peer's leaf."""
    check_result: CheckResult
    """Check of the peer's attestation result."""


ConnectPeer = Callable[[str, str], AbstractAsyncContextManager[PeerChannel]]
"""(address, node) → a channel to that fabric."""
IdentifyPeer = Callable[[Any], Peer]
"""Returns the sender of a call, by its verified certificate."""

ESTABLISH_TIMEOUT_SECONDS = 10.0
PAGE_SIZE_DEFAULT = 50
PAGE_SIZE_MAX = 1000

_STATES = {
    State.LISTENING: sessions_pb2.Session.LISTENING,
    State.ESTABLISHING: sessions_pb2.Session.ESTABLISHING,
    State.ESTABLISHED: sessions_pb2.Session.ESTABLISHED,
    State.DRAINING: sessions_pb2.Session.DRAINING,
    State.CLOSED: sessions_pb2.Session.CLOSED,
}


def reach_over(connect_peer: ConnectPeer) -> ReachPeer:
    """Return the service's way to reach a peer: one `Establish` call on a channel."""

    @contextlib.asynccontextmanager
    async def reach(address: str, node: str) -> AsyncIterator[PeerLink]:
        async with connect_peer(address, node) as connected:
            stub = sessions_pb2_grpc.SessionPeerStub(connected.channel)

            async def establish(offer: Offer) -> Answer:
                try:
                    response = await stub.Establish(
                        establish_request(offer), timeout=ESTABLISH_TIMEOUT_SECONDS
                    )
                except grpc.aio.AioRpcError as error:
                    raise error_of(error, peer=f"fabric {node} at {address}") from error
                return answer_of(response)

            yield PeerLink(
                subject=connected.subject,
                shown=connected.shown,
                check_result=connected.check_result,
                establish=establish,
            )

    return reach


def establish_request(offer: Offer) -> sessions_pb2.EstablishRequest:
    """Convert an offer for the wire."""
    return sessions_pb2.EstablishRequest(
        version=offer.version,
        display_name=offer.display_name,
        connection_id=offer.connection_id,
        public_key=offer.public_key,
        nonce=offer.nonce,
        unit_bytes=offer.units,
        rate_bits_per_second=offer.rate_bits_per_second,
        data_addresses=offer.data_addresses,
        sealed_share=offer.sealed_share,
        secret_proof=offer.secret_proof,
    )


def answer_of(response: sessions_pb2.EstablishResponse) -> Answer:
    """Convert an answer from the wire."""
    return Answer(
        connection_id=response.connection_id,
        public_key=response.public_key,
        nonce=response.nonce,
        units=tuple(response.unit_bytes),
        data_addresses=tuple(response.data_addresses),
        sealed_share=response.sealed_share,
        confirmation=response.confirmation,
        result=Result(token=response.attestation_result, verifier=response.verifier),
    )


UserOf = Callable[[Any], int | None]
"""Returns a call's user, by its connection, None for operators; VerificationError if that can't be
told."""


def of_all(_context: Any) -> int | None:
    """Return that a call is an operator's."""
    return None


def by_own_socket(_context: Any) -> bool:
    """Return that a call came by the daemon's own socket."""
    return True


class SessionsServicer(sessions_pb2_grpc.SessionsServicer):
    """Session calls; served on Unix sockets.

    A call touches nothing but what belongs to the user that `user_of` returns, and sees nothing but
    what belongs to that of `seen_by`. `ring_socket` is the path of the ring socket for callers by
    the daemon's own socket; for others it is the ring socket beside theirs, which a container may
    have elsewhere, so its path is relative.
    """

    def __init__(
        self,
        service: FabricService,
        *,
        ring_socket: str,
        user_of: UserOf = of_all,
        seen_by: UserOf = of_all,
        is_own_socket: Callable[[Any], bool] = by_own_socket,
    ) -> None:
        self._service = service
        self._ring_socket = ring_socket
        self._user_of = user_of
        self._seen_by = seen_by
        self._is_own_socket = is_own_socket

    def _ring(self, context: Any) -> str:
        return self._ring_socket if self._is_own_socket(context) else RING_SOCKET_NAME

    def _grant(self, grant: Grant, context: Any) -> sessions_pb2.SessionGrant:
        return sessions_pb2.SessionGrant(
            session=_session(grant.session),
            ring_socket=self._ring(context),
            ring_token=grant.ring_token,
        )

    async def ListenSession(
        self, request: sessions_pb2.ListenSessionRequest, context: Any
    ) -> sessions_pb2.SessionGrant:
        """Wait for a peer to open a session of this name."""
        return self._grant(
            await self._service.listen(
                uid=self._user_of(context),
                job_token=request.job_token,
                display_name=request.display_name,
                region_bytes=request.region_bytes,
                region_of=request.region_of,
                peer_tenants=tuple(request.peer_tenants),
                peer_nodes=tuple(request.peer_nodes),
                secret=request.secret,
                congestion=request.congestion,
                early=request.early,
            ),
            context,
        )

    async def OpenSession(
        self, request: sessions_pb2.OpenSessionRequest, context: Any
    ) -> sessions_pb2.SessionGrant:
        """Open a session to a peer that listens."""
        return self._grant(
            await self._service.open(
                uid=self._user_of(context),
                job_token=request.job_token,
                display_name=request.display_name,
                region_bytes=request.region_bytes,
                region_of=request.region_of,
                peer_node=request.peer_node,
                peer_address=request.peer_address,
                rate_bits_per_second=request.rate_bits_per_second,
                via_addresses=tuple(request.via_addresses),
                peer_tenant=request.peer_tenant,
                secret=request.secret,
                congestion=request.congestion,
                early=request.early,
            ),
            context,
        )

    async def GetSession(
        self, request: sessions_pb2.GetSessionRequest, context: Any
    ) -> sessions_pb2.Session:
        """Return one session with its statistics."""
        return _session(self._service.get(request.name, uid=self._seen_by(context)))

    async def ListSessions(
        self, request: sessions_pb2.ListSessionsRequest, context: Any
    ) -> sessions_pb2.ListSessionsResponse:
        """Return a page of sessions, ordered by name."""
        size = min(request.page_size or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)
        if size < 0:
            raise UsageError("page.size.range", f"page size {size}; allowed: 0 and up")
        found = self._service.sessions(uid=self._seen_by(context))
        sessions = sorted(found, key=lambda session: session.identity.name)
        rest = [session for session in sessions if session.identity.name > request.page_token]
        page = rest[:size]
        more = len(rest) > len(page)
        return sessions_pb2.ListSessionsResponse(
            sessions=[_session(session) for session in page],
            next_page_token=page[-1].identity.name if page and more else "",
        )

    async def WatchSession(
        self, request: sessions_pb2.WatchSessionRequest, context: Any
    ) -> AsyncIterator[sessions_pb2.Session]:
        """Stream the session in each of its states."""
        session = self._service.get(request.name, uid=self._seen_by(context))
        async for _ in session.states():
            # Who is no reader any longer may still be a job, which sees less.
            if self._seen_by(context) not in (None, session.job.user.uid):
                raise UsageError("session.name.not_found", f"there is no session {request.name!r}")
            yield _session(session)

    async def CloseSession(
        self, request: sessions_pb2.CloseSessionRequest, context: Any
    ) -> empty_pb2.Empty:
        """Close a session at this end; the peer's end is notified."""
        self._service.close(request.name, uid=self._user_of(context))
        return empty_pb2.Empty()

    async def GetFabric(
        self, request: sessions_pb2.GetFabricRequest, context: Any
    ) -> sessions_pb2.Fabric:
        """Return the fabric's limits, and what each job uses that the caller may see."""
        return self._fabric(self._seen_by(context), context)

    async def DrainFabric(
        self, request: sessions_pb2.DrainFabricRequest, context: Any
    ) -> sessions_pb2.Fabric:
        """Begin to drain; `GetFabric` shows the progress."""
        if not request.timeout_seconds >= 0:
            raise UsageError("fabric.drain.range", "a negative drain time; allowed: 0 s and up")
        self._service.begin_drain(request.timeout_seconds or None)
        # One turn of the loop, so that the answer includes the drain that was just begun.
        await asyncio.sleep(0)
        return self._fabric(None, context)

    def _fabric(self, uid: int | None, context: Any) -> sessions_pb2.Fabric:
        service, settings = self._service, self._service.settings
        progress = service.drain.progress
        drain = None
        if progress is not None:
            drain = sessions_pb2.Drain(
                seconds_left=progress.seconds_left, sessions_left=progress.sessions_left
            )
        sessions = service.sessions(uid=uid)
        of_user = settings.user_limits
        return sessions_pb2.Fabric(
            drain=drain,
            ring_socket=self._ring(context),
            rate_max_bits_per_second=settings.rate_max_bits_per_second,
            sessions=sum(session.state is not State.CLOSED for session in sessions),
            sessions_max=settings.sessions_max,
            limits=_limits(settings, settings.limits),
            user_limits=None if of_user is None else _limits(settings, of_user),
            jobs=[
                sessions_pb2.Job(name=job.name, pid=job.pid, uid=job.user.uid, usage=job_usage(job))
                for job in service.jobs.list()
                if uid in (None, job.user.uid)
            ],
        )


class SessionPeerServicer(sessions_pb2_grpc.SessionPeerServicer):
    """Establishment, for other fabrics over mutual TLS."""

    def __init__(self, service: FabricService, *, identify: IdentifyPeer) -> None:
        self._service = service
        self._identify = identify

    async def Establish(
        self, request: sessions_pb2.EstablishRequest, context: Any
    ) -> sessions_pb2.EstablishResponse:
        """Answer a peer's offer."""
        offer = Offer(
            version=request.version,
            display_name=request.display_name,
            connection_id=request.connection_id,
            public_key=request.public_key,
            nonce=request.nonce,
            units=tuple(request.unit_bytes),
            rate_bits_per_second=request.rate_bits_per_second,
            data_addresses=tuple(request.data_addresses),
            sealed_share=request.sealed_share,
            secret_proof=request.secret_proof,
        )
        answer = await self._service.answer(offer, peer=self._identify(context))
        return sessions_pb2.EstablishResponse(
            connection_id=answer.connection_id,
            public_key=answer.public_key,
            nonce=answer.nonce,
            unit_bytes=answer.units,
            data_addresses=answer.data_addresses,
            sealed_share=answer.sealed_share,
            confirmation=answer.confirmation,
            attestation_result=answer.result.token,
            verifier=answer.result.verifier,
        )


def _limits(settings: FabricSettings, limits: JobLimits) -> sessions_pb2.JobLimits:
    return sessions_pb2.JobLimits(
        sessions=limits.sessions,
        region_bytes=limits.region_bytes,
        receives=limits.receives,
        sends=limits.sends,
        rate_bits_per_second=settings.rate_of(limits),
    )


def _session(session: Session) -> sessions_pb2.Session:
    identity = session.identity
    return sessions_pb2.Session(
        name=identity.name,
        uid=session.job.user.uid,
        display_name=identity.display_name,
        state=_STATES[session.state],
        peer_node=identity.peer_node,
        side=identity.side,
        unit_bytes=identity.unit_bytes,
        rate_bits_per_second=identity.rate_bits_per_second,
        statistics=session.statistics(),
        close_reason=session.close_reason,
        data_addresses=session.data_addresses,
        outlook=_outlook(session),
        paths=[_path(path) for path in session.paths()],
        congestion=session.steering.congestion,
    )


def _path(path: PathReport) -> sessions_pb2.Path:
    return sessions_pb2.Path(
        state=sessions_pb2.Path.State.Value(path.state.upper()),
        wire=path.wire,
        local_address=path.local_address,
        peer_address=path.peer_address,
        statistics=path.statistics,
    )


def _outlook(session: Session) -> sessions_pb2.Outlook | None:
    if session.outlook is None:
        return None
    estimate = session.outlook.estimate
    return sessions_pb2.Outlook(
        loss_rate=estimate.loss.rate,
        loss_rate_low=estimate.rate_low,
        loss_rate_high=estimate.rate_high,
        burst_packets=estimate.loss.burst_packets,
        burst_packets_low=estimate.burst_low,
        burst_packets_high=estimate.burst_high,
        packets=estimate.packets,
        plan=[
            sessions_pb2.PlanRow(
                length_max=row.length_max,
                k=row.k,
                m=row.m,
                depth=row.depth,
                parity_gap_nanos=row.parity_gap_nanos,
            )
            for row in session.outlook.plan.rows
        ],
    )
