"""The sessions of a rank, to its neighbours and to single ranks, which end together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sealane.client.collectives.link import Inbox, Outbox
from sealane.client.grants import ABSENT, RING_REFUSED, listen_session, open_session
from sealane.client.messages import Reliability
from sealane.client.session import Session
from sealane.errors import Error, SessionError

if TYPE_CHECKING:
    from sealane.client.connection import Client

_LAST_SESSIONS_SECONDS: Final = 2.0
"""How long a failed group still opens sessions that its peers may wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Address of a rank's fabric."""

    node: str
    address: str
    """The fabric's control address, host:port."""
    tenant: str = ""
    """The node's tenant; empty: the tenant of the joining rank."""


Route = Callable[[str, Member], Awaitable[str]]
"""(display name of a session, its listener) → the relay that gets its data packets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Settings common to all sessions of a group."""

    rate_bits_per_second: int
    reliability: Reliability
    slot_bytes: int
    slots: int
    timeout_seconds: float
    route: Route | None
    secret: bytes
    """Known to the members only; empty: the certificates of the nodes suffice."""

    @property
    def region_bytes(self) -> int:
        """Size of the slots of both directions."""
        return 2 * self.slots * self.slot_bytes


class Pair:
    """Both directions of a session between two ranks."""

    def __init__(self, outbox: Outbox, inbox: Inbox) -> None:
        self.outbox = outbox
        self.inbox = inbox
        self.sending = asyncio.Lock()
        self.receiving = asyncio.Lock()


def _inbox(session: Session, terms: Terms) -> Inbox:
    return Inbox(session, slots=terms.slots, slot_bytes=terms.slot_bytes)


class GroupSessions:
    """All sessions of one rank; when an operation on one fails or times out, all end."""

    def __init__(
        self, client: "Client", name: str, rank: int, members: Sequence[Member], terms: Terms
    ) -> None:
        self.failure: SessionError | None = None
        """The reason of the end; None while the group lives."""
        self.neighbours: tuple[Outbox, Inbox] | None = None
        """To the next rank, from the previous one; None before `open`, and for a single rank."""
        self._client = client
        self._name = name
        self._rank = rank
        self._members = members
        self._terms = terms
        self._stack = contextlib.AsyncExitStack()
        self._sessions: list[Session] = []
        self._ring: tuple[asyncio.Future[Session], ...] = ()
        self._pairs: dict[int, asyncio.Future[Pair]] = {}

    async def open(self) -> None:
        """Connect to both neighbours."""
        terms, size = self._terms, len(self._members)
        after, before = (self._rank + 1) % size, (self._rank - 1) % size
        listening = asyncio.ensure_future(
            self._listen(f"{self._name}/{before}-{self._rank}", before)
        )
        opening = asyncio.ensure_future(self._open(f"{self._name}/{self._rank}-{after}", after))
        self._ring = listening, opening
        # Neither is cancelled if the other fails: see `close`.
        done, _ = await asyncio.wait(self._ring, return_when=asyncio.FIRST_EXCEPTION)
        try:
            for task in done:
                task.result()
        except Error as error:
            raise self._why_not_open(error) from error
        outbox, inbox = self._outbox(opening.result()), _inbox(listening.result(), terms)
        await inbox.open()
        self.neighbours = outbox, inbox

    async def pair(self, peer: int, seconds: float) -> Pair:
        """Return the session with one rank; at its first use the lower rank opens it."""
        async with self.guarded(seconds):
            return await asyncio.shield(self._connecting(peer))

    async def first_sender(self, seconds: float) -> int:
        """Return the lowest of the ranks of which an array has arrived and nobody receives yet.

        Connects to all ranks. One that never sends need not answer, and one that has left counts no
        more; SessionError `group.aborted` if all have.
        """
        others = {rank for rank in range(len(self._members)) if rank != self._rank}
        waiting: dict[asyncio.Task[bool | None], int] = {}
        async with self.guarded(seconds):
            try:
                while others:
                    for peer in others - set(waiting.values()):
                        waiting[asyncio.ensure_future(self._arrival(peer))] = peer
                    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=lambda task: waiting[task]):
                        peer, has_arrived = waiting.pop(task), task.result()
                        if has_arrived:
                            return peer
                        if has_arrived is None:
                            others.discard(peer)
            finally:
                for task in waiting:
                    task.cancel()
            raise SessionError("group.aborted", f"{self._name}: all other ranks have left")

    async def _arrival(self, peer: int) -> bool | None:
        """Wait until a rank's next array has arrived.

        False: it does not answer yet. None: it has left.
        """
        try:
            pair = await asyncio.shield(self._connecting(peer))
        except Error as error:
            if self.failure is not None or error.reason != ABSENT:
                raise
            return False
        async with pair.receiving:
            head = pair.inbox.head()
            try:
                if head is not None:
                    await head.wait()
            except SessionError:
                head = None
        return None if head is None else True

    def _connecting(self, peer: int) -> "asyncio.Future[Pair]":
        """Return the connection to a rank; try again after a failure."""
        known = self._pairs.get(peer)
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            known = asyncio.ensure_future(self._connect_pair(peer))
            # Whoever waits for it gets the exception; there may be nobody by then.
            known.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._pairs[peer] = known
        return known

    @contextlib.asynccontextmanager
    async def guarded(self, seconds: float) -> AsyncIterator[None]:
        """End the group if the block fails or times out."""
        if self.failure is not None:
            raise self.failure
        try:
            async with asyncio.timeout(seconds):
                yield
        except BaseException as error:
            reason = _reason(error, f"{self._name}: not within {seconds:g} s")
            failure = self._fail(reason)
            if isinstance(error, TimeoutError | Error | ExceptionGroup):
                raise failure from error
            raise

    def abort(self) -> None:
        """End all sessions at once, so that the neighbours' operations fail, too."""
        self._fail(SessionError("group.aborted", f"{self._name}: aborted here"))

    async def close(self) -> None:
        """Wait until the next rank has all data, then close all."""
        try:
            if self.failure is None:
                async with self.guarded(self._terms.timeout_seconds):
                    if self.neighbours is not None:
                        await self.neighbours[0].flush()
        finally:
            connecting: set[asyncio.Future[Any]] = {*self._ring, *self._pairs.values()}
            if self.failure is not None and connecting:
                # The peer may have its end of a session already. It learns of the group's end when
                # this end opens and closes (`_taken`), and learns nothing from a call given up.
                await asyncio.wait(connecting, timeout=_LAST_SESSIONS_SECONDS)
            for task in connecting:
                task.cancel()
            await asyncio.gather(*connecting, return_exceptions=True)
            await self._stack.aclose()

    def _fail(self, error: SessionError) -> SessionError:
        """End the group, unless it has ended; return the reason of its end."""
        if self.failure is None:
            self.failure = error
            for session in self._sessions:
                session.close()
        return self.failure

    async def _listen(self, display_name: str, peer: int) -> Session:
        terms, member = self._terms, self._members[peer]
        session = await self._stack.enter_async_context(
            listen_session(
                self._client.sessions,
                display_name,
                region_bytes=terms.region_bytes,
                peer_nodes=[member.node],
                peer_tenants=[member.tenant] if member.tenant else (),
                secret=terms.secret,
            )
        )
        return self._taken(session)

    async def _open(self, display_name: str, peer: int) -> Session:
        terms, member = self._terms, self._members[peer]
        via = () if terms.route is None else (await terms.route(display_name, member),)
        session = await self._stack.enter_async_context(
            open_session(
                self._client.sessions,
                display_name,
                region_bytes=terms.region_bytes,
                peer_node=member.node,
                peer_address=member.address,
                rate_bits_per_second=terms.rate_bits_per_second,
                via_addresses=via,
                wait_seconds=terms.timeout_seconds,
                peer_tenant=member.tenant,
                secret=terms.secret,
            )
        )
        return self._taken(session)

    def _why_not_open(self, error: Error) -> Error:
        """Return the reason: of a session that ended before its rings were fetched, a rank left."""
        has_ended = isinstance(error, SessionError) or error.reason == RING_REFUSED
        return _reason(error, self._name) if has_ended else error

    def _taken(self, session: Session) -> Session:
        """Add a session to the group; if the group has ended, close it, which tells the peer."""
        self._sessions.append(session)
        if self.failure is not None:
            session.close()
            raise self.failure
        return session

    def _outbox(self, session: Session) -> Outbox:
        terms = self._terms
        return Outbox(
            session,
            slots=terms.slots,
            slot_bytes=terms.slot_bytes,
            reliability=terms.reliability,
            lost=lambda error: self._fail(_reason(error, self._name)),
        )

    async def _connect_pair(self, peer: int) -> Pair:
        low, high = sorted((self._rank, peer))
        name = f"{self._name}/pair/{low}-{high}"
        is_opener = self._rank == low
        session = await (self._open(name, peer) if is_opener else self._listen(name, peer))
        pair = Pair(self._outbox(session), _inbox(session, self._terms))
        await pair.inbox.open()
        return pair


def _first(error: BaseException) -> BaseException:
    """Return the first failure in an exception group; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: BaseException, late: str) -> SessionError:
    """Return the group's error for an operation's failure."""
    error = _first(error)
    if isinstance(error, TimeoutError):
        return SessionError("group.timeout", late)
    if isinstance(error, SessionError) and error.reason.startswith("group."):
        return error
    return SessionError("group.aborted", f"a rank has left: {error!r}")
