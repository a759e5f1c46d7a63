"""The Unix socket from which a job fetches the rings of a granted session (ring-abi.md).

The job connects, sends the 16-byte token of its grant and receives four descriptors by SCM_RIGHTS.
A token is single-use and short-lived; the peer must run as the daemon's user. Before that the job
has introduced itself with 16 zero bytes, and received the token that identifies its process in
calls.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, UsageError

TOKEN_BYTES = 16
INTRODUCTION = bytes(TOKEN_BYTES)
"""Sent instead of a token by a process that has none."""
INTRODUCED = b"\x02"
"""Followed by the job token."""
GRANTED = b"\x01"
"""Followed by nothing; sent with the descriptors: region, submission, completion, doorbell."""
REFUSED = b"\x00"

HELLO_TIMEOUT_SECONDS = 5.0
"""Time limit for a job that connects and sends nothing, because it occupies a descriptor."""
CONNECTIONS_MAX = 64
"""Connections that may wait for their answer; for a further one, an older one is closed."""
ACCEPT_PAUSE_SECONDS = 0.1
PATH_BYTES_MAX = 107
_PEER_CREDENTIALS = struct.Struct("iII")

Key = TypeVar("Key")
Claim = Callable[[bytes], tuple[int, int, int, int] | None]
Introduce = Callable[[socket.socket], bytes]


@contextlib.asynccontextmanager
async def serve(path: Path, claim: Claim, introduce: Introduce) -> AsyncIterator[None]:
    """Serve `path` for the duration of the block.

    `claim` redeems a token or returns None; `introduce` gives the process that made a connection
    its job token, or raises UnavailableError.

    Raises UsageError for a path that can't be a socket's, UnavailableError for one that is in use.
    """
    listener = _bind(path)
    try:
        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(_accept(listener, claim, introduce), name="ring socket")
            try:
                yield
            finally:
                accepting.cancel()
    finally:
        listener.close()
        _unlink(path)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise UsageError(
            "fabric.ring_socket.path",
            f"{path} has more than {PATH_BYTES_MAX} bytes: choose a shorter run directory",
        )
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise UnavailableError(
                    "fabric.ring_socket.in_use", f"{path} is served by a running daemon"
                )
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        previous = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        listener.listen(CONNECTIONS_MAX)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(
            "fabric.ring_socket.bind", f"can't listen at {path}: {error.strerror}"
        ) from error
    return listener


async def _accept(listener: socket.socket, claim: Claim, introduce: Introduce) -> None:
    loop = asyncio.get_running_loop()
    open_ones: dict[asyncio.Task[None], int] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                # Out of descriptors, or the job has already ended: neither may end the fabric.
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if len(open_ones) >= CONNECTIONS_MAX:
                given_up = first_to_go(open_ones)
                del open_ones[given_up]
                given_up.cancel()
            task = tasks.create_task(_answer(connection, claim, introduce), name="ring hand-over")
            open_ones[task] = _peer(connection)[0]
            task.add_done_callback(lambda task: open_ones.pop(task, None))
            # Yield, so that a process that connects in a loop doesn't starve other tasks.
            await asyncio.sleep(0)


def first_to_go(open_ones: Mapping[Key, int]) -> Key:
    """Choose the connection to close: the oldest one of the process that has most of them.

    `open_ones` are connections, oldest first, with the process id of each. So a job that keeps
    connections open displaces only its own; others are answered within a turn of the loop.
    """
    counts = Counter(open_ones.values())
    most = max(counts.values())
    return next(one for one, process in open_ones.items() if counts[process] == most)


async def _answer(connection: socket.socket, claim: Claim, introduce: Introduce) -> None:
    # A job that disconnects or stalls halfway harms only itself.
    with connection, contextlib.suppress(OSError, TimeoutError):
        connection.setblocking(False)
        if _peer(connection)[1] != os.geteuid():
            return
        async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
            token = await _read_token(connection)
        if token == INTRODUCTION:
            connection.send(_introduced(connection, introduce), socket.MSG_NOSIGNAL)
            return
        descriptors = claim(token)
        if descriptors is None:
            connection.send(REFUSED, socket.MSG_NOSIGNAL)
            return
        try:
            socket.send_fds(connection, [GRANTED], list(descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _introduced(connection: socket.socket, introduce: Introduce) -> bytes:
    try:
        return INTRODUCED + introduce(connection)
    except UnavailableError as error:
        get_logger().warning("job_refused", reason=error.reason, message=error.args[0])
        return REFUSED


async def _read_token(connection: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    token = b""
    while len(token) < TOKEN_BYTES:
        received = await loop.sock_recv(connection, TOKEN_BYTES - len(token))
        if not received:
            raise ConnectionResetError
        token += received
    return token


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the connection's peer."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    process, user, _ = _PEER_CREDENTIALS.unpack(packed)
    return process, user
