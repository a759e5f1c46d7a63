"""Identify data of controllers and namespaces, both ways.

NVMe Base 2.0 §5.17, NVM Command Set 1.0 §4.1.5. Fields that are not named are zero.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sealane.errors import ProtocolError
from sealane.protocol.nvme.constants import (
    ABORTS_MAX,
    BROADCAST_NSID,
    ERROR_ENTRIES_MAX,
    EVENT_REQUESTS_MAX,
    IDENTIFY_BYTES,
    IN_CAPSULE_BYTES,
    KEEP_ALIVE_GRANULARITY_MS,
    QUEUE_DEPTH_MAX,
    SUBMISSION_BYTES,
    VERSION_2_0,
    IdentifyStructure,
    IoOpcode,
)
from sealane.protocol.nvme.events import Event
from sealane.protocol.nvme.subsystem import RESERVATION_COMMANDS, Namespace, Subsystem

_PAGE_BYTES = 4096
_BLOCK_EXPONENT = 12
_EXTENDED_LBA = 0x10
_ANA_TRANSITION_SECONDS = 10
_WRITE_ZEROES_EXPONENT = 16  # 65,536 blocks of one page: the most that a block count can express
_OPTIMAL_WRITE_BLOCKS = 32

_HOST_ID_128 = 1 << 0
_TRAFFIC_BASED_KEEP_ALIVE = 1 << 6
_MULTIPLE_PORTS_AND_CONTROLLERS = 0x03
_ANA_REPORTING = 0x08
_ANA_STATES = 0x5F  # the five states; a namespace never changes its group
_LOG_ATTRIBUTES = 0x07  # health per namespace, command effects, 32-bit length and offset
_SGLS = 0x0030_0001  # SGLs, their offset in the capsule, and the transport's data block
_RESERVATION_TYPES = 0xFE  # all six types; "ignore existing key" as since NVMe 1.3
_SELECT_FEATURES = 1 << 4
_IDENTIFIERS_NOT_REUSED = 0x08
_WRITE_HINTS = 0x10
_THIN = 0x01
_WRITE_PROTECTED = 0x01  # NSATTR
_DEALLOCATED_READS_ZERO = 0x01
_WRITE_ZEROES_DEALLOCATES = 0x08

# Optional commands as ONCS bits (NVMe Base 2.0 figure 275).
_OPTIONAL_COMMANDS: Final[Mapping[IoOpcode, int]] = {
    IoOpcode.COMPARE: 1 << 0,
    IoOpcode.DATASET_MANAGEMENT: 1 << 2,
    IoOpcode.WRITE_ZEROES: 1 << 3,
    IoOpcode.VERIFY: 1 << 7,
}
_RESERVATIONS = 1 << 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerIdentity:
    """Properties of a controller that a host needs. `transfer_max` 0 means no limit."""

    subsystem_nqn: str
    controller_id: int
    model: str
    transfer_max: int
    in_capsule_max: int
    volatile_write_cache: bool
    outstanding_max: int = 0  # MAXCMD: commands that a queue may have outstanding; 0: not reported
    fused_commands: int = 0  # FUSES
    events: int = 0  # OAES
    reports_ana: bool = False
    is_discovery: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceIdentity:
    """Properties of a namespace that a host needs."""

    block_count: int
    block_bytes: int
    metadata_bytes: int
    is_extended: bool = False  # metadata follows each block's data, in one extended LBA
    protection_type: int = 0  # end-to-end protection information: 0 is none


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentifyRequest:
    """An Identify request: `structure` is the CNS value."""

    structure: int
    nsid: int = 0
    command_set: int = 0
    controller_id: int = 0


def encode_controller(subsystem: Subsystem, *, controller_id: int) -> bytes:
    """Encode Identify Controller, CNS 01h."""
    data = bytearray(IDENTIFY_BYTES)
    data[4:24] = subsystem.serial.encode("ascii")[:20].ljust(20)
    data[24:64] = subsystem.model.encode("ascii")[:40].ljust(40)
    data[64:72] = subsystem.firmware.encode("ascii")[:8].ljust(8)
    data[77] = (subsystem.transfer_max // _PAGE_BYTES).bit_length() - 1
    struct.pack_into("<HI", data, 78, controller_id, VERSION_2_0)
    events = Event.offered(subsystem)
    attributes = _HOST_ID_128 | _TRAFFIC_BASED_KEEP_ALIVE
    struct.pack_into("<II", data, 92, sum(event.bit for event in events), attributes)
    data[111] = 2 if subsystem.is_discovery else 1
    data[259] = EVENT_REQUESTS_MAX - 1
    data[261] = _LOG_ATTRIBUTES
    data[262] = ERROR_ENTRIES_MAX - 1
    struct.pack_into("<H", data, 320, KEEP_ALIVE_GRANULARITY_MS // 100)
    struct.pack_into("<H", data, 514, QUEUE_DEPTH_MAX)
    struct.pack_into("<I", data, 536, _SGLS)
    data[768:1024] = subsystem.nqn.encode().ljust(256, b"\0")
    if subsystem.is_discovery:
        data[1806] = 1  # a direct discovery controller
    else:
        _encode_io_controller(data, subsystem)
    return bytes(data)


def _encode_io_controller(data: bytearray, subsystem: Subsystem) -> None:
    """Encode the fields that discovery controllers don't have."""
    data[258] = ABORTS_MAX - 1
    data[260] = 0x03  # one firmware slot, read only
    if subsystem.is_multipath:
        data[76] = _MULTIPLE_PORTS_AND_CONTROLLERS | _ANA_REPORTING
        data[342] = _ANA_TRANSITION_SECONDS
        data[343] = _ANA_STATES
        struct.pack_into("<II", data, 344, subsystem.nsid_max, subsystem.nsid_max)
    capacity = sum(_capacity(namespace) for namespace in subsystem.namespaces)
    data[280:296] = capacity.to_bytes(16, "little")
    data[512] = 0x66  # submission entries are 64 bytes
    data[513] = 0x44  # completion entries are 16 bytes
    optional = sum(_OPTIONAL_COMMANDS.get(opcode, 0) for opcode in subsystem.commands)
    optional |= _SELECT_FEATURES | (_RESERVATIONS if subsystem.has_reservations else 0)
    fused = 1 if subsystem.fused_blocks else 0
    struct.pack_into("<IHH", data, 516, subsystem.nsid_max, optional, fused)
    data[525] = 0x05  # a volatile write cache; flush is for one namespace at a time
    struct.pack_into("<H", data, 532, max(0, subsystem.fused_blocks - 1))
    struct.pack_into("<I", data, 540, subsystem.nsid_max)
    struct.pack_into("<II", data, 1792, (SUBMISSION_BYTES + IN_CAPSULE_BYTES) // 16, 1)
    data[1803] = 1  # one SGL descriptor per command


def decode_controller(data: bytes, *, page_bytes: int = _PAGE_BYTES) -> ControllerIdentity:
    """Decode Identify Controller; `page_bytes` is CAP.MPSMIN's, the unit of MDTS."""
    _check(data)
    mdts = data[77]
    capsule_units = struct.unpack_from("<I", data, 1792)[0]
    offset_units = struct.unpack_from("<H", data, 1800)[0]
    return ControllerIdentity(
        subsystem_nqn=data[768:1024].rstrip(b"\0").decode(errors="replace"),
        controller_id=struct.unpack_from("<H", data, 78)[0],
        model=data[24:64].decode("ascii", errors="replace").strip(),
        # Above 2^20 pages the exponent is implausible; treat it as "no limit".
        transfer_max=page_bytes << mdts if 0 < mdts <= 20 else 0,
        # Data that doesn't directly follow the entry (ICDOFF) is not for NVMe/TCP: send none.
        in_capsule_max=max(0, capsule_units * 16 - SUBMISSION_BYTES) if not offset_units else 0,
        volatile_write_cache=bool(data[525] & 1),
        outstanding_max=struct.unpack_from("<H", data, 514)[0],
        fused_commands=struct.unpack_from("<H", data, 522)[0],
        events=struct.unpack_from("<I", data, 92)[0],
        reports_ana=bool(data[76] & 0x08),
        is_discovery=data[111] == 2,
    )


def encode_namespace(subsystem: Subsystem, namespace: Namespace) -> bytes:
    """Encode Identify Namespace, CNS 00h: one format, interleaved metadata, no protection."""
    data = bytearray(IDENTIFY_BYTES)
    count = namespace.block_count
    struct.pack_into("<QQQ", data, 0, count, count, count)
    is_thin = IoOpcode.DATASET_MANAGEMENT in subsystem.commands
    data[24] = _IDENTIFIERS_NOT_REUSED | _WRITE_HINTS | (_THIN if is_thin else 0)
    if namespace.metadata_bytes:
        data[26] = _EXTENDED_LBA
        data[27] = 0x01  # metadata as part of an extended LBA
    data[30] = _sharing(subsystem)
    data[31] = _reservation_capabilities(subsystem)
    data[33] = _DEALLOCATED_READS_ZERO if is_thin else 0
    if IoOpcode.WRITE_ZEROES in subsystem.commands:
        data[33] |= _WRITE_ZEROES_DEALLOCATES
    data[48:64] = _capacity(namespace).to_bytes(16, "little")
    struct.pack_into("<H", data, 72, _OPTIMAL_WRITE_BLOCKS - 1)
    struct.pack_into("<I", data, 92, _ana_group(subsystem, namespace))
    data[99] = _WRITE_PROTECTED if namespace.is_write_protected else 0
    data[104:120] = namespace.namespace_uuid.bytes  # NGUID
    data[120:128] = namespace.eui64.ljust(8, b"\0")
    struct.pack_into("<HBB", data, 128, namespace.metadata_bytes, _BLOCK_EXPONENT, 0)
    return bytes(data)


def decode_namespace(data: bytes) -> NamespaceIdentity:
    """Decode Identify Namespace; ProtocolError for an unusable format."""
    _check(data)
    index = data[26] & 0x0F
    metadata_bytes, exponent = struct.unpack_from("<HB", data, 128 + 4 * index)
    if not 9 <= exponent <= 16:
        raise ProtocolError("namespace.format", f"block size is 2^{exponent}; allowed: 9 to 16")
    return NamespaceIdentity(
        block_count=struct.unpack_from("<Q", data, 0)[0],
        block_bytes=1 << exponent,
        metadata_bytes=metadata_bytes,
        is_extended=bool(data[26] & _EXTENDED_LBA),
        protection_type=data[29] & 0x07,
    )


def encode_active_namespaces(subsystem: Subsystem, after: int) -> bytes:
    """Encode the active namespace list, CNS 02h: ids above `after`."""
    ids = [each.nsid for each in subsystem.namespaces if each.nsid > after]
    listed = ids[: IDENTIFY_BYTES // 4]
    return b"".join(nsid.to_bytes(4, "little") for nsid in listed).ljust(IDENTIFY_BYTES, b"\0")


def encode_descriptors(namespace: Namespace) -> bytes:
    """Encode namespace identification descriptors, CNS 03h: EUI64, NGUID, UUID, command set."""
    name = namespace.namespace_uuid.bytes
    parts = [(1, namespace.eui64), (2, name), (3, name), (4, b"\0")]
    data = b"".join(bytes([kind, len(value), 0, 0]) + value for kind, value in parts if value)
    return data.ljust(IDENTIFY_BYTES, b"\0")


def encode_independent_namespace(subsystem: Subsystem, namespace: Namespace) -> bytes:
    """Encode Identify Namespace independent of the command set, CNS 08h."""
    data = bytearray(IDENTIFY_BYTES)
    data[0] = _IDENTIFIERS_NOT_REUSED
    data[1] = _sharing(subsystem)
    data[2] = _reservation_capabilities(subsystem)
    struct.pack_into("<I", data, 4, _ana_group(subsystem, namespace))
    data[8] = _WRITE_PROTECTED if namespace.is_write_protected else 0
    data[14] = 0x01  # ready
    return bytes(data)


def encode_command_set_controller(subsystem: Subsystem) -> bytes:
    """Encode Identify Controller of the NVM command set, CNS 06h: limits of dataless commands."""
    data = bytearray(IDENTIFY_BYTES)
    data[0] = _WRITE_ZEROES_EXPONENT if IoOpcode.VERIFY in subsystem.commands else 0
    data[1] = _WRITE_ZEROES_EXPONENT if IoOpcode.WRITE_ZEROES in subsystem.commands else 0
    return bytes(data)


def encode_command_sets() -> bytes:
    """Encode I/O command set combinations, CNS 1Ch: only the NVM command set."""
    return b"\x01".ljust(IDENTIFY_BYTES, b"\0")


def identify(request: IdentifyRequest, subsystem: Subsystem, *, controller_id: int) -> bytes | None:
    """Answer Identify; None for an unsupported structure.

    LookupError for a namespace that isn't active (or an invalid id), ValueError for a different
    command set or controller id.
    """
    answers = _DISCOVERY_STRUCTURES if subsystem.is_discovery else _STRUCTURES
    answer = answers.get(request.structure)
    if answer is None:
        return None
    if request.command_set and request.structure in _COMMAND_SET_STRUCTURES:
        raise ValueError("only the NVM command set is supported")
    return answer(request, subsystem, controller_id)


def _active(request: IdentifyRequest, subsystem: Subsystem) -> Namespace:
    namespace = subsystem.namespace(request.nsid)
    if namespace is None:
        raise LookupError("no such namespace")
    return namespace


def _or_inactive(
    encode: Callable[[Subsystem, Namespace], bytes],
) -> Callable[[IdentifyRequest, Subsystem, int], bytes]:
    """Answer a valid id that isn't active with zeros (NVMe Base 2.0 §5.17.2.1)."""

    def answer(request: IdentifyRequest, subsystem: Subsystem, _: int) -> bytes:
        if not 1 <= request.nsid <= subsystem.nsid_max:
            raise LookupError("no such namespace id")
        namespace = subsystem.namespace(request.nsid)
        return bytes(IDENTIFY_BYTES) if namespace is None else encode(subsystem, namespace)

    return answer


def _list(request: IdentifyRequest, subsystem: Subsystem, _: int) -> bytes:
    if request.nsid >= BROADCAST_NSID - 1:
        raise LookupError("no valid namespace id can follow")
    return encode_active_namespaces(subsystem, request.nsid)


def _command_sets(request: IdentifyRequest, _: Subsystem, controller_id: int) -> bytes:
    if request.controller_id not in {0xFFFF, controller_id}:
        raise ValueError("another controller's id")
    return encode_command_sets()


_Answer = Callable[[IdentifyRequest, Subsystem, int], bytes]
_CONTROLLER: _Answer = lambda _, subsystem, cid: encode_controller(  # noqa: E731
    subsystem, controller_id=cid
)
_DISCOVERY_STRUCTURES: Final[Mapping[int, _Answer]] = {IdentifyStructure.CONTROLLER: _CONTROLLER}
_STRUCTURES: Final[Mapping[int, _Answer]] = {
    IdentifyStructure.NAMESPACE: _or_inactive(encode_namespace),
    IdentifyStructure.CONTROLLER: _CONTROLLER,
    IdentifyStructure.ACTIVE_NAMESPACES: _list,
    IdentifyStructure.DESCRIPTORS: lambda r, s, _: encode_descriptors(_active(r, s)),
    IdentifyStructure.COMMAND_SET_NAMESPACE: _or_inactive(lambda *_: bytes(IDENTIFY_BYTES)),
    IdentifyStructure.COMMAND_SET_CONTROLLER: lambda _, s, __: encode_command_set_controller(s),
    IdentifyStructure.COMMAND_SET_ACTIVE_NAMESPACES: _list,
    IdentifyStructure.INDEPENDENT_NAMESPACE: _or_inactive(encode_independent_namespace),
    IdentifyStructure.COMMAND_SETS: _command_sets,
}
_COMMAND_SET_STRUCTURES: Final = frozenset(
    {
        IdentifyStructure.COMMAND_SET_NAMESPACE,
        IdentifyStructure.COMMAND_SET_CONTROLLER,
        IdentifyStructure.COMMAND_SET_ACTIVE_NAMESPACES,
    }
)


def _capacity(namespace: Namespace) -> int:
    return namespace.block_count << _BLOCK_EXPONENT


def _sharing(subsystem: Subsystem) -> int:
    return 1 if subsystem.is_multipath else 0


def _reservation_capabilities(subsystem: Subsystem) -> int:
    return _RESERVATION_TYPES if subsystem.commands >= RESERVATION_COMMANDS else 0


def _ana_group(subsystem: Subsystem, namespace: Namespace) -> int:
    """Return the group of a namespace: each is its own group, so that it can change state alone."""
    return namespace.nsid if subsystem.is_multipath else 0


def _check(data: bytes) -> None:
    if len(data) != IDENTIFY_BYTES:
        raise ProtocolError(
            "identify.malformed", f"Identify data has {len(data)} bytes; allowed: {IDENTIFY_BYTES}"
        )
