"""Logic of the fabric role: listeners, establishment on both sides, limits, grants, closing.

It knows no wire format: the servicer converts messages, `reach_peer` connects to the peer, the
native endpoint moves the data.
"""

import asyncio
import contextlib
import functools
import ipaddress
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sealane._native import Permit, SessionEndpoint, SharedRegion
from sealane.crypto.certificates import Subject
from sealane.crypto.kem import KemKey
from sealane.daemon.config import UNIT_BYTES
from sealane.daemon.fabric import ring_socket
from sealane.daemon.fabric.admission import Admission, admission
from sealane.daemon.fabric.drain import Drain
from sealane.daemon.fabric.establishment import (
    Answer,
    CheckResult,
    Initiation,
    Offer,
    Result,
    offer_newest,
)
from sealane.daemon.fabric.grants import Grant, Grants
from sealane.daemon.fabric.jobs import Job, Jobs
from sealane.daemon.fabric.key_making import made_in_thread
from sealane.daemon.fabric.known_paths import PathKey, PathWindow, PathWindows
from sealane.daemon.fabric.limits import Limits
from sealane.daemon.fabric.paths import (
    bind_addresses,
    carrying,
    check_addresses,
    of_wire,
    pair_ends,
    unit_room,
)
from sealane.daemon.fabric.responder import Peer, Responder
from sealane.daemon.fabric.session import OPEN, Identity, Session, Start, State
from sealane.daemon.fabric.session_plans import SessionPlans
from sealane.daemon.fabric.settings import FabricSettings
from sealane.daemon.fabric.statistics import Statistics
from sealane.daemon.fabric.steering import Steering
from sealane.daemon.fabric.units import UNIT_GRAIN_BYTES, candidates, route_mtu, unit_max
from sealane.daemon.node.authorizations import peer_of
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.reasons import ReasonId
from sealane.transport.establish import Shown, check_version
from sealane.transport.tasks import TaskOwner

CLOSED_SESSIONS_MAX = 64
"""Closed sessions that can still be queried."""
QUIET_REASONS: frozenset[ReasonId] = frozenset(
    {
        "session.closed.cancelled",
        "session.closed.draining",
        "session.closed.requested",
        "session.closed.shutdown",
        "session.job.gone",
        "session.peer_closed.draining",
        "session.peer_closed.requested",
    }
)
"""Close reasons that are not faults; others are logged as warnings."""
PATH_MTU: frozenset[ReasonId] = frozenset(
    {"session.closed.path_mtu", "session.peer_closed.path_mtu"}
)
"""Close reasons of a session whose path answers, but not to packets of full size."""
_PEER_ENDS: dict[str, ReasonId] = {
    "node.revoked": "session.peer.revoked",
    "authorization.stale": "session.trust.ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """An authenticated channel to a fabric that may act."""

    subject: Subject
    """Subject of the leaf at the other end."""
    shown: Shown
    """Leaf and attestation result that this end shows."""
    check_result: CheckResult
    """Check of the peer's attestation result."""
    establish: Callable[[Offer], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Destination and rate of a session."""

    node: str
    address: str
    rate_bits_per_second: int
    via_addresses: tuple[str, ...]
    admission: Admission
    steering: Steering
    early: bool


ReachPeer = Callable[[str, str], contextlib.AbstractAsyncContextManager[PeerLink]]
"""(address, node) → a link to the fabric of that node. Raises unless the fabric may act."""


class FabricService:
    """All sessions of one fabric. Use `running()`; outside of it nothing is served."""

    def __init__(
        self,
        settings: FabricSettings,
        *,
        own: Callable[[], Subject],
        own_result: Callable[[], tuple[bytes, Result]],
        kem: KemKey,
        reach_peer: ReachPeer,
        permit: Callable[[PeerIncarnation], Permit],
    ) -> None:
        """Serve sessions with a peer for as long as `permit` says that the peer may act."""
        self.settings = settings
        """The operator's limits."""
        self._own = own
        self._kem = kem
        self._reach_peer = reach_peer
        self._permit = permit
        self._sessions: dict[str, Session] = {}
        self._closed: deque[Session] = deque(maxlen=CLOSED_SESSIONS_MAX)
        self.grants = Grants(settings.ring_socket, timeout_seconds=settings.grant_timeout_seconds)
        self._planning = TaskOwner()
        self.plans = SessionPlans(settings)
        self._windows = PathWindows()
        self._draining = TaskOwner()
        self._unavailable = ""
        self._limits = Limits(settings=settings)
        self._responder = Responder(
            own=own,
            own_result=own_result,
            kem=kem,
            wires=settings.wires,
            listeners=self._listeners,
        )
        self.jobs = Jobs(settings, on_gone=self._job_gone)
        self.drain = Drain(self._sessions)
        self.statistics = Statistics(self._sessions, self.jobs)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the ring socket; close all sessions at the end of the block."""
        async with ring_socket.serve(
            self.settings.ring_socket, self.grants.claim, self.jobs.introduce
        ):
            try:
                yield
            finally:
                for session in list(self._sessions.values()):
                    session.close("session.closed.shutdown")
                self.grants.close()
                self.jobs.close()
                await self._draining.close()
                await self._planning.close()

    async def listen(
        self,
        *,
        job_token: bytes,
        display_name: str,
        region_bytes: int = 0,
        region_of: str = "",
        peer_tenants: tuple[str, ...] = (),
        peer_nodes: tuple[str, ...] = (),
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        uid: int | None = None,
    ) -> Grant:
        """Wait until a peer opens a session of this name; cancel to stop waiting.

        The job must be one of user `uid` (None: of any). `region_of`: a session of the job whose
        region this one shares, instead of one of `region_bytes`.

        The peer must be one of `peer_nodes` (empty: all) of `peer_tenants` (empty: this fabric's),
        and its job must know `secret`. Offers of others are refused, and the listener keeps
        waiting. `congestion`, `early`: see `open`.
        """
        self._limits.check_name(display_name)
        job = self.jobs.of(job_token, uid=uid)
        # Resolve it now: that session may end before a peer comes.
        region = self._limits.region(job, region_bytes=region_bytes, region_of=region_of)
        steering = self.settings.steering.chosen(congestion)
        with admission(
            own_tenant=self._own().tenant, tenants=peer_tenants, nodes=peer_nodes, secret=secret
        ) as admitted:
            return await self._listen(
                job_token, uid, display_name, region, admitted, steering=steering, early=early
            )

    async def _listen(
        self,
        job_token: bytes,
        uid: int | None,
        display_name: str,
        region: int | SharedRegion,
        admitted: Admission,
        *,
        steering: Steering,
        early: bool,
    ) -> Grant:
        while True:
            self.drain.check()
            job = self.jobs.of(job_token, uid=uid)
            # Listeners of other users may have the same name: no user sees or blocks theirs. A job
            # may have several, for as many peers.
            others = (other.job for other in self._listeners(display_name))
            if any(other is not job and other.user.uid == job.user.uid for other in others):
                raise UsageError(
                    "session.listener.exists",
                    f"a session {display_name!r} of another process is already waiting for a peer",
                )
            # If the unit size is not fixed, the offer decides.
            unit_bytes = self.settings.unit_bytes or UNIT_BYTES
            session = self._register(
                job,
                display_name,
                region,
                is_initiator=False,
                unit_bytes=unit_bytes,
                admitted=admitted,
                steering=steering,
            )
            try:
                await session.wait_begun()
            except asyncio.CancelledError:
                session.close("session.closed.cancelled")
                raise
            if session.state is State.CLOSED:
                self.drain.check()
                raise UnavailableError(
                    "session.listener.closed", f"{session.identity.name} was closed while waiting"
                )
            if early and session.has_unit:
                return self._grant(session)
            await self._settle(session)
            if session.state in OPEN:
                return self._grant(session)
            # The initiator gave up midway; the job still waits for a session.

    async def open(
        self,
        *,
        job_token: bytes,
        display_name: str,
        peer_node: str,
        peer_address: str,
        rate_bits_per_second: int,
        region_bytes: int = 0,
        region_of: str = "",
        via_addresses: tuple[str, ...] = (),
        peer_tenant: str = "",
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        uid: int | None = None,
    ) -> Grant:
        """Open a session to a peer's listener of that name; `peer_tenant` empty: this fabric's own.

        The job must be one of user `uid` (None: of any). `region_of`: as in `listen`. `secret`:
        what the listener's job must know. `congestion`: the controller of what this end sends;
        empty: the fabric's. `early`: return once the peers have keys, before a path has answered,
        unless the unit is still to be found; a path that does not answer in time ends the session
        then. Raises UsageError for values out of range, UnavailableError if a limit is reached, the
        peer has no listener (for this fabric) or the path is not validated in time,
        VerificationError if the exchange was tampered with, the peer is another tenant's or its job
        has another secret.
        """
        self.drain.check()
        job = self.jobs.of(job_token, uid=uid)
        self._limits.check_name(display_name)
        region = self._limits.region(job, region_bytes=region_bytes, region_of=region_of)
        self._limits.check_rate(rate_bits_per_second)
        self._limits.check_share(rate_bits_per_second)
        self._limits.check_peer_address(peer_address)
        steering = self.settings.steering.chosen(congestion)
        if via_addresses:
            check_addresses(via_addresses, "session.via_address.malformed", wires=("udp",))
        tenants = (peer_tenant,) if peer_tenant else ()
        with admission(
            own_tenant=self._own().tenant, tenants=tenants, nodes=(), secret=secret
        ) as admitted:
            target = _Target(
                node=peer_node,
                address=peer_address,
                rate_bits_per_second=rate_bits_per_second,
                via_addresses=via_addresses,
                admission=admitted,
                steering=steering,
                early=early,
            )
            return await self._open(job, display_name, region, target)

    async def _open(
        self, job: Job, display_name: str, region: int | SharedRegion, target: _Target
    ) -> Grant:
        units = self._units(target.via_addresses[0] if target.via_addresses else target.address)
        session = self._register(
            job,
            display_name,
            region,
            is_initiator=True,
            unit_bytes=units[0],
            admitted=target.admission,
            steering=target.steering,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(session.close, "session.establish.failed")
            await self._initiate(session, target, units)
            undo.pop_all()
        if target.early and session.has_unit:
            return self._grant(session)
        await self._settle(session)
        if session.close_reason in PATH_MTU:
            raise UnavailableError(
                "session.path_mtu",
                f"the path to {target.node} carries small packets only, none with units of "
                f"{units[-1]} bytes: choose a smaller fabric.unit_bytes",
            )
        if session.state not in OPEN:
            raise UnavailableError(
                "session.establish.timeout",
                f"the path to {target.node} was not validated within "
                f"{self.settings.establish_timeout_seconds:g} s ({session.close_reason})",
            )
        return self._grant(session)

    async def answer(self, offer: Offer, *, peer: Peer) -> Answer:
        """Answer a peer's offer for a waiting listener."""
        self.drain.check()
        check_version(offer.version)
        self._limits.check_rate(offer.rate_bits_per_second)
        check_addresses(offer.data_addresses, "session.establish.malformed")
        most = unit_max(offer.data_addresses[0], self._ip_version)
        units = self._limits.units_among(offer.units, most)
        session, answer, keys = await self._responder.respond(offer, units, peer)
        try:
            pairs = pair_ends(answer.data_addresses, offer.data_addresses)
            peer_addresses = tuple(peer for _, peer in pairs)
            start = Start(
                keys=keys,
                units=answer.units,
                peer_addresses=peer_addresses,
                version=offer.version,
                connection_id_local=answer.connection_id,
                connection_id_peer=offer.connection_id,
                idle_timeout_seconds=self.settings.idle_timeout_seconds,
                reordering_micros=self.settings.reordering_micros,
                path_threads=self.settings.path_threads,
                known_window=self._known_window(session, peer.subject, peer_addresses),
                is_initiator=False,
                permit=self._permit(peer_of(peer.subject)),
            )
            # Refused if the listener has ended meanwhile.
            session.begin(_agreed(session, peer.subject, offer), start)
        finally:
            session.is_answering = False
        return answer

    def begin_drain(self, timeout_seconds: float | None = None) -> None:
        """Start draining in the background, for at most the time that the settings allow."""
        most = self.settings.drain_timeout_seconds
        seconds = most if timeout_seconds is None else min(timeout_seconds, most)
        self._draining.start(self.drain.run(seconds), name="drain")

    def get(self, name: str, *, uid: int | None = None) -> Session:
        """Return a session of that user (None: of any) by name, or a recently closed one.

        UsageError `session.name.not_found`, also for those of other users.
        """
        for session in self.sessions(uid=uid):
            if session.identity.name == name:
                return session
        raise UsageError("session.name.not_found", f"there is no session {name!r}")

    def sessions(self, *, uid: int | None = None) -> list[Session]:
        """Return all sessions of that user (None: of all), recently closed ones first."""
        every = [*self._closed, *self._sessions.values()]
        return [session for session in every if uid in (None, session.job.user.uid)]

    def close(self, name: str, *, uid: int | None = None) -> None:
        """Close a session, as `get` finds it. Idempotent."""
        self.get(name, uid=uid).close("session.closed.requested")

    def peers(self) -> Iterable[PeerIncarnation]:
        """Return the peers that have sessions."""
        peers = (session.identity.peer for session in self._sessions.values())
        return {peer for peer in peers if peer is not None}

    async def end_peer(self, peer: PeerIncarnation, reason: str) -> None:
        """Close all sessions with a peer that may no longer act."""
        for session in [*self._sessions.values()]:
            if session.identity.peer == peer:
                session.close(_PEER_ENDS.get(reason, "session.peer.refused"))

    def bar(self, reason: str) -> None:  # noqa: ARG002 - the identity has logged it
        """Close all sessions: this fabric may no longer act."""
        for session in [*self._sessions.values()]:
            session.close("session.closed.barred")

    async def _initiate(self, session: Session, target: "_Target", units: tuple[int, ...]) -> None:
        """Exchange keys with the peer and start the worker."""
        offered = tuple(carrying(units[-1], session.data_addresses))
        if target.via_addresses:
            # Relays pass UDP on.
            offered = tuple(of_wire("udp", offered)[: len(target.via_addresses)])
        if not offered:
            raise UsageError(
                "session.establish.wires",
                f"none of {', '.join(session.data_addresses)} can carry units of {units[-1]} bytes "
                "this way: relays need udp in fabric.wires, and small MTUs a smaller "
                "fabric.unit_bytes",
            )
        units = self._units_over(offered, units)
        async with self._reach_peer(target.address, target.node) as link:
            if not target.admission.admits(link.subject):
                raise VerificationError(
                    "session.peer.tenant",
                    f"{target.node} is of tenant {link.subject.tenant!r}; a session to another "
                    "tenant's fabric must name that tenant",
                )
            initiate = functools.partial(
                Initiation,
                display_name=session.identity.display_name,
                own=self._own(),
                responder=link.subject,
                shown=link.shown,
                check_result=link.check_result,
                kem=self._kem,
                units=units,
                rate_bits_per_second=target.rate_bits_per_second,
                data_addresses=offered,
                secret=target.admission.secret,
            )
            initiation, answer = await offer_newest(initiate, link.establish)
        offer = initiation.offer
        check_addresses(answer.data_addresses, "session.establish.malformed")
        pairs = pair_ends(offer.data_addresses, answer.data_addresses)
        paths = len(pairs)
        if paths < len(answer.data_addresses):
            raise UsageError(
                "session.establish.malformed",
                f"the peer answered with {len(answer.data_addresses)} paths; offered: "
                f"{', '.join(offer.data_addresses)}",
            )
        room = unit_room(answer.data_addresses)
        if not (answer.units and set(answer.units) <= set(units) and max(answer.units) <= room):
            raise UsageError(
                "session.establish.malformed",
                f"the peer answered with units of {answer.units} bytes; offered: {units}",
            )
        peer_addresses = target.via_addresses[:paths] or tuple(peer for _, peer in pairs)
        start = Start(
            units=answer.units,
            keys=await made_in_thread(
                functools.partial(initiation.keys, answer),
                abandon=lambda keys: None if keys is None else keys.wipe(),
            ),
            peer_addresses=peer_addresses,
            version=offer.version,
            connection_id_local=offer.connection_id,
            connection_id_peer=answer.connection_id,
            idle_timeout_seconds=self.settings.idle_timeout_seconds,
            reordering_micros=self.settings.reordering_micros,
            path_threads=self.settings.path_threads,
            known_window=self._known_window(session, link.subject, peer_addresses),
            is_initiator=True,
            permit=self._permit(peer_of(link.subject)),
        )
        session.begin(_agreed(session, link.subject, offer), start)

    async def _settle(self, session: Session) -> None:
        try:
            async with asyncio.timeout(self.settings.establish_timeout_seconds):
                await session.wait_settled()
        except TimeoutError:
            session.close("session.establish.timeout")
        except asyncio.CancelledError:
            session.close("session.closed.cancelled")
            raise

    async def _accompany(self, session: Session) -> None:
        """Close a session unless a path answers in time; then keep its plan current."""
        if session.state not in OPEN:
            self.plans.begin(session)
        await self._settle(session)
        if session.state not in OPEN:
            return
        get_logger().info(
            "session_established",
            session=session.identity.name,
            display_name=session.identity.display_name,
            peer=session.identity.peer_node,
            side=session.identity.side,
            version=session.identity.version,
            rate_bits_per_second=session.identity.rate_bits_per_second,
        )
        await self.plans.keep(session)

    def _known_window(
        self, session: Session, peer: Subject, addresses: Sequence[str]
    ) -> PathWindow | None:
        path = PathKey.of(peer_of(peer).spiffe_id, addresses)
        return self._windows.take(path, session.steering.controller)

    def _listeners(self, display_name: str) -> list[Session]:
        return [
            session
            for session in self._sessions.values()
            if session.state is State.LISTENING
            and not session.identity.is_initiator
            and session.identity.display_name == display_name
        ]

    @property
    def _ip_version(self) -> int:
        """Return the IP version of the data packets; if both, the one with larger headers."""
        return max(ipaddress.ip_address(each).version for each in self.settings.listen_data)

    def _units(self, address: str) -> tuple[int, ...]:
        """Return unit sizes to try towards `address`, in bytes, descending."""
        if self.settings.unit_bytes is not None:
            return (self.settings.unit_bytes,)
        return tuple(candidates(self._ip_version, route_mtu(address)))

    def _units_over(self, addresses: Sequence[str], units: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes that the queue pairs among these addresses take, and their largest."""
        room = unit_room(addresses)
        fitting = {unit for unit in units if unit <= room}
        if self.settings.unit_bytes is None and of_wire("verbs", addresses):
            # Also where the route to the peer's control address is narrower.
            fitting.add(room // UNIT_GRAIN_BYTES * UNIT_GRAIN_BYTES)
        return tuple(sorted(fitting, reverse=True))

    def _note_unavailable(self, reason: str) -> None:
        """Log why a session lacks queue pairs, unless that was the reason last time."""
        if reason != self._unavailable:
            self._unavailable = reason
            get_logger().warning("verbs_unavailable", reason=reason)

    def _register(
        self,
        job: Job,
        display_name: str,
        region: int | SharedRegion,
        *,
        is_initiator: bool,
        unit_bytes: int,
        admitted: Admission,
        steering: Steering,
    ) -> Session:
        self._limits.check_count(len(self._sessions))
        self._limits.check_job(job, region=region)
        settings = self.settings
        pinned = sum(session.pinned_bytes for session in self._sessions.values())
        try:
            memory = region if isinstance(region, SharedRegion) else SharedRegion(region)
            endpoint = SessionEndpoint(
                bind_addresses(
                    settings.listen_data, settings.paths, settings.wires, settings.verbs_mode
                ),
                memory,
                settings.ring_entries,
                unit_bytes=unit_bytes,
                chunk_units=settings.chunk_units,
                slots=settings.slots,
                account=job.account,
                pinned_bytes_max=max(settings.pinned_bytes_max - pinned, 0),
            )
        except OSError as error:
            raise UnavailableError(
                "session.endpoint.resources",
                f"no socket, queue pair or shared memory for a session: {error.strerror or error}",
            ) from error
        if endpoint.unavailable:
            self._note_unavailable("; ".join(endpoint.unavailable))
        identity = Identity(
            name=f"sessions/{secrets.token_hex(8)}",
            display_name=display_name,
            is_initiator=is_initiator,
            unit_bytes=unit_bytes,
        )
        session = Session(
            identity,
            endpoint,
            job=job,
            admission=admitted,
            steering=steering,
            on_closed=self._retire,
        )
        self._sessions[identity.name] = session
        job.regions[identity.name] = memory
        if isinstance(region, int):
            job.created[identity.name] = memory
        return session

    def _retire(self, session: Session) -> None:
        del self._sessions[session.identity.name]
        del session.job.regions[session.identity.name]
        self._closed.append(session)
        controller = session.steering.controller
        self._windows.note(session.path_key(), controller, session.statistics())
        reason = session.close_reason
        # Closed by the job, the peer or the operator: expected. Other reasons deserve attention.
        is_quiet = reason in QUIET_REASONS
        log = get_logger().info if is_quiet else get_logger().warning
        log(
            "session_closed",
            session=session.identity.name,
            display_name=session.identity.display_name,
            peer=session.identity.peer_node,
            reason=reason,
            statistics=session.statistics(),
        )

    def _job_gone(self, job: Job) -> None:
        """Release all that an ended job had, whichever processes still hold its descriptors."""
        for session in [*self._sessions.values()]:
            if session.job is job:
                session.close("session.job.gone")

    def _grant(self, session: Session) -> Grant:
        session.is_granted = True
        self._planning.start(self._accompany(session), name=f"plan of {session.identity.name}")
        return self.grants.add(session)


def _agreed(session: Session, peer: Subject, offer: Offer) -> Identity:
    return replace(
        session.identity,
        peer_node=peer.node,
        peer=peer_of(peer),
        rate_bits_per_second=offer.rate_bits_per_second,
        version=offer.version,
    )
