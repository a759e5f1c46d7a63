"""gRPC servers: options, binding, start and bounded stop."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import grpc

from sealane.daemon.runtime.authorizers import Authorizer, TlsOnly
from sealane.daemon.runtime.call_completion import CallCompletion
from sealane.daemon.runtime.call_keys import CallKeysServicer
from sealane.daemon.runtime.calls import CallInterceptor
from sealane.daemon.runtime.door import Admit, Caller, door, own_user_and_root, relay
from sealane.daemon.runtime.line_limit import LineLimit
from sealane.daemon.runtime.listeners import listen_tcp, split_address
from sealane.daemon.runtime.local_calls import LocalAuthorizer
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.traces import PASSED_ON, Traces
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import calls_pb2_grpc

DRAIN_SECONDS: Final = 5.0
CANCEL_SECONDS: Final = 1.0
"""For calls that are cancelled then."""
MESSAGE_BYTES_MAX: Final = 1 << 20
METADATA_BYTES_MAX: Final = 16 << 10
LOCAL_CONNECTIONS_MAX: Final = 256
"""Of the Unix socket: each process of a job keeps one while it lives, and each costs a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits for the callers of one TCP listener.

    gRPC buffers a message until it is complete, so messages that never end take up to the product
    of `connections`, `streams` and `message_bytes` of memory.
    """

    connections: int
    """Connections; further ones are closed at once."""
    streams: int
    """Concurrent calls on one connection; a gRPC client delays further ones."""
    message_bytes: int
    """Bytes of a request."""
    age_seconds: float
    """Age at which a connection is closed to new calls."""
    grace_seconds: float
    """Time for its calls to end; then it is closed, with any incomplete message."""
    idle_seconds: float
    """Time until a connection without a call is closed."""

    @property
    def half_sent_bytes_max(self) -> int:
        """The most memory, in bytes, that messages without an end can take."""
        return self.connections * self.streams * self.message_bytes


STRANGERS: Final = Quota(
    connections=256,
    streams=2,
    message_bytes=384 << 10,
    age_seconds=60,
    grace_seconds=10,
    idle_seconds=10,
)
"""For the attestation listener: 192 MiB. A node makes one call at a time, of up to 340 KiB."""
CERTIFIED: Final = Quota(
    connections=1024,
    # A gateway watches each of its namespaces at one target, up to 4,096.
    streams=4096 + 64,
    message_bytes=256 << 10,
    # A certificate is valid for ten minutes, and streams are rechecked while they last.
    age_seconds=600,
    grace_seconds=60,
    idle_seconds=600,
)
"""For listeners that demand a certificate. It limits one connection to 1 GiB of memory; the caller
was attested, is known by name, and can be revoked."""
JOB_STREAMS: Final = 128
"""Concurrent calls on one connection of a job: it may wait for many peers at once."""
JOB_MESSAGE_BYTES_MAX: Final = 32 << 10
HANDSHAKE_SECONDS: Final = 10.0
"""Time limit for the TLS handshake, and for the first frame of HTTP/2."""


_completions: Final[WeakKeyDictionary[grpc.aio.Server, CallCompletion]] = WeakKeyDictionary()
"""Of servers whose calls go through a `CallInterceptor`."""


def new_server(
    metrics: Metrics,
    authorizer: Authorizer | TlsOnly | LocalAuthorizer | None,
    traces: Traces = PASSED_ON,
) -> grpc.aio.Server:
    """Return a server with a `CallInterceptor`: one for TCP, or for operators' Unix socket.

    With an `Authorizer`, the server also gives its callers the keys that prove their calls.
    """
    quota = None
    if isinstance(authorizer, Authorizer | TlsOnly):
        quota = STRANGERS if isinstance(authorizer, TlsOnly) else CERTIFIED
    calls = CallInterceptor(metrics, authorizer, traces)
    server = grpc.aio.server(interceptors=[calls], options=server_options(quota))
    _completions[server] = calls.completion
    if isinstance(authorizer, Authorizer):
        calls_pb2_grpc.add_CallKeysServicer_to_server(
            CallKeysServicer(authorizer.call_keys, authorizer.caller), server
        )
    return server


def server_options(quota: Quota | None) -> list[tuple[str, int]]:
    """Return gRPC's options; local connections (None) have no maximal age, for long watches."""
    options = [
        # Otherwise, two daemons could bind the same port on Linux.
        ("grpc.so_reuseport", 0),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ]
    if quota is None:
        return [*options, ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
    return [
        *options,
        ("grpc.max_receive_message_length", quota.message_bytes),
        ("grpc.max_concurrent_streams", quota.streams),
        ("grpc.max_allowed_incoming_connections", quota.connections),
        ("grpc.max_connection_age_ms", _milliseconds(quota.age_seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(quota.grace_seconds)),
        ("grpc.max_connection_idle_ms", _milliseconds(quota.idle_seconds)),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS)),
        ("grpc.http2.settings_timeout", _milliseconds(HANDSHAKE_SECONDS)),
    ]


def new_shared_server(
    metrics: Metrics, authorizer: LocalAuthorizer, traces: Traces = PASSED_ON
) -> grpc.aio.Server:
    """Return a server for jobs and readers, who are other users than the daemon's.

    Messages without an end take at most `LOCAL_CONNECTIONS_MAX` × `JOB_STREAMS` ×
    `JOB_MESSAGE_BYTES_MAX` of memory, 1 GiB.
    """
    calls = CallInterceptor(metrics, authorizer, traces, LineLimit())
    server = grpc.aio.server(
        interceptors=[calls],
        options=[
            ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
            ("grpc.max_receive_message_length", JOB_MESSAGE_BYTES_MAX),
            ("grpc.max_concurrent_streams", JOB_STREAMS),
        ],
    )
    _completions[server] = calls.completion
    return server


def _milliseconds(seconds: float) -> int:
    return int(1000 * seconds)


def bind_tcp(
    server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials, *, key: str
) -> str:
    """Bind `listen` (address:port, port 0 for any) and return the actual address:port.

    UnavailableError `listen.refused`, which names the configuration key.
    """
    host = listen.rpartition(":")[0]
    try:
        port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise UnavailableError("listen.refused", f"{key} {listen}: {_why_not(listen)}") from error
    return f"{host}:{port}"


@contextlib.contextmanager
def inner_socket(server: grpc.aio.Server, path: Path) -> Iterator[str]:
    """Have `server`, not started yet, listen for relays; return the address for them.

    The socket has no name that another process could open. For the moment until it has lost its
    name, that is beside `path`, in a directory that is closed to others.

    Raises UsageError `listen.refused`.
    """
    # No longer than `path`: a socket's has 107 bytes at most.
    hidden = path.with_suffix(f".{secrets.token_hex(2)}")
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{hidden}")
    except RuntimeError as error:
        raise UsageError("listen.refused", f"{path}: can't create the socket") from error
    finally:
        os.umask(before)
    opened = os.open(hidden, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        hidden.unlink()
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


@contextlib.asynccontextmanager
async def local_door(
    server: grpc.aio.Server,
    path: Path,
    *,
    admit: Admit = own_user_and_root,
    relayed: Callable[[Caller, str], None] = relay,
) -> AsyncIterator[None]:
    """Have `server`, not started yet, answer at the Unix socket `path` until the block is left.

    `admit` says who may open it: by default this user and root. gRPC's own threads serve all
    callers, so they receive nothing from a job directly: what each connection sends passes through
    a thread of its own, in `relayed`.

    Raises UsageError or UnavailableError if `path` can't be served.
    """
    with inner_socket(server, path) as address:
        async with door(
            path,
            lambda caller: relayed(caller, address),
            connections_max=LOCAL_CONNECTIONS_MAX,
            admit=admit,
        ):
            yield


@contextlib.asynccontextmanager
async def running(server: grpc.aio.Server) -> AsyncIterator[None]:
    """Start `server`; at the end, let calls in flight finish within `DRAIN_SECONDS`."""
    await server.start()
    try:
        yield
    finally:
        # gRPC would wait without end for a caller that takes nothing of what it was sent.
        ends = time.monotonic() + DRAIN_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS + CANCEL_SECONDS):
                await server.stop(DRAIN_SECONDS)
        if (completion := _completions.get(server)) is not None:
            left = max(ends - time.monotonic(), 0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left + CANCEL_SECONDS):
                    await completion.close(drain_seconds=left)


def _why_not(listen: str) -> str:
    """Return why an address can't be bound, which gRPC doesn't say, by binding it ourselves."""
    try:
        listen_tcp(*split_address(listen)).close()
    except OSError as error:
        return error.strerror or str(error)
    return "can't listen"


@contextlib.contextmanager
def listening(key: str, listen: str) -> Iterator[None]:
    """Add the configuration key to the error of a data-path listener that can't be bound.

    UnavailableError `listen.refused`.
    """
    try:
        yield
    except UsageError as error:
        raise UnavailableError("listen.refused", f"{key} {listen}: {error.args[0]}") from error
