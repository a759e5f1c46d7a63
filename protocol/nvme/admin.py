"""Admin queue of a controller with one namespace, without input or output.

A submission entry goes in; the answer (data, completion) comes out, or nothing for a command
that stays parked. The listener owns sockets and time.
"""

import struct
from dataclasses import dataclass

from sealane.protocol.nvme.constants import (
    DO_NOT_RETRY,
    EVENT_REQUESTS_MAX,
    IDENTIFY_BYTES,
    KEEP_ALIVE_GRANULARITY_MS,
    NAMESPACE_ID,
    QUEUE_COUNT_MAX,
    QUEUE_DEPTH_MAX,
    VERSION_2_0,
    AdminOpcode,
    FabricsType,
    Feature,
    Property,
    Status,
)
from sealane.protocol.nvme.identify import (
    Subsystem,
    encode_active_namespaces,
    encode_controller,
    encode_descriptors,
    encode_namespace,
)

_BROADCAST = 0xFFFF_FFFF
_SGL_TRANSPORT = 0x5A
_LOG_BYTES_MAX = 4096
_ENABLE = 0x0000_0001
_SHUTDOWN = 0x0000_C000
_READY = 0x01
_SHUTDOWN_COMPLETE = 0x08

# opcode, flags, command id, namespace id, 16 unused, SGL (address, length, kind), CDW10 to CDW15
_ENTRY = struct.Struct("<BBHI16xQI3xB6I")
_COMPLETION = struct.Struct("<QHHHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to send: data first, if there is any, then the completion entry."""

    command_id: int
    completion: bytes
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    status: Status = Status.SUCCESS
    result: int = 0
    data: bytes = b""


def encode_completion(
    command_id: int, *, status: int = 0, result: int = 0, queue_head: int = 0, retry: bool = False
) -> bytes:
    """Completion entry; an error says "do not retry" unless `retry`."""
    field = status if status == 0 or retry else status | DO_NOT_RETRY
    return _COMPLETION.pack(result, queue_head, 0, command_id, field << 1)


def decode_completion(entry: bytes) -> tuple[int, int, int]:
    """Command id, status (type and code) and result of a completion entry."""
    result, _, _, command_id, field = _COMPLETION.unpack(entry)
    return command_id, (field >> 1) & 0x7FF, result


class AdminController:
    """One controller: properties, features, identify, logs; parked event requests."""

    def __init__(self, subsystem: Subsystem, *, controller_id: int, keep_alive_ms: int) -> None:
        self._subsystem = subsystem
        self._controller_id = controller_id
        self._keep_alive_ms = keep_alive_ms
        self._configuration = 0
        self._event_configuration = 0
        self._parked: list[int] = []
        self._queue_count = 0
        self._head = 0

    @property
    def is_ready(self) -> bool:
        """Whether the host has enabled the controller and not shut it down."""
        return bool(self._configuration & _ENABLE) and not self._configuration & _SHUTDOWN

    @property
    def queue_count(self) -> int:
        """I/O queues granted by Set Features; before that, as many as there can be."""
        return self._queue_count or QUEUE_COUNT_MAX

    @property
    def keep_alive_ms(self) -> int:
        """Keep-alive time-out, 0 for none, rounded up to its granularity."""
        granules = -(-self._keep_alive_ms // KEEP_ALIVE_GRANULARITY_MS)
        return granules * KEEP_ALIVE_GRANULARITY_MS

    def handle(self, entry: bytes) -> Answer | None:
        """Execute one admin command; None if it is parked."""
        opcode, _, command_id, nsid, _, length, sgl_kind, *words = _ENTRY.unpack(entry)
        self._head = (self._head + 1) % QUEUE_DEPTH_MAX
        if opcode == AdminOpcode.ASYNC_EVENT_REQUEST and len(self._parked) < EVENT_REQUESTS_MAX:
            self._parked.append(command_id)
            return None
        outcome = self._execute(opcode, nsid, words, entry)
        if outcome.data and (sgl_kind != _SGL_TRANSPORT or length < len(outcome.data)):
            outcome = _Outcome(status=Status.INVALID_FIELD)
        completion = encode_completion(
            command_id, status=outcome.status, result=outcome.result, queue_head=self._head
        )
        return Answer(command_id=command_id, completion=completion, data=outcome.data)

    def _execute(self, opcode: int, nsid: int, words: list[int], entry: bytes) -> _Outcome:
        outcome = _Outcome(status=Status.INVALID_OPCODE)
        match opcode:
            case AdminOpcode.FABRICS:
                outcome = self._fabrics(entry)
            case AdminOpcode.KEEP_ALIVE:
                outcome = _Outcome()
            case _ if not self.is_ready:
                outcome = _Outcome(status=Status.SEQUENCE_ERROR)
            case AdminOpcode.IDENTIFY:
                outcome = self._identify(nsid, words[0] & 0xFF)
            case AdminOpcode.SET_FEATURES:
                outcome = self._set_feature(words)
            case AdminOpcode.GET_FEATURES:
                outcome = self._get_feature(words[0])
            case AdminOpcode.GET_LOG_PAGE:
                outcome = self._log_page(words)
            case AdminOpcode.ABORT:
                outcome = _Outcome(result=1)  # bit 0: the command was not aborted
            case AdminOpcode.ASYNC_EVENT_REQUEST:
                outcome = _Outcome(status=Status.EVENT_REQUESTS_EXCEEDED)
        return outcome

    def _fabrics(self, entry: bytes) -> _Outcome:
        kind, attributes = entry[4], entry[40] & 0x07
        offset, value = struct.unpack_from("<IQ", entry, 44)
        if kind == FabricsType.PROPERTY_GET:
            return self._get_property(offset, attributes)
        if kind == FabricsType.PROPERTY_SET:
            if offset != Property.CONFIGURATION or attributes != 0:
                return _Outcome(status=Status.INVALID_FIELD)
            self._configuration = value & 0xFFFF_FFFF
            return _Outcome()
        if kind == FabricsType.CONNECT:
            return _Outcome(status=Status.SEQUENCE_ERROR)
        return _Outcome(status=Status.INVALID_OPCODE)

    def _get_property(self, offset: int, size: int) -> _Outcome:
        capabilities = (
            (QUEUE_DEPTH_MAX - 1)
            | 1 << 16  # queues are contiguous
            | 20 << 24  # ready within 10 s
            | 1 << 37  # NVM command set
        )
        status = (_READY if self.is_ready else 0) | (
            _SHUTDOWN_COMPLETE if self._configuration & _SHUTDOWN else 0
        )
        properties = {
            (Property.CAPABILITIES, 1): capabilities,
            (Property.VERSION, 0): VERSION_2_0,
            (Property.CONFIGURATION, 0): self._configuration,
            (Property.STATUS, 0): status,
        }
        for (known, known_size), value in properties.items():
            if (known, known_size) == (offset, size):
                return _Outcome(result=value)
        return _Outcome(status=Status.INVALID_FIELD)

    def _identify(self, nsid: int, structure: int) -> _Outcome:
        outcome = _Outcome(status=Status.INVALID_FIELD)
        match structure:
            case 0x00 | 0x03 if nsid in {0, _BROADCAST}:
                outcome = _Outcome(status=Status.INVALID_NAMESPACE)
            case 0x00 if nsid != NAMESPACE_ID:
                outcome = _Outcome(data=bytes(IDENTIFY_BYTES))  # inactive: all zero
            case 0x00:
                outcome = _Outcome(data=encode_namespace(self._subsystem))
            case 0x01:
                identity = encode_controller(self._subsystem, controller_id=self._controller_id)
                outcome = _Outcome(data=identity)
            case 0x02 if nsid < _BROADCAST - 1:
                outcome = _Outcome(data=encode_active_namespaces(nsid))
            case 0x03 if nsid != NAMESPACE_ID:
                outcome = _Outcome(status=Status.INVALID_NAMESPACE)
            case 0x03:
                outcome = _Outcome(data=encode_descriptors(self._subsystem.volume_id))
        return outcome

    def _set_feature(self, words: list[int]) -> _Outcome:
        feature, value = words[0] & 0xFF, words[1]
        if words[0] >> 31:
            return _Outcome(status=Status.INVALID_FIELD)  # nothing can be saved
        match feature:
            case Feature.NUMBER_OF_QUEUES:
                asked = min(value & 0xFFFF, value >> 16) + 1
                self._queue_count = min(asked, QUEUE_COUNT_MAX)
            case Feature.KEEP_ALIVE_TIMER:
                self._keep_alive_ms = value
            case Feature.ASYNC_EVENT_CONFIGURATION:
                self._event_configuration = value
            case _:
                return _Outcome(status=Status.INVALID_FIELD)
        return self._get_feature(feature)

    def _get_feature(self, selector: int) -> _Outcome:
        granted = self.queue_count - 1
        values: dict[int, int] = {
            Feature.NUMBER_OF_QUEUES: granted | granted << 16,
            Feature.KEEP_ALIVE_TIMER: self.keep_alive_ms,
            Feature.ASYNC_EVENT_CONFIGURATION: self._event_configuration,
        }
        value = values.get(selector & 0xFF)
        if value is None or selector >> 8 & 0x07:
            return _Outcome(status=Status.INVALID_FIELD)
        return _Outcome(result=value)

    def _log_page(self, words: list[int]) -> _Outcome:
        page = words[0] & 0xFF
        length = ((words[0] >> 16) | (words[1] & 0xFFFF) << 16) * 4 + 4
        offset = words[2] | words[3] << 32
        supported = bytearray(1024)
        firmware = bytearray(512)
        firmware[0] = 1
        firmware[8:16] = self._subsystem.firmware.encode("ascii")[:8].ljust(8)
        pages: dict[int, bytes] = {
            0x00: bytes(supported),
            0x01: bytes(64),  # one error entry: none happened
            0x02: self._smart(),
            0x03: bytes(firmware),
        }
        for known in pages:
            supported[known * 4] = 1
        pages[0x00] = bytes(supported)
        content = pages.get(page)
        if content is None:
            return _Outcome(status=Status.INVALID_LOG_PAGE)
        if length > _LOG_BYTES_MAX or offset % 4 or offset > len(content):
            return _Outcome(status=Status.INVALID_FIELD)
        return _Outcome(data=content[offset : offset + length].ljust(length, b"\0"))

    @staticmethod
    def _smart() -> bytes:
        """SMART data: no warning, spare at 100 % of what there is to spare."""
        page = bytearray(512)
        page[3] = 100
        return bytes(page)
