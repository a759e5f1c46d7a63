"""A gateway's use of a foreign target: an association, and the claim to be its only user."""

import contextlib
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sealane import _native
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.protocol.sector import METADATA_BYTES, SECTOR_BYTES
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.handshake import Digests
from sealane.transport.nvme.initiator import (
    ConnectedQueue,
    ControllerEvent,
    EventKind,
    HostController,
)

_QUEUE_ID: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdParty:
    """A foreign namespace, as the operator configures it; it holds at most one volume."""

    name: str
    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int
    credentials: Credentials | None = None
    digests: Digests = field(default_factory=Digests)
    command_timeout_seconds: float = 20.0


class Association:
    """A connection to the third party: one controller and one I/O queue."""

    def __init__(self, party: ThirdParty, *, host_nqn: str, keep_alive_ms: int) -> None:
        self._party = party
        self._queue: ConnectedQueue | None = None
        self._host = HostController(
            traddr=party.traddr,
            trsvcid=party.trsvcid,
            subsystem_nqn=party.subsystem_nqn,
            host_nqn=host_nqn,
            keep_alive_ms=keep_alive_ms,
            credentials=party.credentials,
            digests=party.digests,
            events=self._happened,
        )

    @property
    def name(self) -> str:
        """Name of the third party in the configuration."""
        return self._party.name

    async def open(self) -> _native.RemoteDevice:
        """Connect and check that the namespace can hold a volume."""
        party = self._party
        await self._host.connect()
        await self._host.request_queues(1)
        namespace = await self._host.identify_namespace(party.namespace_id)
        check_format(party, namespace)
        queue = await self._host.connect_queue(_QUEUE_ID)
        self._queue = queue
        try:
            return _native.RemoteDevice(
                queue.describe(
                    block_bytes=namespace.block_bytes + namespace.metadata_bytes,
                    nsid=party.namespace_id,
                ),
                block_count=namespace.block_count,
                timeout_seconds=party.command_timeout_seconds,
            )
        except ValueError as error:
            raise UsageError("third_party.format", f"{party.name!r}: {error}") from error

    async def close(self) -> None:
        """Close the I/O queue and the controller."""
        self._end_queue()
        if self._queue is not None:
            self._queue.close()
        await self._host.close()

    def _happened(self, event: ControllerEvent) -> None:
        if event.kind is EventKind.LOST:
            self._end_queue()

    def _end_queue(self) -> None:
        """Make the engine, which holds a duplicate of the socket, notice the end now."""
        if self._queue is not None:
            with contextlib.suppress(OSError):
                self._queue.socket.shutdown(2)


class Claim:
    """Claim of this process to use a third party's namespace, exclusively on this node.

    The file is locked while the claim is held, and says "in use" until it was released cleanly:
    then no command of this process is still in flight.
    """

    def __init__(self, path: Path, name: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise UnavailableError(
                "third_party.busy", f"{name!r} is in use by a volume of this gateway"
            ) from error
        self.was_in_use = bool(os.pread(self._descriptor, 1, 0))
        os.pwrite(self._descriptor, b"in use\n", 0)
        os.fsync(self._descriptor)

    def release(self, *, is_clean: bool) -> None:
        """Allow others to use it."""
        if is_clean:
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
        os.close(self._descriptor)


def check_format(party: ThirdParty, namespace: NamespaceIdentity) -> None:
    """Raise UsageError `third_party.format` if the namespace's format can't hold a volume."""
    found = (namespace.block_bytes, namespace.metadata_bytes)
    is_format = namespace.is_extended and namespace.protection_type == 0
    if namespace.metadata_bytes and not (found == (SECTOR_BYTES, METADATA_BYTES) and is_format):
        raise UsageError(
            "third_party.format",
            f"namespace {party.namespace_id} of {party.name!r} has {namespace.metadata_bytes} "
            f"bytes of metadata per block of {namespace.block_bytes}, extended "
            f"{namespace.is_extended}, protection type {namespace.protection_type}; allowed: "
            f"{METADATA_BYTES} per {SECTOR_BYTES}, extended, none; or no metadata",
        )
