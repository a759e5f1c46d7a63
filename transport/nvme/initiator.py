"""Host side of one association: admin commands, keep-alive, events, and connecting I/O queues."""

import asyncio
import contextlib
import math
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

from sealane.errors import Error, ProtocolError, UnavailableError
from sealane.protocol.nvme.connect import TICKET_BYTES, Connect
from sealane.protocol.nvme.constants import (
    BROADCAST_NSID,
    DYNAMIC_CONTROLLER,
    FRONT_TRANSFER_BYTES,
    IDENTIFY_BYTES,
    NAMESPACE_ID,
    QUEUE_DEPTH_MAX,
    AdminOpcode,
    AnaState,
    FabricsType,
    Feature,
    IdentifyStructure,
    LogPage,
    Property,
)
from sealane.protocol.nvme.host_pages import (
    EventResult,
    NamespaceNames,
    Notice,
    ana_log_length,
    decode_active_namespaces,
    decode_ana_log,
    decode_changed_namespaces,
    decode_descriptors,
    decode_event,
)
from sealane.protocol.nvme.identify import (
    ControllerIdentity,
    NamespaceIdentity,
    decode_controller,
    decode_namespace,
)
from sealane.transport.nvme.admin_queue import ADMIN_QUEUE_SIZE, AdminQueue
from sealane.transport.nvme.authenticate import Credentials, authenticate
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.handshake import (
    ADMIN_DATA_MAX,
    Address,
    Digests,
    OpenedQueue,
    open_queue,
)
from sealane.transport.nvme.volume_queue import (
    IO_TIMEOUT_SECONDS,
    ConnectedQueue,
    VolumeQueue,
    bulk_queue,
)
from sealane.transport.tasks import TaskOwner

__all__ = [
    "ConnectedQueue",
    "ControllerEvent",
    "EventKind",
    "HostController",
    "NvmeStatusError",
    "VolumeQueue",
]

_TIMEOUT_SECONDS = 10.0
_SHUTDOWN_SECONDS = 1.0
_READY_POLL_SECONDS = 0.02
_READY_MAX_SECONDS = 30.0  # a controller may ask for 127 s, which is longer than anyone should wait
NAMESPACES_MAX = 16_384  # of one controller; more are refused
_ENABLE = 0x0046_0001  # 64-byte and 16-byte entries, enabled
_SHUTDOWN = 0x0046_4001
_READY = 0x01
_FATAL = 0x02
_SGL = 0x40
_ENTRY = struct.Struct("<BBHI16xQI3xB6I")
_SGL_TRANSPORT = 0x5A
_RETAIN_EVENT = 1 << 15


class EventKind(Enum):
    """Events that a controller reports."""

    NAMESPACES_CHANGED = "namespaces-changed"
    ANA_CHANGED = "ana-changed"
    DISCOVERY_CHANGED = "discovery-changed"
    LOST = "lost"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerEvent:
    """`namespaces` None: any may have changed. `ana`: the whole new table. `error`: why lost."""

    kind: EventKind
    namespaces: tuple[int, ...] | None = None
    ana: "dict[int, AnaState] | None" = None
    error: Error | None = None
    result: EventResult | None = None


class HostController:
    """One association of a host with a subsystem: `async with HostController(...) as host`.

    `keep_alive_ms` 0 means none. `credentials` are used if the controller requires them, and in any
    case if they include the controller's secret. `digests` are offered, and used as far as the
    controller grants them. `events` is called on the event loop and must not block. Calls raise
    errors of `sealane.errors`.
    """

    def __init__(
        self,
        *,
        traddr: str,
        trsvcid: int,
        subsystem_nqn: str,
        host_nqn: str,
        host_id: uuid.UUID | None = None,
        keep_alive_ms: int = 0,
        credentials: Credentials | None = None,
        digests: Digests | None = None,
        events: Callable[[ControllerEvent], None] | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> None:
        self._address = Address(traddr, trsvcid)
        self._subsystem_nqn = subsystem_nqn
        self._host_nqn = host_nqn
        self._host_id = host_id or uuid.uuid4()
        self._keep_alive_ms = keep_alive_ms
        self._credentials = credentials
        self._digests = digests or Digests()
        self._events = events
        self._timeout_seconds = timeout_seconds
        self._admin: AdminQueue | None = None
        self._controller_id = DYNAMIC_CONTROLLER
        self._capabilities = 0
        self._tasks = TaskOwner()
        self._identity: ControllerIdentity | None = None
        self._is_closing = False

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def address(self) -> Address:
        """Address that the controller listens on."""
        return self._address

    @property
    def identity(self) -> ControllerIdentity:
        """Identity that the controller reported."""
        if self._identity is None:
            raise UnavailableError("connection.lost", "the controller is not connected")
        return self._identity

    # Life cycle.

    async def connect(self) -> None:
        """Connect the admin queue, enable the controller, read its identity, request events."""
        try:
            opened = await self._open(
                queue_id=0, queue_size=ADMIN_QUEUE_SIZE, ticket=bytes(TICKET_BYTES)
            )
            self._controller_id = opened.controller_id
            self._admin = AdminQueue(
                opened.stream, timeout_seconds=self._timeout_seconds, lost=self._lost
            )
            await self._enable()
            if self._events is not None:
                await self._ask_for_events(self._events)
        except BaseException:
            await self.close()
            raise
        if self._keep_alive_ms:
            self._tasks.start(self._keep_alive(), name="nvme-keep-alive")

    async def close(self) -> None:
        """Shut the controller down, if it still answers, and close."""
        self._is_closing = True
        admin = self._admin
        try:
            await self._tasks.close()
            if admin is not None:
                with contextlib.suppress(Error, TimeoutError):
                    async with asyncio.timeout(_SHUTDOWN_SECONDS):
                        await self._set_configuration(_SHUTDOWN)
        finally:
            # Also if the shutdown is cancelled.
            self._admin = None
            if admin is not None:
                await admin.close()

    async def authenticate(self) -> None:
        """Authenticate again; check the controller. AuthenticationError ends the association."""
        if self._credentials is None:
            raise UnavailableError(
                "authentication.required",
                "the controller requires authentication, and no credentials are configured",
            )
        try:
            await authenticate(
                lambda entry, data, room: self._submit(entry, data=data, room=room),
                host_nqn=self._host_nqn,
                subsystem_nqn=self._subsystem_nqn,
                credentials=self._credentials,
            )
        except Error:
            await self.close()
            raise

    # Queues.

    async def request_queues(self, count: int) -> int:
        """Request I/O queues; return how many are granted."""
        value = (count - 1) | (count - 1) << 16
        result = await self._set_feature(Feature.NUMBER_OF_QUEUES, value)
        return min(result & 0xFFFF, result >> 16) + 1

    async def connect_queue(
        self, queue_id: int, *, queue_depth: int = QUEUE_DEPTH_MAX, ticket: bytes | None = None
    ) -> ConnectedQueue:
        """Connect an I/O queue, with a ticket if its subsystem is secure.

        `queue_depth` counts entries, and is reduced to what the controller supports.
        """
        identity = self.identity
        depth = min(queue_depth, (self._capabilities & 0xFFFF) + 1)
        if identity.outstanding_max:
            depth = min(depth, max(2, identity.outstanding_max))
        opened = await self._open(
            queue_id=queue_id, queue_size=depth, ticket=ticket or bytes(TICKET_BYTES)
        )
        header_digest, data_digest = opened.stream.digests
        return ConnectedQueue(
            socket=opened.stream.socket,
            queue_id=queue_id,
            queue_depth=depth,
            h2c_data_max=opened.h2c_data_max,
            transfer_max=identity.transfer_max or FRONT_TRANSFER_BYTES,
            in_capsule_max=identity.in_capsule_max,
            header_digest=header_digest,
            data_digest=data_digest,
        )

    async def open_queue(
        self,
        queue_id: int,
        *,
        queue_depth: int = 64,
        io_bytes: int = FRONT_TRANSFER_BYTES,
        nsid: int = NAMESPACE_ID,
        timeout_seconds: float = IO_TIMEOUT_SECONDS,
    ) -> VolumeQueue:
        """Connect an I/O queue of a plain namespace and open a bulk queue on it."""
        namespace = await self.identify_namespace(nsid)
        if namespace.metadata_bytes:
            raise ProtocolError(
                "namespace.format",
                f"blocks carry {namespace.metadata_bytes} bytes of metadata; allowed: 0",
            )
        connected = await self.connect_queue(queue_id, queue_depth=queue_depth)
        return bulk_queue(
            connected, namespace, nsid=nsid, io_bytes=io_bytes, timeout_seconds=timeout_seconds
        )

    # Namespaces.

    async def identify_namespace(self, nsid: int = NAMESPACE_ID) -> NamespaceIdentity:
        """Return size and format of a namespace."""
        return decode_namespace(await self._identify(IdentifyStructure.NAMESPACE, nsid))

    async def namespace_names(self, nsid: int) -> NamespaceNames:
        """Read the identifiers that a namespace has at every subsystem."""
        return decode_descriptors(await self._identify(IdentifyStructure.DESCRIPTORS, nsid))

    async def active_namespaces(self) -> list[int]:
        """Return the identifiers of all active namespaces, ascending."""
        ids: list[int] = []
        while True:
            page = decode_active_namespaces(
                await self._identify(IdentifyStructure.ACTIVE_NAMESPACES, ids[-1] if ids else 0)
            )
            if page and ids and page[0] <= ids[-1]:
                raise ProtocolError(
                    "identify.malformed", "active namespace ids are not in ascending order"
                )
            ids += page
            if len(page) < IDENTIFY_BYTES // 4:
                return ids
            if len(ids) > NAMESPACES_MAX:
                raise ProtocolError(
                    "identify.malformed", f"more than {NAMESPACES_MAX} active namespaces"
                )

    # Log pages.

    async def log_page(
        self, page: int, length: int, *, offset: int = 0, retain_event: bool = False
    ) -> bytes:
        """Read `length` bytes (a multiple of 4, at most 64 KiB) of a log page at `offset`."""
        dwords = length // 4 - 1
        words = (
            page | (_RETAIN_EVENT if retain_event else 0) | (dwords & 0xFFFF) << 16,
            dwords >> 16,
            offset & 0xFFFF_FFFF,
            offset >> 32,
        )
        nsid = 0 if page == LogPage.DISCOVERY else BROADCAST_NSID
        data, _ = await self._command(
            AdminOpcode.GET_LOG_PAGE, nsid=nsid, words=words, length=length
        )
        return data

    async def ana_states(self) -> dict[int, AnaState]:
        """Return the state of each namespace; empty if the controller doesn't report them."""
        if not self.identity.reports_ana:
            return {}
        limit = min(ADMIN_DATA_MAX, self.identity.transfer_max or ADMIN_DATA_MAX)
        length = min(IDENTIFY_BYTES, limit)
        while True:
            data = await self.log_page(LogPage.ANA, length)
            needed = ana_log_length(data, limit)
            if needed <= length:
                return decode_ana_log(data)
            length = min(limit, max(2 * length, needed + needed % 4))

    # Internals.

    async def _open(self, *, queue_id: int, queue_size: int, ticket: bytes) -> OpenedQueue:
        connect = Connect(
            command_id=0,
            queue_id=queue_id,
            queue_size=queue_size,
            keep_alive_ms=self._keep_alive_ms if queue_id == 0 else 0,
            host_id=self._host_id,
            controller_id=self._controller_id if queue_id else DYNAMIC_CONTROLLER,
            subsystem_nqn=self._subsystem_nqn,
            host_nqn=self._host_nqn,
            ticket=ticket,
        )
        return await open_queue(
            self._address,
            connect,
            credentials=self._credentials,
            digests=self._digests,
            timeout_seconds=self._timeout_seconds,
        )

    async def _enable(self) -> None:
        self._capabilities = await self._property(Property.CAPABILITIES)
        await self._set_configuration(_ENABLE)
        # CAP.TO counts units of 500 ms.
        seconds = min(_READY_MAX_SECONDS, max(1, self._capabilities >> 24 & 0xFF) / 2)
        status = await self._property(Property.STATUS)
        for _ in range(int(seconds / _READY_POLL_SECONDS)):
            if status & (_READY | _FATAL):
                break
            await asyncio.sleep(_READY_POLL_SECONDS)
            status = await self._property(Property.STATUS)
        if not status & _READY or status & _FATAL:
            raise ProtocolError("controller.not_ready", f"controller status is {status:#x}")
        page_bytes = 4096 << (self._capabilities >> 48 & 0x0F)
        identity = decode_controller(
            await self._identify(IdentifyStructure.CONTROLLER), page_bytes=page_bytes
        )
        if not identity.is_discovery and identity.subsystem_nqn != self._subsystem_nqn:
            raise ProtocolError(
                "identify.subsystem",
                f"connected to {self._subsystem_nqn}, but {identity.subsystem_nqn!r} answered",
            )
        self._identity = identity

    async def _ask_for_events(self, events: Callable[[ControllerEvent], None]) -> None:
        offered = [notice for notice in Notice if self.identity.events >> notice.bit & 1]
        if not offered:
            return
        await self._set_feature(
            Feature.ASYNC_EVENT_CONFIGURATION, sum(1 << notice.bit for notice in offered)
        )
        self._tasks.start(self._watch(events), name="nvme-events")

    async def _watch(self, events: Callable[[ControllerEvent], None]) -> None:
        """Keep an event request parked; read log pages to enable the next event of each kind."""
        with contextlib.suppress(Error):  # a lost queue reports itself
            while True:
                entry = _ENTRY.pack(
                    AdminOpcode.ASYNC_EVENT_REQUEST, _SGL, 0, 0, 0, 0, _SGL_TRANSPORT, *(0,) * 6
                )
                _, result = await self._submit(entry, is_bounded=False)
                events(await self._event(decode_event(result)))

    async def _event(self, result: EventResult) -> ControllerEvent:
        match result.notice:
            case Notice.NAMESPACES:
                changed = decode_changed_namespaces(
                    await self.log_page(LogPage.CHANGED_NAMESPACES, IDENTIFY_BYTES)
                )
                ids = None if changed is None else tuple(changed)
                return ControllerEvent(
                    kind=EventKind.NAMESPACES_CHANGED, namespaces=ids, result=result
                )
            case Notice.ANA:
                return ControllerEvent(
                    kind=EventKind.ANA_CHANGED, ana=await self.ana_states(), result=result
                )
            case Notice.DISCOVERY:
                # The owner reads the log, which enables the next event.
                return ControllerEvent(kind=EventKind.DISCOVERY_CHANGED, result=result)
        if result.page:
            await self.log_page(result.page, 4)
        return ControllerEvent(kind=EventKind.OTHER, result=result)

    async def _keep_alive(self) -> None:
        with contextlib.suppress(Error):  # a lost queue reports itself
            while True:
                await asyncio.sleep(self._keep_alive_ms / 2000)
                # Linux waits as long for its answer, too.
                await self._command(
                    AdminOpcode.KEEP_ALIVE, timeout_seconds=self._keep_alive_ms / 1000
                )

    def _lost(self, error: Error) -> None:
        if self._events is not None and not self._is_closing:
            self._events(ControllerEvent(kind=EventKind.LOST, error=error))

    async def _set_configuration(self, value: int) -> None:
        entry = bytearray(_fabrics_entry(FabricsType.PROPERTY_SET, Property.CONFIGURATION))
        struct.pack_into("<Q", entry, 48, value)
        await self._submit(bytes(entry))

    async def _property(self, offset: Property) -> int:
        return (await self._submit(_fabrics_entry(FabricsType.PROPERTY_GET, offset)))[1]

    async def _set_feature(self, feature: Feature, value: int) -> int:
        _, result = await self._command(AdminOpcode.SET_FEATURES, words=(int(feature), value))
        return result

    async def _identify(self, structure: int, nsid: int = 0) -> bytes:
        data, _ = await self._command(
            AdminOpcode.IDENTIFY, nsid=nsid, words=(structure,), length=IDENTIFY_BYTES
        )
        return data

    async def _command(
        self,
        opcode: AdminOpcode,
        *,
        nsid: int = 0,
        words: tuple[int, ...] = (),
        length: int = 0,
        timeout_seconds: float = math.inf,
    ) -> tuple[bytes, int]:
        padded = (*words, 0, 0, 0, 0, 0, 0)[:6]
        entry = _ENTRY.pack(opcode, _SGL, 0, nsid, 0, length, _SGL_TRANSPORT, *padded)
        data, result = await self._submit(entry, room=length, timeout_seconds=timeout_seconds)
        if len(data) != length:
            raise ProtocolError("pdu.malformed", f"{len(data)} of {length} bytes returned")
        return data, result

    async def _submit(
        self,
        entry: bytes,
        *,
        data: bytes = b"",
        room: int = 0,
        is_bounded: bool = True,
        timeout_seconds: float = math.inf,
    ) -> tuple[bytes, int]:
        if self._admin is None:
            raise UnavailableError("connection.lost", "the controller is not connected")
        return await self._admin.submit(
            entry, data=data, room=room, is_bounded=is_bounded, timeout_seconds=timeout_seconds
        )


def _fabrics_entry(kind: FabricsType, offset: Property) -> bytes:
    entry = bytearray(64)
    entry[0], entry[1], entry[4] = AdminOpcode.FABRICS, _SGL, kind
    entry[40] = 1 if offset == Property.CAPABILITIES else 0
    struct.pack_into("<I", entry, 44, offset)
    return bytes(entry)
