"""Data that a host reads from a controller besides Identify: lists, log pages, events.

NVMe Base 2.0 §5.2 (events), §5.16.1 (log pages), §5.17.2 (lists). A controller is not trusted:
counts are checked against the available bytes.
"""

import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from sealane.errors import ProtocolError
from sealane.protocol.nvme.constants import AnaState, LogPage

DISCOVERY_HEADER_BYTES = 1024
DISCOVERY_ENTRY_BYTES = 1024
_DISCOVERY_HEADER = struct.Struct("<QQH")  # generation counter, records, record format
_ANA_HEADER = struct.Struct("<QHxxxxxx")  # change count, groups
_ANA_GROUP = struct.Struct("<IIQB15x")  # group, namespaces, change count, state
_MANY_NAMESPACES = 0xFFFF_FFFF  # more changed than the log can list


class Notice(Enum):
    """Asynchronous events that hosts handle: (type, information), bit in the configuration."""

    NAMESPACES = ((0x02, 0x00), 8, LogPage.CHANGED_NAMESPACES)
    ANA = ((0x02, 0x03), 11, LogPage.ANA)
    DISCOVERY = ((0x02, 0xF0), 31, LogPage.DISCOVERY)

    def __init__(self, code: tuple[int, int], bit: int, page: int) -> None:
        self.code = code
        self.bit = bit
        self.page = page


@dataclass(frozen=True, slots=True, kw_only=True)
class EventResult:
    """Result of an Asynchronous Event Request. Reading `page` enables the next one."""

    kind: int
    information: int
    page: int

    @property
    def notice(self) -> Notice | None:
        """The notice, if the host knows it."""
        code = (self.kind, self.information)
        return next((notice for notice in Notice if notice.code == code), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryEntry:
    """One way to one subsystem."""

    TCP: ClassVar[int] = 3
    IPV4: ClassVar[int] = 1
    IPV6: ClassVar[int] = 2
    REFERRAL: ClassVar[int] = 1
    NVM: ClassVar[int] = 2
    CURRENT_DISCOVERY: ClassVar[int] = 3

    transport: int
    address_family: int
    subsystem_type: int
    port_id: int
    controller_id: int
    trsvcid: str
    subsystem_nqn: str
    traddr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceNames:
    """Identification descriptors of a namespace."""

    eui64: bytes | None = None
    nguid: bytes | None = None
    uuid: "uuid.UUID | None" = None
    command_set: int | None = None


_DESCRIPTOR_LENGTHS: Final[Mapping[int, int]] = {1: 8, 2: 16, 3: 16, 4: 1}


def decode_event(result: int) -> EventResult:
    """Decode the result of an Asynchronous Event Request."""
    return EventResult(kind=result & 0x07, information=result >> 8 & 0xFF, page=result >> 16 & 0xFF)


def decode_active_namespaces(data: bytes) -> list[int]:
    """Decode an active namespace list: ascending identifiers, up to the first zero."""
    ids: list[int] = []
    for (nsid,) in struct.iter_unpack("<I", data):
        if nsid == 0:
            break
        if ids and nsid <= ids[-1]:
            raise ProtocolError(
                "identify.malformed", "active namespace ids are not in ascending order"
            )
        ids.append(nsid)
    return ids


def decode_changed_namespaces(data: bytes) -> list[int] | None:
    """Decode the log of changed namespaces; None if any may have changed."""
    ids = decode_active_namespaces(data)
    return None if ids == [_MANY_NAMESPACES] else ids


def decode_descriptors(data: bytes) -> NamespaceNames:
    """Decode namespace identification descriptors; unknown types are skipped."""
    found: dict[int, bytes] = {}
    offset = 0
    while offset + 4 <= len(data):
        kind, length = data[offset], data[offset + 1]
        if kind == 0:
            break
        value = data[offset + 4 : offset + 4 + length]
        if length == 0 or len(value) < length or length != _DESCRIPTOR_LENGTHS.get(kind, length):
            raise ProtocolError(
                "identify.malformed", f"descriptor {kind} of a namespace has {length} bytes"
            )
        found[kind] = value
        offset += 4 + length
    name, command_set = found.get(3), found.get(4)
    return NamespaceNames(
        eui64=found.get(1),
        nguid=found.get(2),
        uuid=None if name is None else uuid.UUID(bytes=name),
        command_set=None if command_set is None else command_set[0],
    )


def ana_log_length(data: bytes, limit: int) -> int:
    """Return the length of the ANA log that begins with `data`, in bytes, at most `limit`.

    If `data` doesn't reach to its end, this is the length known so far.
    """
    count = _ANA_HEADER.unpack_from(data)[1]
    offset = _ANA_HEADER.size
    for _ in range(count):
        if offset + _ANA_GROUP.size > len(data):
            return min(offset + _ANA_GROUP.size, limit)
        offset += _ANA_GROUP.size + 4 * int(_ANA_GROUP.unpack_from(data, offset)[1])
        if offset > limit:
            return limit
    return offset


def decode_ana_log(data: bytes) -> dict[int, AnaState]:
    """Return the state of every namespace in an ANA log; unknown states count as inaccessible."""
    if len(data) < _ANA_HEADER.size:
        raise ProtocolError("log.malformed", f"an ANA log of {len(data)} bytes")
    count = _ANA_HEADER.unpack_from(data)[1]
    states: dict[int, AnaState] = {}
    offset = _ANA_HEADER.size
    for _ in range(count):
        if offset + _ANA_GROUP.size > len(data):
            raise ProtocolError("log.malformed", "an ANA log ends within a group")
        _, namespaces, _, code = _ANA_GROUP.unpack_from(data, offset)
        offset += _ANA_GROUP.size
        end = offset + 4 * namespaces
        if end > len(data):
            raise ProtocolError("log.malformed", "an ANA log ends within a group")
        state = AnaState(code & 0x0F) if code & 0x0F in set(AnaState) else AnaState.INACCESSIBLE
        for (nsid,) in struct.iter_unpack("<I", data[offset:end]):
            states[nsid] = state
        offset = end
    return states


def decode_discovery_header(data: bytes) -> tuple[int, int]:
    """Decode generation counter and number of entries of a discovery log."""
    if len(data) < DISCOVERY_HEADER_BYTES:
        raise ProtocolError("log.malformed", f"a discovery log of {len(data)} bytes")
    generation, count, record_format = _DISCOVERY_HEADER.unpack_from(data)
    if record_format != 0:
        raise ProtocolError("log.malformed", f"discovery record format {record_format}; allowed: 0")
    return generation, count


def decode_discovery_entry(data: bytes) -> DiscoveryEntry:
    """Decode one entry of a discovery log."""
    if len(data) != DISCOVERY_ENTRY_BYTES:
        raise ProtocolError("log.malformed", f"a discovery entry of {len(data)} bytes")
    port_id, controller_id = struct.unpack_from("<HH", data, 4)
    return DiscoveryEntry(
        transport=data[0],
        address_family=data[1],
        subsystem_type=data[2],
        port_id=port_id,
        controller_id=controller_id,
        trsvcid=_text(data[32:64]),
        subsystem_nqn=_text(data[256:512]),
        traddr=_text(data[512:768]),
    )


def _text(field: bytes) -> str:
    """Return text that ends with a zero byte or is padded with blanks."""
    try:
        return field.partition(b"\0")[0].decode().rstrip(" ")
    except UnicodeDecodeError:
        raise ProtocolError("log.malformed", "a discovery entry isn't UTF-8") from None
