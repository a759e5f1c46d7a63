"""The discovery log page, 70h (NVMe Base 2.0 §5.16.1.23)."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sealane.protocol.nvme.constants import QUEUE_DEPTH_MAX

_RECORD_BYTES = 1024
_TCP = 3
_IPV4 = 1
_IPV6 = 2
_NVM_SUBSYSTEM = 2
_CURRENT_DISCOVERY = 3
_FLOW_CONTROL_OPTIONAL = 0x04  # makes no statement about a secure channel
_DYNAMIC = 0xFFFF
_SAME_LOG_EVERYWHERE = 0x01
_PERSISTENT = 0x02

# transport, family, subsystem type, requirements, port, controller, admin queue size, flags
_RECORD = struct.Struct("<BBBBHHHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryRecord:
    """A subsystem at an address. The current discovery subsystem has its own record."""

    subsystem_nqn: str
    traddr: str
    trsvcid: int
    port_id: int = 1
    is_discovery: bool = False


def encode_discovery_log(records: Sequence[DiscoveryRecord], *, generation: int) -> bytes:
    """Encode the log; `generation` (GENCTR) changes whenever the records change."""
    header = struct.pack("<QQH", generation, len(records), 0).ljust(_RECORD_BYTES, b"\0")
    return header + b"".join(_encode(record) for record in records)


def _encode(record: DiscoveryRecord) -> bytes:
    data = bytearray(_RECORD_BYTES)
    _RECORD.pack_into(
        data,
        0,
        _TCP,
        _IPV6 if ":" in record.traddr else _IPV4,
        _CURRENT_DISCOVERY if record.is_discovery else _NVM_SUBSYSTEM,
        _FLOW_CONTROL_OPTIONAL,
        record.port_id,
        _DYNAMIC,
        QUEUE_DEPTH_MAX,
        _SAME_LOG_EVERYWHERE | _PERSISTENT if record.is_discovery else 0,
    )
    data[32:64] = str(record.trsvcid).encode("ascii").ljust(32)
    data[256:512] = record.subsystem_nqn.encode().ljust(256, b"\0")
    data[512:768] = record.traddr.encode("ascii").ljust(256)
    return bytes(data)
