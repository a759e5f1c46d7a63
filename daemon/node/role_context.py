"""Shared parts of a daemon that it passes to each role."""

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from sealane.daemon.config import Config
from sealane.daemon.node.drain import DrainedRole
from sealane.daemon.node.enrolled import EnrolledRoles
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.target_view import TargetView
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.runtime.authorizers import Admit, Authorizer, Refused, no_record
from sealane.daemon.runtime.directories import RunDirectory
from sealane.daemon.runtime.listeners import Listeners
from sealane.daemon.runtime.local_servers import LocalServers
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import bind_tcp, running
from sealane.daemon.runtime.space import Space
from sealane.daemon.runtime.traces import Traces
from sealane.daemon.volume.events import EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """The daemon's shared parts. A role adds what it serves to the lists here."""

    config: Config
    run_directory: RunDirectory
    metrics: Metrics
    traces: Traces
    listeners: Listeners
    """Opens listeners of data paths, which outlive a restart."""
    enrolled: EnrolledRoles
    local_servers: LocalServers
    """Servers of the Unix sockets."""
    spawn: Callable[[str, Coroutine[Any, Any, None]], None]
    """Runs a named task until the daemon stops."""
    report: Callable[[Sequence[str], bool], Awaitable[None]]
    """Reports services as healthy or unhealthy."""
    stack: contextlib.AsyncExitStack
    """Closes what the role opens, in reverse order."""
    spaces: Callable[[], Sequence[Space]]
    """What the last looks at the daemon's file systems found."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Addresses of listeners, by purpose."""
    services: list[str] = field(default_factory=list)
    """gRPC services on the Unix socket."""
    event_logs: list[EventLog] = field(default_factory=list)
    """Closed before the Unix socket, so that subscribers disconnect."""
    targets: list[Callable[[], Sequence[TargetView]]] = field(default_factory=list)
    """Each returns the targets of a role, as they were a few seconds ago."""
    reloads: list[Callable[[Config], Awaitable[None]]] = field(default_factory=list)
    """Each applies to its role what has changed in the files when they are read again."""
    drains: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Each waits, at shutdown, until its role has finished what is in progress."""

    drained: list[DrainedRole] = field(default_factory=list)
    """What `sealanectl node drain` drains."""

    @property
    def local(self) -> grpc.aio.Server:
        """What a service of the Unix sockets is added to."""
        # The generated code calls nothing but the two methods that add handlers.
        return cast("grpc.aio.Server", self.local_servers)

    @property
    def state(self) -> Path:
        """The daemon's state directory."""
        return Path(self.config.node.state_dir)

    def authorizer(
        self, identity: Identity, admit: Admit, *, refused: Refused = no_record
    ) -> Authorizer:
        """Create the checker of peers' calls; its call keys are closed with the daemon."""
        made = Authorizer(
            identity.anchors,
            server=identity.spiffe_id,
            admit=admit,
            metrics=self.metrics,
            refused=refused,
        )
        self.stack.callback(made.call_keys.close)
        return made

    async def serve(
        self,
        server: grpc.aio.Server,
        identity: Identity,
        listen: str,
        *,
        name: str,
        key: str,
        mutual: bool = True,
    ) -> None:
        """Serve peers over TLS (mutual by default) at `listen`; `name` becomes the address's name.

        UnavailableError `listen.refused` names the configuration's `key`.
        """
        credentials = identity.server_credentials(mutual=mutual)
        self.addresses[name] = bind_tcp(server, listen, credentials, key=key)
        await self.stack.enter_async_context(running(server))

    def count_faults(self, name: str, listener: Listener) -> None:
        """Count the protocol faults of `listener`, by its name."""
        listener.observe(lambda reason: self.metrics.nvme_faults.labels(name, reason).inc())
