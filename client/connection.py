"""Connection to the daemon on this machine, over its Unix socket (asyncio).

    async with sealane.client.connect() as client:
        volume = await client.volumes.create(size_bytes=1 << 30, display_name="checkpoints")
        volume = await client.volumes.attach(volume.name, host_nqn=my_nqn)

Every failure is a `sealane.errors.Error` with the daemon's reason id.
"""

import asyncio
import contextlib
import datetime as dt
import os
import socket as _socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from sealane.client.calls import CALL_SECONDS, translated
from sealane.client.disk import Disk
from sealane.client.facade import any_thread
from sealane.client.grants import listen_session, listen_sessions, open_session
from sealane.client.listener import Listener
from sealane.client.session import Session
from sealane.client.trace_context import interceptors
from sealane.client.volume import Volume, front_end_of, standby_ends
from sealane.client.volumes import Volumes
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.refusal import LINE_BYTES_MAX, refusal_of
from sealane.protocol.v1 import (
    devices_pb2_grpc,
    nodes_pb2,
    nodes_pb2_grpc,
    offload_pb2_grpc,
    operator_pb2_grpc,
    policy_pb2_grpc,
    sessions_pb2_grpc,
    subsystems_pb2_grpc,
    trust_pb2_grpc,
)

DEFAULT_SOCKET: Final = "/run/sealane/sealaned.sock"
"""Of the daemon, for operators and for jobs of its own user."""
JOBS_SOCKET: Final = "/run/sealane-jobs/jobs.sock"
"""Of any daemon, for other users: operators, jobs and readers."""
SOCKET_VARIABLE: Final = "SEALANE_SOCKET"
"""Environment variable with the path of the socket."""
_CONNECT_SECONDS: Final = 5.0
_DRAINS: Final[Mapping[int, str]] = {
    nodes_pb2.NodeDrain.SERVING: "serving",
    nodes_pb2.NodeDrain.DRAINING: "draining",
    nodes_pb2.NodeDrain.OVERDUE: "overdue",
    nodes_pb2.NodeDrain.DRAINED: "drained",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceStatus:
    """Space of the file system that holds one of a daemon's directories, in bytes.

    `place` is "state" or "volumes"; `state` is "good", "low" or "full".
    """

    place: str
    directory: str
    capacity_bytes: int
    free_bytes: int
    reserve_bytes: int
    promised_bytes: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """A target of a gateway, as it was a few seconds ago.

    `state` is "good", "draining", "unhealthy" (it doesn't serve all its volumes), "away" or
    "unknown"; `reason` and `detail` say why it is away. `free_bytes` is its room for new volumes,
    None: it doesn't say.
    """

    node: str
    address: str
    state: str
    reason: str
    detail: str
    free_bytes: int | None
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """Identity, roles and state of a daemon."""

    node: str
    version: str
    roles: tuple[str, ...]
    evidence_driver: str
    is_development: bool
    certificate_expires: dt.datetime | None
    addresses: Mapping[str, str]
    started: dt.datetime
    drain: str = ""
    """Drain of the daemon: "serving", "draining", "overdue" or "drained"; "" if it isn't told."""
    spaces: tuple[SpaceStatus, ...] = ()
    targets: tuple[TargetStatus, ...] = ()
    """Of a gateway: the targets of its configuration."""


class Client:
    """An open connection.

    The asynchronous client also has gRPC stubs: `nodes` (the daemon), `sessions` of a fabric,
    `subsystems` of a target, `offload` of a gateway (its accelerator cards), and of a broker
    `operator` (keys and leases), `devices`, `membership` (nodes), `policies` and `audit_log`.
    """

    volumes: Volumes
    """Calls about volumes."""

    def __init__(self, channel: grpc.aio.Channel, *, directory: str = "") -> None:
        """Use a channel to a socket in `directory`, where relative paths of rings begin."""
        self._directory = directory
        self.volumes = Volumes(channel)
        self.sessions = sessions_pb2_grpc.SessionsStub(channel)
        self.subsystems = subsystems_pb2_grpc.SubsystemsStub(channel)
        self.offload = offload_pb2_grpc.OffloadStub(channel)
        self.operator = operator_pb2_grpc.OperatorStub(channel)
        self.devices = devices_pb2_grpc.DeviceRegistryStub(channel)
        self.policies = policy_pb2_grpc.PoliciesStub(channel)
        self.audit_log = policy_pb2_grpc.AuditLogStub(channel)
        self.membership = trust_pb2_grpc.MembershipStub(channel)
        self.nodes = nodes_pb2_grpc.NodesStub(channel)

    @any_thread
    def open(
        self,
        volume: Volume,
        *,
        queue_count: int = 2,
        timeout_seconds: float = 60.0,
        hold_seconds: float = 60.0,
        standbys: Sequence[Volume] = (),
    ) -> Disk:
        """Read and write a volume that `attach` returned: `async with client.open(volume) as disk`.

        `timeout_seconds` bounds one command. `hold_seconds` is how long a failing call is retried
        while the gateway, or the target behind it, is unavailable. `standbys`: what `attach` with
        `fail_over` returned at other gateways, over which the disk goes on when this one is lost.
        UsageError `disk.paths` unless all are attached so, for the same host.
        """
        return Disk(
            front_end_of(volume),
            queue_count=queue_count,
            timeout_seconds=timeout_seconds,
            hold_seconds=hold_seconds,
            standbys=standby_ends(volume, standbys),
        )

    def open_session(
        self,
        display_name: str,
        *,
        region_bytes: int = 0,
        peer_node: str,
        peer_address: str,
        rate_bits_per_second: int,
        via_addresses: Sequence[str] = (),
        wait_seconds: float = 0.0,
        peer_tenant: str = "",
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        region_of: Session | None = None,
    ) -> contextlib.AbstractAsyncContextManager[Session]:
        """Open a session to a listener at another fabric, as `sealane.client.open_session`."""
        return open_session(
            self.sessions,
            display_name,
            directory=self._directory,
            region_bytes=region_bytes,
            peer_node=peer_node,
            peer_address=peer_address,
            rate_bits_per_second=rate_bits_per_second,
            via_addresses=via_addresses,
            wait_seconds=wait_seconds,
            peer_tenant=peer_tenant,
            secret=secret,
            congestion=congestion,
            early=early,
            region_of=region_of,
        )

    def listen_session(
        self,
        display_name: str,
        *,
        region_bytes: int = 0,
        peer_nodes: Sequence[str] = (),
        peer_tenants: Sequence[str] = (),
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        region_of: Session | None = None,
    ) -> contextlib.AbstractAsyncContextManager[Session]:
        """Wait for a session of that name, as `sealane.client.listen_session`."""
        return listen_session(
            self.sessions,
            display_name,
            directory=self._directory,
            region_bytes=region_bytes,
            peer_nodes=peer_nodes,
            peer_tenants=peer_tenants,
            secret=secret,
            congestion=congestion,
            early=early,
            region_of=region_of,
        )

    def listen_sessions(
        self,
        display_name: str,
        *,
        region_bytes: int = 0,
        backlog: int = 2,
        peer_nodes: Sequence[str] = (),
        peer_tenants: Sequence[str] = (),
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        region_of: Session | None = None,
    ) -> contextlib.AbstractAsyncContextManager[Listener]:
        """Accept sessions of that name from many peers, as `sealane.client.listen_sessions`."""
        return listen_sessions(
            self.sessions,
            display_name,
            directory=self._directory,
            region_bytes=region_bytes,
            backlog=backlog,
            peer_nodes=peer_nodes,
            peer_tenants=peer_tenants,
            secret=secret,
            congestion=congestion,
            early=early,
            region_of=region_of,
        )

    async def node(self) -> nodes_pb2.Node:
        """Return the daemon's identity and state as a message, with what its roles publish."""
        with translated():
            return await self.nodes.GetNode(nodes_pb2.GetNodeRequest(), timeout=CALL_SECONDS)

    async def status(self) -> NodeStatus:
        """Return the daemon's identity, roles and state."""
        node = await self.node()
        expires = None
        if node.HasField("certificate_expire_time"):
            expires = node.certificate_expire_time.ToDatetime(tzinfo=dt.UTC)
        return NodeStatus(
            node=node.node,
            version=node.version,
            roles=tuple(node.roles),
            evidence_driver=node.evidence_driver,
            is_development=node.development,
            certificate_expires=expires,
            addresses=dict(node.addresses),
            started=node.start_time.ToDatetime(tzinfo=dt.UTC),
            drain=_DRAINS.get(node.drain.state, ""),
            spaces=tuple(
                SpaceStatus(
                    place=space.place,
                    directory=space.directory,
                    capacity_bytes=space.capacity_bytes,
                    free_bytes=space.free_bytes,
                    reserve_bytes=space.reserve_bytes,
                    promised_bytes=space.promised_bytes,
                    state=space.state,
                )
                for space in node.spaces
            ),
            targets=tuple(
                TargetStatus(
                    node=target.node,
                    address=target.address,
                    state=target.state,
                    reason=target.reason,
                    detail=target.detail,
                    free_bytes=target.free_bytes if target.HasField("free_bytes") else None,
                    capacity_bytes=target.capacity_bytes,
                )
                for target in node.targets
            ),
        )


def default_socket() -> str:
    """Return the socket that `connect` uses if it isn't told one.

    That of the environment variable SEALANE_SOCKET; else the one for other users, if the daemon's
    own is closed to this process's effective user; else the daemon's own, also if it doesn't exist.
    """
    told = os.environ.get(SOCKET_VARIABLE)
    if told:
        return told
    if _is_closed(DEFAULT_SOCKET) and os.path.exists(JOBS_SOCKET):  # noqa: PTH110
        return JOBS_SOCKET
    return DEFAULT_SOCKET


def _is_closed(path: str) -> bool:
    """Return whether this process may not open `path`, or not look for it."""
    try:
        os.stat(path)  # noqa: PTH116
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.W_OK, effective_ids=True)


@contextlib.asynccontextmanager
async def connect(
    socket: str | os.PathLike[str] | None = None, *, traceparent: str = ""
) -> AsyncIterator[Client]:
    """Connect to the daemon at `socket`, by default at `default_socket()`.

    Calls belong to OpenTelemetry's current span, if there is one, else to the trace `traceparent`
    (W3C Trace Context), if given. In a process that uses OpenTelemetry each call is a span, too.

    UnavailableError `daemon.unreachable` if there is none, VerificationError if it doesn't serve
    this process's user: `daemon.refused` or `door.user.…`.
    """
    path = os.fspath(default_socket() if socket is None else socket)
    await _probe(path)
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(
        f"unix:{path}", options=options, interceptors=interceptors(traceparent)
    ) as channel:
        yield Client(channel, directory=os.path.dirname(path))  # noqa: PTH120


async def _probe(path: str) -> None:
    """Raise if no daemon listens at `path`, or it refuses this process's user.

    The daemon sends first: gRPC's settings, or a refusal. A daemon that is too busy to send
    anything may still answer calls, which have time limits of their own.
    """
    loop = asyncio.get_running_loop()
    with contextlib.closing(_socket.socket(_socket.AF_UNIX)) as connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.sock_connect(connection, path)
        except PermissionError as error:
            raise VerificationError(
                "daemon.refused",
                f"{path}: user {os.geteuid()} may not open it; other users use the socket that "
                f"[access] sets up, {JOBS_SOCKET} by default",
            ) from error
        except OSError as error:
            why = "time-out" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise UnavailableError(
                "daemon.unreachable", f"{path}: no sealaned answers there: {why}"
            ) from error
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                answer = await loop.sock_recv(connection, LINE_BYTES_MAX)
                if (refused := refusal_of(answer)) is not None:
                    raise refused
