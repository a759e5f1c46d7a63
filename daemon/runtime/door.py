"""Unix sockets that jobs can reach: each connection has a thread of its own.

Messages over a Unix socket may carry descriptors. The kernel closes those that the receiver doesn't
take, in the thread that receives or that closes a socket with unread messages. If one of them is
the last descriptor of a TCP socket that lingers (SO_LINGER), that thread is blocked for as long as
the socket's owner chose. So no thread that others depend on receives from a job or closes its
connection: the connection's own thread does both, and is interrupted if it takes longer than
`BLOCKED_SECONDS`.
"""

import asyncio
import contextlib
import os
import queue
import select
import signal
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from os import geteuid
from pathlib import Path
from typing import Final, TypeVar

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.peer_groups import peer_groups
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.refusal import refusal

CONNECTIONS_MAX: Final = 64
"""Default limit of connections of one socket; beyond it, an older connection is closed."""
BACKLOG: Final = 64
BLOCKED_SECONDS: Final = 0.5
"""A thread blocked for longer than this is interrupted, repeatedly until it continues."""
INTERRUPT_SECONDS: Final = 0.25
STOP_SECONDS: Final = 5.0
ACCEPT_PAUSE_SECONDS: Final = 0.1
PATH_BYTES_MAX: Final = 107
RELAY_BYTES: Final = 64 << 10
_INTERRUPT: Final = signal.SIGURG
"""Ignored by default, and not used for anything else here."""
_PEER_CREDENTIALS: Final = struct.Struct("iII")

Key = TypeVar("Key")


class Caller:
    """A connection of a process, used by its own thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.process, self.user, self.group = _PEER_CREDENTIALS.unpack(packed)
        """Process id, user id and group id of the peer at its connect(2)."""
        self.must_close = False
        """Set by `disconnect`."""
        self.was_interrupted = False
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._risky_since: float | None = None

    @property
    def groups(self) -> frozenset[int]:
        """Its group and its supplementary groups, as they were at its connect(2)."""
        return frozenset({self.group, *peer_groups(self.socket)})

    def receive(self, limit: int) -> bytes:
        """Return up to `limit` bytes that have arrived; empty at the end of the stream.

        Raises BlockingIOError if nothing has arrived, OSError if the connection is broken or being
        closed: receiving what the peer sent before could take long.
        """
        if self.must_close:
            raise ConnectionAbortedError
        with self._risky():
            return self.socket.recv(limit)

    def receive_exactly(self, count: int, *, timeout_seconds: float) -> bytes:
        """Wait for `count` bytes.

        Raises TimeoutError, and ConnectionResetError at the end of the stream.
        """
        deadline = time.monotonic() + timeout_seconds
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        received = b""
        while len(received) < count:
            poller.poll(max(0.0, 1000 * (deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                part = self.receive(count - len(received))
                if not part:
                    raise ConnectionResetError
                received += part
        return received

    def close(self) -> None:
        """Close the connection, including unread messages."""
        with self._risky():
            self.socket.close()

    def disconnect(self) -> None:
        """End the connection: its thread receives nothing more and closes it."""
        self.must_close = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def interrupt(self) -> bool:
        """Interrupt the thread if it is blocked; return whether it was."""
        # The thread can't end while the lock is held, so its identifier is still valid.
        with self._lock:
            since, thread = self._risky_since, self._thread
            if since is None or thread is None:
                return False
            if not self.must_close and time.monotonic() - since < BLOCKED_SECONDS:
                return False
            signal.pthread_kill(thread, _INTERRUPT)
            return True

    @contextlib.contextmanager
    def _risky(self) -> Iterator[None]:
        with self._lock:
            self._thread, self._risky_since = threading.get_ident(), time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._risky_since = None


Serve = Callable[[Caller], None]
Admit = Callable[[Caller], None]
"""Raises VerificationError for a caller that must not be served."""
NoteRefused = Callable[[Caller, VerificationError], None]
"""Called in the event loop for each caller that was not admitted."""


def own_user(caller: Caller) -> None:
    """Admit processes of the daemon's own user."""
    if caller.user != geteuid():
        raise VerificationError(
            "door.user.refused", f"served to user {geteuid()} only; you are {caller.user}"
        )


def own_user_and_root(caller: Caller) -> None:
    """Admit processes of the daemon's own user, and root's."""
    if caller.user != 0:
        own_user(caller)


@contextlib.asynccontextmanager
async def door(
    path: Path,
    serve: Serve,
    *,
    connections_max: int = CONNECTIONS_MAX,
    admit: Admit = own_user,
    note_refused: NoteRefused = lambda _caller, _error: None,
    mode: int = 0o600,
) -> AsyncIterator[None]:
    """Serve each connection at `path` by `serve`, in its own thread, until the block is left.

    `admit` raises VerificationError for callers that aren't served; they are told the reason.
    `mode` is the socket's. Must run in the main thread's event loop, as a signal handler can't be
    set elsewhere.

    Raises UsageError for a path that can't be a socket's, UnavailableError for one in use.
    """
    signal.signal(_INTERRUPT, lambda _signal, _frame: None)
    listener = listen(path, mode=mode)
    connections = _Connections(serve, connections_max, admit=admit, note_refused=note_refused)
    try:
        async with asyncio.TaskGroup() as tasks:
            working = (
                tasks.create_task(connections.accept(listener), name=f"accept {path.name}"),
                tasks.create_task(connections.interrupt_blocked(), name=f"interrupt {path.name}"),
            )
            try:
                yield
            finally:
                working[0].cancel()
                await connections.disconnect()
                working[1].cancel()
    finally:
        _end(path, listener)


def _end(path: Path, listener: socket.socket) -> None:
    path.unlink(missing_ok=True)
    # Connections not accepted yet are closed with it, and may hold descriptors, too.
    closing = threading.Thread(target=listener.close, name="close a listener", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # no more threads: the end of the process closes it without waiting
        listener.detach()


class _Connections:
    """The connections of one socket."""

    def __init__(
        self, serve: Serve, connections_max: int, *, admit: Admit, note_refused: NoteRefused
    ) -> None:
        self._serve = serve
        self._connections_max = connections_max
        self._admit = admit
        self._note_refused = note_refused
        self._loop = asyncio.get_running_loop()
        self._callers: list[Caller] = []
        self._one_ended = asyncio.Event()

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections, each in a thread of its own."""
        while True:
            await self._arrival(listener)
            # Start the thread first: a connection without one would have to be closed here.
            given: queue.SimpleQueue[Caller | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(given,), name="caller", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: one will end
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            try:
                connection, _ = listener.accept()
            except OSError:
                # Out of descriptors, or the job is gone: neither may end the daemon.
                given.put(None)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            caller = Caller(connection)
            self._callers.append(caller)
            given.put(caller)
            await self._make_room()
            # A process that connects repeatedly must not keep the loop from other work.
            await asyncio.sleep(0)

    async def _arrival(self, listener: socket.socket) -> None:
        arrived = asyncio.Event()
        self._loop.add_reader(listener, arrived.set)
        try:
            await arrived.wait()
        finally:
            self._loop.remove_reader(listener)

    async def interrupt_blocked(self) -> None:
        """Interrupt each thread that is blocked by a message or by closing."""
        while True:
            await asyncio.sleep(INTERRUPT_SECONDS)
            for caller in self._callers:
                if caller.interrupt() and not caller.was_interrupted:
                    caller.was_interrupted = True
                    get_logger().warning("caller_interrupted", process=caller.process)

    async def disconnect(self) -> None:
        """End all connections; return when they have ended, after `STOP_SECONDS` at the latest."""
        for caller in self._callers:
            caller.disconnect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while self._callers:
                    await self._end_of_one()

    async def _make_room(self) -> None:
        while len(self._callers) > self._connections_max:
            staying = {one: (one.user, one.process) for one in self._callers if not one.must_close}
            if len(staying) > self._connections_max:
                next_to_close(staying).disconnect()
            await self._end_of_one()

    async def _end_of_one(self) -> None:
        self._one_ended.clear()
        await self._one_ended.wait()

    def _run(self, given: queue.SimpleQueue[Caller | None]) -> None:
        caller = given.get()
        if caller is None:
            return
        # A job that disconnects, is silent or sends wrong data harms only itself.
        try:
            with contextlib.suppress(OSError, TimeoutError):
                if self._admits(caller):
                    self._serve(caller)
        finally:
            caller.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended, caller)

    def _admits(self, caller: Caller) -> bool:
        try:
            self._admit(caller)
        except VerificationError as error:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._note_refused, caller, error)
            caller.socket.send(refusal(error), socket.MSG_NOSIGNAL)
            return False
        return True

    def _ended(self, caller: Caller) -> None:
        self._callers.remove(caller)
        self._one_ended.set()


def next_to_close(open_ones: Mapping[Key, tuple[int, int]]) -> Key:
    """Choose the connection to close: the oldest of the busiest process of the busiest user.

    `open_ones` maps connections, oldest first, to user id and process id. So a user that holds many
    connections open, by however many processes, doesn't displace those of other users, nor a
    process those of other processes.
    """
    users = Counter(user for user, _ in open_ones.values())
    user = max(users, key=lambda each: users[each])
    processes = Counter(owner for owner in open_ones.values() if owner[0] == user)
    most = max(processes.values())
    return next(one for one, owner in open_ones.items() if processes[owner] == most)


def listen(path: Path, *, mode: int = 0o600) -> socket.socket:
    """Return a Unix socket with that mode, listening at `path`.

    Raises UsageError for a path that can't be a socket's, UnavailableError for one in use.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise UsageError(
            "listen.path",
            f"{path} has more than {PATH_BYTES_MAX} bytes: choose a shorter run directory",
        )
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise UnavailableError("listen.in_use", f"{path} is served by a running daemon")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError("listen.refused", f"{path} can't be served: {error.strerror}") from error
    return listener


def relay(caller: Caller, address: str, *, own_name: bytes | None = None) -> None:
    """Pass bytes between `caller` and the Unix socket at `address` until either closes.

    The server there sees `own_name` as the address of its peer. Raises OSError if no process
    listens there, or the name is in use.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        if own_name is not None:
            server.bind(own_name)
        server.connect(address)
        server.setblocking(False)
        inward, outward = bytearray(), bytearray()
        is_open = True
        while True:
            ready = _ready(
                (caller.socket, is_open and not inward, bool(outward)),
                (server, not outward, bool(inward)),
            )
            with contextlib.suppress(BlockingIOError):
                if is_open and not inward and caller.socket in ready:
                    inward += caller.receive(RELAY_BYTES)
                    is_open = bool(inward)
                    if not is_open:
                        server.shutdown(socket.SHUT_WR)
            with contextlib.suppress(BlockingIOError):
                if not outward and server in ready:
                    outward += server.recv(RELAY_BYTES)
                    if not outward:
                        return
            for sink, waiting in ((server, inward), (caller.socket, outward)):
                with contextlib.suppress(BlockingIOError):
                    if waiting:
                        del waiting[: sink.send(waiting, socket.MSG_NOSIGNAL)]


def _ready(*wanted: tuple[socket.socket, bool, bool]) -> set[socket.socket]:
    """Wait for any of these sockets, each for reading or writing or both; return those ready."""
    poller = select.poll()
    by_number = {}
    for one, reads, writes in wanted:
        # A socket registered for nothing would still report that its other end is closed.
        if events := (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0):
            poller.register(one, events)
            by_number[one.fileno()] = one
    return {by_number[number] for number, _ in poller.poll()}
