"""Identify data of a controller and its one namespace, both ways.

NVMe Base 2.0 figures 275 and 276, NVM Command Set 1.0 figures 97 to 100.
"""

import struct
import uuid
from dataclasses import dataclass

from sealane.errors import ProtocolError
from sealane.protocol.nvme.constants import (
    ABORTS_MAX,
    EVENT_REQUESTS_MAX,
    IDENTIFY_BYTES,
    IN_CAPSULE_BYTES,
    KEEP_ALIVE_GRANULARITY_MS,
    NAMESPACE_ID,
    QUEUE_DEPTH_MAX,
    SUBMISSION_BYTES,
    VERSION_2_0,
)

_PAGE_BYTES = 4096
_EXTENDED_LBA = 0x10


@dataclass(frozen=True, slots=True, kw_only=True)
class Subsystem:
    """What a subsystem with one namespace shows its host."""

    nqn: str
    volume_id: uuid.UUID
    serial: str
    block_count: int
    metadata_bytes: int
    transfer_max: int
    model: str = "Sealane"
    firmware: str = "0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerIdentity:
    """What a host needs to know about a controller. `transfer_max` 0 means no limit."""

    subsystem_nqn: str
    controller_id: int
    model: str
    transfer_max: int
    in_capsule_max: int
    volatile_write_cache: bool
    outstanding_max: int = 0  # MAXCMD: commands a queue may have outstanding; 0 says nothing
    optional_commands: int = 0  # ONCS
    fused_commands: int = 0  # FUSES
    events: int = 0  # OAES
    reports_ana: bool = False
    namespace_max: int = 1  # NN: the largest namespace identifier
    is_discovery: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceIdentity:
    """What a host needs to know about a namespace."""

    block_count: int
    block_bytes: int
    metadata_bytes: int


def encode_controller(subsystem: Subsystem, *, controller_id: int) -> bytes:
    """Identify Controller, CNS 01h."""
    data = bytearray(IDENTIFY_BYTES)
    data[4:24] = subsystem.serial.encode("ascii")[:20].ljust(20)
    data[24:64] = subsystem.model.encode("ascii")[:40].ljust(40)
    data[64:72] = subsystem.firmware.encode("ascii")[:8].ljust(8)
    data[77] = (subsystem.transfer_max // _PAGE_BYTES).bit_length() - 1
    struct.pack_into("<HI", data, 78, controller_id, VERSION_2_0)
    data[111] = 1  # an I/O controller
    data[258] = ABORTS_MAX - 1
    data[259] = EVENT_REQUESTS_MAX - 1
    data[260] = 0x03  # one firmware slot, read only
    data[261] = 0x04  # extended data of Get Log Page: 32-bit length and offset
    struct.pack_into("<H", data, 320, KEEP_ALIVE_GRANULARITY_MS // 100)
    data[512] = 0x66  # submission entries are 64 bytes
    data[513] = 0x44  # completion entries are 16 bytes
    struct.pack_into("<HI", data, 514, QUEUE_DEPTH_MAX, NAMESPACE_ID)
    data[525] = 0x01  # a volatile write cache: flush means something
    struct.pack_into("<I", data, 536, 0x0010_0001)  # SGLs, with offset in the capsule
    data[768:1024] = subsystem.nqn.encode().ljust(256, b"\0")
    struct.pack_into("<II", data, 1792, (SUBMISSION_BYTES + IN_CAPSULE_BYTES) // 16, 1)
    data[1803] = 1  # one SGL descriptor per command
    return bytes(data)


def decode_controller(data: bytes, *, page_bytes: int = _PAGE_BYTES) -> ControllerIdentity:
    """Identify Controller as a host reads it; `page_bytes` is CAP.MPSMIN's, the unit of MDTS."""
    _check(data)
    mdts = data[77]
    capsule_units = struct.unpack_from("<I", data, 1792)[0]
    offset_units = struct.unpack_from("<H", data, 1800)[0]
    return ControllerIdentity(
        subsystem_nqn=data[768:1024].rstrip(b"\0").decode(errors="replace"),
        controller_id=struct.unpack_from("<H", data, 78)[0],
        model=data[24:64].decode("ascii", errors="replace").strip(),
        # Above 2^20 pages the exponent is nonsense; treat it as "no limit".
        transfer_max=page_bytes << mdts if 0 < mdts <= 20 else 0,
        # Data that doesn't follow the entry at once (ICDOFF) is not for NVMe/TCP: send none.
        in_capsule_max=max(0, capsule_units * 16 - SUBMISSION_BYTES) if not offset_units else 0,
        volatile_write_cache=bool(data[525] & 1),
        outstanding_max=struct.unpack_from("<H", data, 514)[0],
        optional_commands=struct.unpack_from("<H", data, 520)[0],
        fused_commands=struct.unpack_from("<H", data, 522)[0],
        events=struct.unpack_from("<I", data, 92)[0],
        reports_ana=bool(data[76] & 0x08),
        namespace_max=struct.unpack_from("<I", data, 516)[0],
        is_discovery=data[111] == 2,
    )


def encode_namespace(subsystem: Subsystem) -> bytes:
    """Identify Namespace, CNS 00h: one format, metadata (if any) interleaved, no protection."""
    data = bytearray(IDENTIFY_BYTES)
    count = subsystem.block_count
    struct.pack_into("<QQQ", data, 0, count, count, count)
    if subsystem.metadata_bytes:
        data[26] = _EXTENDED_LBA
        data[27] = 0x01  # metadata as part of an extended LBA
    data[104:120] = subsystem.volume_id.bytes  # NGUID
    struct.pack_into("<HBB", data, 128, subsystem.metadata_bytes, 12, 0)
    return bytes(data)


def decode_namespace(data: bytes) -> NamespaceIdentity:
    """Identify Namespace as a host reads it; ProtocolError for an unusable format."""
    _check(data)
    index = data[26] & 0x0F
    metadata_bytes, exponent = struct.unpack_from("<HB", data, 128 + 4 * index)
    if not 9 <= exponent <= 16:
        raise ProtocolError("namespace.format", f"block size is 2^{exponent}; allowed: 9 to 16")
    return NamespaceIdentity(
        block_count=struct.unpack_from("<Q", data, 0)[0],
        block_bytes=1 << exponent,
        metadata_bytes=metadata_bytes,
    )


def encode_active_namespaces(after: int) -> bytes:
    """Active namespace list, CNS 02h: ids above `after`."""
    ids = [NAMESPACE_ID] if after < NAMESPACE_ID else []
    return b"".join(nsid.to_bytes(4, "little") for nsid in ids).ljust(IDENTIFY_BYTES, b"\0")


def encode_descriptors(volume_id: uuid.UUID) -> bytes:
    """Namespace identification descriptors, CNS 03h: NGUID, UUID, command set."""
    parts = [(2, volume_id.bytes), (3, volume_id.bytes), (4, b"\0")]
    data = b"".join(bytes([kind, len(value), 0, 0]) + value for kind, value in parts)
    return data.ljust(IDENTIFY_BYTES, b"\0")


def _check(data: bytes) -> None:
    if len(data) != IDENTIFY_BYTES:
        raise ProtocolError(
            "identify.malformed", f"Identify data has {len(data)} bytes; allowed: {IDENTIFY_BYTES}"
        )
