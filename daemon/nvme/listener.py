"""NVMe/TCP listener: serves handshakes, Connect and admin queues; passes I/O queues to the engine.

Before an I/O queue's socket is passed on, the response to its Connect is fully sent, and no byte
beyond the Connect command (or the host's authentication) is read.
"""

import asyncio
import itertools
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sealane.daemon.nvme.admin_session import AUTHENTICATION_SECONDS, AdminSession
from sealane.daemon.nvme.authenticating import (
    authenticate_queue,
    connect_result,
    make_authentication,
    respond,
)
from sealane.daemon.nvme.connecting import check_connect, find_association, handshake
from sealane.daemon.nvme.discovery import DiscoverySubsystem
from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Portal,
    Provider,
)
from sealane.daemon.runtime.listeners import Listen, listen_tcp
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.errors import (
    Error,
    ProtocolError,
    Reason,
    UnavailableError,
    UsageError,
    VerificationError,
    reason_of,
)
from sealane.protocol.nvme.admin import AdminController
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import (
    ADMIN_CAPSULE_BYTES,
    DISCOVERY_NQN,
    Status,
)
from sealane.reasons import ReasonId
from sealane.transport.nvme.stream import PduFaultError, PduStream
from sealane.transport.tasks import TaskOwner

HANDSHAKE_SECONDS = 5.0
ADMIT_SECONDS = 15.0
# Connections that this listener holds: queues not yet passed to the engine, and the admin queues of
# hosts without I/O queues. Whoever has an I/O queue was admitted, and is bounded by IO_QUEUES_MAX.
CONNECTIONS_MAX = 256
CONNECTIONS_PER_SOURCE_MAX = 128  # so that one address can't exclude all others
HANDSHAKES_MAX = 64  # connections without a Connect command yet
IO_QUEUES_MAX = 1024  # for all associations together; each is a thread of the engine
_ACCEPT_PAUSE_SECONDS = 0.1
DRAIN_LEFT_SECONDS = 30.0
QUEUE_REUSE_SECONDS = 8.0
"""How long a Connect waits for the old queue of its id: longer than a gateway drains a queue."""
_CONTROLLERS_MAX = 0xFFEF

Observer = Callable[[str], None]
"""Called with the reason id of each fault of a peer."""


class Listener:
    """Accepts hosts at one address, with bounds on connections, time and bytes.

    It also serves discovery. With `portals`, the addresses of the listeners that serve the
    provider's subsystems, it serves only discovery. `offers_digests` grants digests to hosts: set
    it only if the data paths of all subsystems support them. `listen` opens its socket.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        traddr: str,
        trsvcid: int,
        portals: Callable[[], Iterable[Portal]] | None = None,
        offers_digests: bool = False,
        listen: Listen = listen_tcp,
    ) -> None:
        self._providers = [provider]
        self._address = (traddr, trsvcid)
        self._open = listen
        self._serves_io = portals is None
        self._offers_digests = offers_digests
        self._discovery = DiscoverySubsystem(self._exported, portals or self._own_portals)
        self._socket: socket.socket | None = None
        self._accepts = True
        self._tasks = TaskOwner()
        self._associations: dict[int, Association] = {}
        self._sessions: dict[int, AdminSession] = {}
        self._association_ids = itertools.count(1)
        self._sources: Counter[str] = Counter()
        self._closing: set[Association] = set()
        self._handshakes = 0
        self._observers: list[Observer] = []

    @property
    def address(self) -> tuple[str, int]:
        """Address and port: the actual port if port 0 was requested."""
        if self._socket is None:
            return self._address
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def associations(self) -> Sequence[Association]:
        """The associations of connected hosts."""
        return list(self._associations.values())

    def add_provider(self, provider: Provider) -> None:
        """Serve another provider's subsystems, too; the first provider with a name wins."""
        self._providers.append(provider)

    def observe(self, observer: Observer) -> None:
        """Call `observer` for each fault of a peer."""
        self._observers.append(observer)

    def open(self) -> socket.socket:
        """Listen without accepting: hosts that connect wait until `start`.

        UsageError `listener.address` if the address can't be bound.
        """
        traddr, trsvcid = self._address
        try:
            listening = self._open(traddr, trsvcid)
        except OSError as error:
            raise UsageError(
                "listener.address",
                f"can't listen on {traddr}:{trsvcid}: {error.strerror}; choose a free address",
            ) from error
        self._socket = listening
        return listening

    async def start(self) -> None:
        """Accept hosts; errors of `open`, unless it was called before."""
        self._listen(self._socket or self.open())

    def end_accepting(self) -> None:
        """Let hosts that connect from now on wait: for the next process, if it gets the socket."""
        self._accepts = False
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)

    async def stop(self) -> None:
        """Close the address and all associations, and wait for their queues."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        await self._tasks.close()

    def changed(self) -> None:
        """Notify hosts of changed subsystems and logs; end associations of hosts now forbidden."""
        self._discovery.changed()
        for association in self.associations:
            exported = association.exported
            if not exported.allows(association.host_nqn):
                self.end_association(association.association_id, "connect.host")
                continue
            association.admin.update(exported.shown_to(association.host_nqn))
            if exported is self._discovery:
                association.admin.set_discovery_log(self._discovery.log_of(association))
            self.wake(association)

    def wake(self, association: Association) -> None:
        """Send the events that are due on an association."""
        if (session := self._sessions.get(association.controller_id)) is not None:
            session.wake()

    def queue_closed(self, event: StorageEvent) -> None:
        """Release an I/O queue that has stopped completely, and allow its id to connect again.

        However the queue ended, the association and its other queues continue, since hosts close
        one queue and open another. The association ends with its admin queue.
        """
        association = next(
            (a for a in self.associations if a.association_id == event.association), None
        )
        if event.reason:
            host = association.host_nqn if association is not None else "unknown"
            self._fault(host, event.reason, f"I/O queue {event.queue_id}: {event.detail}")
        if association is None:
            return
        # After a controller reset, the queue is no longer in the list.
        ended = association.queues.pop(event.queue_id, None)
        if ended is not None:
            association.exported.queue_closed(association.association_id, event.queue_id)
            ended.set()
        if not association.queues:
            self._count(association, counts=True)

    def end_association(self, association_id: int, reason: ReasonId = "association.fenced") -> None:
        """Close an association; its own task drains its queues. `reason` is for the log."""
        for association in self.associations:
            mine = association.association_id == association_id
            if mine and association.task is not None and not association.is_closed:
                association.end_reason = association.end_reason or reason
                association.task.cancel()

    async def end_export(self, exported: Exported) -> None:
        """Close every association of a subsystem and wait until its queues are drained."""
        ending: list[asyncio.Task[None]] = []
        for association in self.associations:
            if association.exported is exported and association.task is not None:
                association.end_reason = association.end_reason or "connect.subsystem"
                association.task.cancel()
                ending.append(association.task)
        if ending:
            await asyncio.wait(ending)
        self.changed()

    def _own_portals(self) -> Iterable[Portal]:
        return (Portal.of(*self.address),)

    def _exported(self) -> Iterable[Exported]:
        return itertools.chain.from_iterable(each.exported() for each in self._providers)

    def _find(self, subsystem_nqn: str) -> Exported | None:
        if subsystem_nqn == DISCOVERY_NQN:
            return self._discovery
        if not self._serves_io:
            return None
        found = (provider.find(subsystem_nqn) for provider in self._providers)
        return next((exported for exported in found if exported is not None), None)

    async def _awaited(self, subsystem_nqn: str) -> Exported | None:
        for provider in self._providers if self._serves_io else ():
            exported = await provider.awaited(subsystem_nqn)
            if exported is not None:
                return exported
        return None

    # Connections

    def _listen(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0 and self._accepts:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept without waiting, so that a cancellation can't lose a connection."""
        try:
            connection, peer = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors: pause, rather than being woken again at once.
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen, listening)
            return
        source = str(peer[0])
        limit = self._limit_reached(source)
        if limit is not None:
            connection.close()
            self._fault(source, limit, "connection refused: limit reached")
            return
        self._sources[source] += 1
        self._handshakes += 1
        task = self._tasks.start(self._serve(connection, source), name="nvme-connection")
        task.add_done_callback(lambda _: self._gone(connection, source))

    def _limit_reached(self, source: str) -> ReasonId | None:
        if self._sources.total() >= CONNECTIONS_MAX:
            return "connections.limit"
        if self._sources[source] >= CONNECTIONS_PER_SOURCE_MAX:
            return "connections.source.limit"
        return "handshakes.limit" if self._handshakes >= HANDSHAKES_MAX else None

    def _gone(self, connection: socket.socket, source: str) -> None:
        # Runs in a callback, not in the task, which may be cancelled before its first step.
        self._add(source, -1)
        connection.close()

    def _add(self, source: str, count: int) -> None:
        self._sources[source] += count
        if not self._sources[source]:
            del self._sources[source]

    def _count(self, association: Association, *, counts: bool) -> None:
        """Let an open admin connection count towards the limits, or not; at its end it must."""
        if association.is_counted != counts:
            association.is_counted = counts
            self._add(association.source, 1 if counts else -1)

    @staticmethod
    def _log_end(association: Association) -> None:
        """Log why an association ended; at level debug for discovery."""
        log = get_logger()
        say = log.debug if association.exported.subsystem.is_discovery else log.info
        reason: Reason = association.end_reason or "listener.stopped"
        if reason == "connection.lost" and association.admin.is_shut_down:
            reason = "controller.shut_down"
        say(
            "association_ended",
            reason=reason,
            host=association.host_nqn,
            subsystem=association.exported.subsystem.nqn,
            controller_id=association.controller_id,
        )

    def _fault(self, source: str, reason: str, detail: str) -> None:
        get_logger().warning("nvme_fault", source=source, reason=reason, message=detail)
        for observer in self._observers:
            observer(reason)

    async def _serve(self, connection: socket.socket, source: str) -> None:
        stream = PduStream(connection, data_max=ADMIN_CAPSULE_BYTES)
        try:
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    connect = await handshake(stream, offers_digests=self._offers_digests)
            finally:
                self._handshakes -= 1
            await self._connected(stream, connect, source)
        except ConnectRefusedError as error:
            self._fault(source, error.reason, str(error.args[0]))
        except TimeoutError:
            self._fault(source, "connection.timeout", "handshake or authentication took too long")
        except UnavailableError as error:
            if error.reason != "connection.lost":
                self._fault(source, error.reason, str(error.args[0]))
        except VerificationError as error:
            self._fault(source, error.reason, str(error.args[0]))
        except ProtocolError as error:
            self._fault(source, error.reason, str(error.args[0]))
            fault = error if isinstance(error, PduFaultError) else None
            await stream.farewell(from_host=False, fault=fault)

    async def _connected(self, stream: PduStream, connect: Connect, source: str) -> None:
        if not self._accepts:
            # A host that is told that its subsystem doesn't exist may give up.
            return
        exported = self._find(connect.subsystem_nqn)
        try:
            if exported is None:
                exported = await self._awaited(connect.subsystem_nqn)
            exported = check_connect(exported, connect)
            if connect.queue_id == 0:
                await self._drain_left(exported, connect)
                association, authentication = self._make_association(
                    stream, exported, connect, source
                )
        except ConnectRefusedError as error:
            await self._refuse(stream, connect, exported, error)
            raise
        if connect.queue_id == 0:
            await self._serve_admin(stream, connect, association, authentication)
        else:
            await self._serve_io(stream, connect, exported)

    # Admin queues

    def _make_association(
        self, stream: PduStream, exported: Exported, connect: Connect, source: str
    ) -> tuple[Association, bool]:
        controller_id = self._free_controller_id()
        machine = make_authentication(exported, connect)
        reached = stream.socket.getsockname()
        association = Association(
            association_id=next(self._association_ids),
            controller_id=controller_id,
            host_nqn=connect.host_nqn,
            host_id=connect.host_id,
            exported=exported,
            portal=Portal(traddr=str(reached[0]), trsvcid=int(reached[1])),
            source=source,
            admin=AdminController(
                exported.shown_to(connect.host_nqn),
                controller_id=controller_id,
                keep_alive_ms=connect.keep_alive_ms,
                host_id=connect.host_id.bytes,
                queue_size=connect.queue_size,
                flow_control=not connect.disable_flow_control,
                authentication=machine,
            ),
            task=asyncio.current_task(),
        )
        association.admin.set_resources(exported.resources(association))
        if exported is self._discovery:
            association.admin.set_discovery_log(self._discovery.log_of(association))
        return association, machine is not None

    def _free_controller_id(self) -> int:
        """Return a controller id at random: listeners that serve one subsystem don't coordinate.

        Hosts refuse a second controller of a subsystem with the same id. There are far more ids
        than CONNECTIONS_MAX and IO_QUEUES_MAX allow associations.
        """
        while True:
            controller_id = 1 + secrets.randbelow(_CONTROLLERS_MAX - 1)
            if controller_id not in self._associations:
                return controller_id

    async def _serve_admin(
        self,
        stream: PduStream,
        connect: Connect,
        association: Association,
        needs_authentication: bool,
    ) -> None:
        controller_id = association.controller_id
        session = AdminSession(stream, association, on_stopped=self._stop_queues)
        self._associations[controller_id] = association
        self._sessions[controller_id] = session
        try:
            await respond(
                stream,
                connect.command_id,
                result=connect_result(controller_id, authentication=needs_authentication),
            )
            await session.run()
        except Error as error:
            association.end_reason = association.end_reason or error.reason
            raise
        finally:
            association.is_closed = True
            self._count(association, counts=True)
            self._log_end(association)
            del self._associations[controller_id], self._sessions[controller_id]
            self._closing.add(association)
            try:
                await association.exported.association_closed(association.association_id)
            finally:
                self._closing.discard(association)
                association.drained.set()
                for queue in association.queues.values():
                    queue.set()

    async def _drain_left(self, exported: Exported, connect: Connect) -> None:
        """Wait until no command of the associations that this host has left can still run.

        A host that reconnects repeats unanswered commands, then sends new writes. Commands that lie
        unread in its old connections must not run after those. Associations that it hasn't left
        continue: a host may have several controllers.
        """
        left = [*self._closing]
        for controller_id, association in self._associations.items():
            if self._sessions[controller_id].is_left:
                left.append(association)
        left = [a for a in left if a.exported is exported and a.host_nqn == connect.host_nqn]
        try:
            async with asyncio.timeout(DRAIN_LEFT_SECONDS):
                for association in left:
                    self.end_association(association.association_id, "connection.lost")
                    await association.drained.wait()
        except TimeoutError:
            raise ConnectRefusedError(
                "connect.draining",
                f"the previous association of host {connect.host_nqn!r} isn't drained yet",
                status=Status.CONNECT_BUSY,
            ) from None

    async def _stop_queues(self, association: Association) -> None:
        """Stop the I/O queues of a controller that was reset or shut down."""
        association.resets += 1
        stopped = [*association.queues.values()]
        association.queues.clear()
        self._count(association, counts=True)
        await association.exported.association_closed(association.association_id)
        association.admin.set_io_queues(connected=False)
        for queue in stopped:
            queue.set()

    # I/O queues

    async def _serve_io(self, stream: PduStream, connect: Connect, exported: Exported) -> None:
        admission: Admission | None = None
        answered = False
        try:
            association = await self._association_of(exported, connect)
            self._check_room()
            # Reserved before the first await, so that no two Connects get the same id.
            ended = association.queues[connect.queue_id] = asyncio.Event()
            resets = association.resets
            machine = make_authentication(exported, connect)
            try:
                async with asyncio.timeout(ADMIT_SECONDS):
                    admission = await exported.admit(association, connect)
                self._check_current(association, resets)
                association.admin.set_io_queues(connected=True)
                answered = True
                result = connect_result(
                    association.controller_id, authentication=machine is not None
                )
                await respond(stream, connect.command_id, result=result)
                async with asyncio.timeout(AUTHENTICATION_SECONDS):
                    await authenticate_queue(stream, machine)
                self._check_current(association, resets)
                admission.start(stream.socket.fileno())
                admission = None
                self._count(association, counts=False)
            except BaseException:
                if association.queues.get(connect.queue_id) is ended:
                    del association.queues[connect.queue_id]
                ended.set()
                raise
        except (Error, TimeoutError) as error:
            refused = _as_refusal(error)
            if answered:
                exported.refused(refused, connect)  # already answered: just close
            else:
                await self._refuse(stream, connect, exported, refused)
            raise refused from error
        finally:
            if admission is not None:
                admission.close()

    async def _association_of(self, exported: Exported, connect: Connect) -> Association:
        """Return the association of a Connect, once its queue id is free.

        A host may close a queue and connect its id again before the end is noticed here. So wait
        until no command of the old queue can run; ConnectRefusedError after a time limit.
        """
        try:
            async with asyncio.timeout(QUEUE_REUSE_SECONDS):
                while True:
                    association = find_association(self._associations, exported, connect)
                    former = association.queues.get(connect.queue_id)
                    if former is None:
                        return association
                    await former.wait()
        except TimeoutError:
            raise ConnectRefusedError(
                "connect.queue.in_use",
                f"queue {connect.queue_id} of controller {connect.controller_id} is in use",
                status=Status.SEQUENCE_ERROR,
            ) from None

    def _check_room(self) -> None:
        if sum(len(each.queues) for each in self.associations) >= IO_QUEUES_MAX:
            raise ConnectRefusedError(
                "queues.limit",
                f"all {IO_QUEUES_MAX} I/O queues are in use",
                status=Status.CONNECT_BUSY,
            )

    def _check_current(self, association: Association, resets: int) -> None:
        known = self._associations.get(association.controller_id)
        if known is not association or association.resets != resets:
            raise UnavailableError("connection.lost", "the association ended meanwhile")

    async def _refuse(
        self,
        stream: PduStream,
        connect: Connect,
        exported: Exported | None,
        error: ConnectRefusedError,
    ) -> None:
        if exported is not None:
            exported.refused(error, connect)
        await respond(stream, connect.command_id, status=int(error.status), result=error.result)


def _as_refusal(error: Error | TimeoutError) -> ConnectRefusedError:
    if isinstance(error, ConnectRefusedError):
        return error
    reason = reason_of(error, otherwise="connect.timeout")
    detail = str(error.args[0]) if error.args else "preparing the queue took too long"
    return ConnectRefusedError(reason, detail, status=Status.CONNECT_BUSY)
