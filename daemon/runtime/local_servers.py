"""The daemon's Unix sockets: its own, and one that it shares with other users (decision 118).

Each socket's door knows its callers by the kernel's word. Operators' calls reach one gRPC server,
those of jobs and readers another one, whose callers can take only a bounded part of the memory.
"""

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final

from sealane.daemon.runtime.access import Access, Parties, PartiesNow, RefusedCallers
from sealane.daemon.runtime.directories import RunDirectory, SharedDirectory
from sealane.daemon.runtime.door import Caller, door
from sealane.daemon.runtime.local_calls import LocalAuthorizer
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.origins import Origins
from sealane.daemon.runtime.parties import MembersOf, Party
from sealane.daemon.runtime.servers import (
    LOCAL_CONNECTIONS_MAX,
    inner_socket,
    local_door,
    new_server,
    new_shared_server,
    running,
)
from sealane.daemon.runtime.traces import Traces

ANY_USER: Final = 0o666
"""Mode of the shared sockets: their doors decide, and the directory, where it was narrowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the sockets for other users have in common."""

    access: Access
    directory: SharedDirectory
    refused: RefusedCallers


class _Connected:
    """The connections of the shared socket, and what their callers were when they connected.

    Its lock is held while lists are replaced, so every connection is decided by one of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parties: dict[Caller, tuple[PartiesNow, Parties]] = {}

    @contextlib.contextmanager
    def as_now(self, caller: Caller, parties: PartiesNow) -> Iterator[PartiesNow]:
        """Keep a connection for the block, which gets what its caller is, as `parties`."""
        with self._lock:
            self._parties[caller] = parties, parties()
        try:
            yield parties
        finally:
            with self._lock:
                del self._parties[caller]

    def replace(self, access: Access, members: MembersOf) -> None:
        with self._lock:
            access.replace(members)
            for caller, (now, before) in self._parties.items():
                if now() != before:
                    caller.disconnect()


class LocalServers:
    """The gRPC servers of the Unix sockets; a service that is added is added to both."""

    def __init__(self, metrics: Metrics, traces: Traces, *, shared: Shared | None) -> None:
        self.origins = Origins()
        self.shared = shared
        self._connected = _Connected()
        authorizer = LocalAuthorizer(self.origins)
        self.operators = new_server(metrics, authorizer, traces)
        self.all = [self.operators]
        if shared is not None:
            self._others = new_shared_server(metrics, authorizer, traces)
            self.all.append(self._others)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add the handlers of a service: called by the generated code."""
        for server in self.all:
            server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        """Add them by method: called by the generated code."""
        for server in self.all:
            server.add_registered_method_handlers(service_name, handlers)

    def replace_members(self, members: MembersOf) -> None:
        """Decide by these lists from now on, and end connections whose parties they change.

        Which server a connection reaches, and what its calls are waiting for, was decided by what
        its caller was.
        """
        if self.shared is not None:
            self._connected.replace(self.shared.access, members)

    @contextlib.asynccontextmanager
    async def serving(self, run_directory: RunDirectory) -> AsyncIterator[None]:
        """Serve until the block is left; nothing can be added from then on.

        Raises UsageError or UnavailableError if a path can't be served.
        """
        async with contextlib.AsyncExitStack() as stack:
            # Doors close last: calls under way end by the servers' own stop.
            await stack.enter_async_context(
                local_door(self.operators, run_directory.socket, relayed=self.origins.relay)
            )
            if self.shared is not None:
                await self._share(self.shared, run_directory, stack)
            for server in self.all:
                await stack.enter_async_context(running(server))
            yield

    async def _share(
        self, shared: Shared, run_directory: RunDirectory, stack: contextlib.AsyncExitStack
    ) -> None:
        inner = run_directory.shared_inner
        operators = stack.enter_context(inner_socket(self.operators, inner))
        others = stack.enter_context(inner_socket(self._others, inner))

        def serve(caller: Caller) -> None:
            with self._connected.as_now(caller, shared.access.parties_of(caller)) as parties:
                address = operators if Party.OPERATOR in parties() else others
                self.origins.relay(caller, address, parties=parties)

        await stack.enter_async_context(
            door(
                shared.directory.socket,
                serve,
                connections_max=LOCAL_CONNECTIONS_MAX,
                admit=shared.access.admit,
                note_refused=shared.refused.note,
                mode=ANY_USER,
            )
        )
