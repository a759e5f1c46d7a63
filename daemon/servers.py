"""gRPC servers: options, binding with one-line errors, start and bounded stop."""

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc

from sealane.daemon.call_keys import CallKeysServicer
from sealane.daemon.calls import Authorizer, CallInterceptor, TlsOnly
from sealane.daemon.metrics import Metrics
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import calls_pb2_grpc

DRAIN_SECONDS: Final = 5.0
MESSAGE_BYTES_MAX: Final = 1 << 20
METADATA_BYTES_MAX: Final = 16 << 10

# A certificate lives ten minutes and streams are checked when they start: none outlives it by much.
_CONNECTION_AGE_MS: Final = 10 * 60 * 1000
_CONNECTION_GRACE_MS: Final = 60 * 1000


def split_address(address: str) -> tuple[str, int]:
    """Split a configured address:port; the configuration has checked it."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return address:port as configurations write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def new_server(metrics: Metrics, authorizer: Authorizer | TlsOnly | None) -> grpc.aio.Server:
    """Return a server whose every call passes `CallInterceptor`; None is for the Unix socket.

    One with an `Authorizer` also gives its callers the keys to prove their calls with.
    """
    server = grpc.aio.server(
        interceptors=[CallInterceptor(metrics, authorizer)],
        options=server_options(is_local=authorizer is None),
    )
    if isinstance(authorizer, Authorizer):
        calls_pb2_grpc.add_CallKeysServicer_to_server(
            CallKeysServicer(authorizer.call_keys, authorizer.caller), server
        )
    return server


def server_options(*, is_local: bool) -> list[tuple[str, int]]:
    """Return gRPC's options. Local connections have no age: a watch may last for days."""
    options = [
        # Two daemons on one port would otherwise both "succeed" on Linux.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ]
    if not is_local:
        options += [
            ("grpc.max_connection_age_ms", _CONNECTION_AGE_MS),
            ("grpc.max_connection_age_grace_ms", _CONNECTION_GRACE_MS),
        ]
    return options


def bind_tcp(
    server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials, *, key: str
) -> str:
    """Bind `listen` (address:port, port 0 for any) and return the actual address:port.

    Raises UnavailableError `listen.refused` that names the configuration key.
    """
    host = listen.rpartition(":")[0]
    try:
        port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise UnavailableError("listen.refused", f"{key} {listen}: {_why_not(listen)}") from error
    return f"{host}:{port}"


def bind_unix(server: grpc.aio.Server, path: Path) -> None:
    """Bind a Unix socket that only this user may open; `path` must not exist."""
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise UsageError("listen.refused", f"{path}: can't make the socket") from error
    finally:
        os.umask(before)


@contextlib.asynccontextmanager
async def running(server: grpc.aio.Server) -> AsyncIterator[None]:
    """Start `server`; on the way out finish the calls in flight within `DRAIN_SECONDS`."""
    await server.start()
    try:
        yield
    finally:
        await server.stop(DRAIN_SECONDS)


def _why_not(listen: str) -> str:
    """Find out by a bind of our own what gRPC doesn't tell."""
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return "can't listen"
