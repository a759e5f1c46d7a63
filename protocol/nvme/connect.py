"""The fabrics Connect command: fields, 1024 bytes of data, and the queue ticket in them."""

import struct
import uuid
from dataclasses import dataclass

from sealane.errors import ProtocolError
from sealane.protocol.nvme.constants import (
    CONNECT_DATA_BYTES,
    SUBMISSION_BYTES,
    AdminOpcode,
    FabricsType,
)

TICKET_BYTES = 16
# Bytes 768 to 1023 of the Connect data are reserved by the specification.
TICKET_OFFSET = 768
_NQN_BYTES = 256
_SGL = 0x40
_SGL_IN_CAPSULE = 0x01
_DISABLE_FLOW_CONTROL = 0x04

# opcode, flags, command id, fabrics type, 19 reserved, SGL (address, length, 3 reserved, kind),
# record format, queue id, queue size, attributes, 1 reserved, keep-alive ms, 12 reserved
_COMMAND = struct.Struct("<BBHB19xQI3xBHHHBxI12x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """A Connect command with its data. `queue_size` counts entries; 0 is invalid."""

    command_id: int
    record_format: int = 0
    queue_id: int
    queue_size: int
    disable_flow_control: bool = True
    keep_alive_ms: int = 0
    host_id: uuid.UUID
    controller_id: int
    subsystem_nqn: str
    host_nqn: str
    ticket: bytes = bytes(TICKET_BYTES)
    header_digest: bool = False
    """Negotiated on this connection (ICReq), not part of the command; likewise the next."""
    data_digest: bool = False

    def encode(self) -> tuple[bytes, bytes]:
        """Return submission entry and data."""
        entry = _COMMAND.pack(
            AdminOpcode.FABRICS,
            _SGL,
            self.command_id,
            FabricsType.CONNECT,
            0,
            CONNECT_DATA_BYTES,
            _SGL_IN_CAPSULE,
            self.record_format,
            self.queue_id,
            self.queue_size - 1,
            _DISABLE_FLOW_CONTROL if self.disable_flow_control else 0,
            self.keep_alive_ms,
        )
        data = bytearray(CONNECT_DATA_BYTES)
        data[0:16] = self.host_id.bytes
        data[16:18] = self.controller_id.to_bytes(2, "little")
        data[256:512] = self.subsystem_nqn.encode().ljust(_NQN_BYTES, b"\0")
        data[512:768] = self.host_nqn.encode().ljust(_NQN_BYTES, b"\0")
        data[TICKET_OFFSET : TICKET_OFFSET + TICKET_BYTES] = self.ticket
        return entry, bytes(data)


def decode_connect(entry: bytes, data: bytes) -> Connect:
    """Decode a Connect capsule; ProtocolError if it isn't one or its data is malformed."""
    if len(entry) != SUBMISSION_BYTES or len(data) != CONNECT_DATA_BYTES:
        raise ProtocolError(
            "connect.malformed",
            f"Connect carries {len(data)} bytes of data; allowed: {CONNECT_DATA_BYTES}",
        )
    (
        opcode,
        _,
        command_id,
        fabrics_type,
        _,
        length,
        _,
        record_format,
        queue_id,
        size,
        flags,
        kato,
    ) = _COMMAND.unpack(entry)
    if (opcode, fabrics_type) != (AdminOpcode.FABRICS, FabricsType.CONNECT):
        raise ProtocolError(
            "connect.expected", f"first command has opcode {opcode:#04x}; allowed: Connect"
        )
    if length != CONNECT_DATA_BYTES:
        raise ProtocolError("connect.malformed", f"Connect names {length} bytes of data")
    return Connect(
        command_id=command_id,
        record_format=record_format,
        queue_id=queue_id,
        queue_size=size + 1,
        disable_flow_control=bool(flags & _DISABLE_FLOW_CONTROL),
        keep_alive_ms=kato,
        host_id=uuid.UUID(bytes=data[0:16]),
        controller_id=int.from_bytes(data[16:18], "little"),
        subsystem_nqn=_name(data[256:512]),
        host_nqn=_name(data[512:768]),
        ticket=data[TICKET_OFFSET : TICKET_OFFSET + TICKET_BYTES],
    )


def _name(field: bytes) -> str:
    name, end, rest = field.partition(b"\0")
    if not end or rest.strip(b"\0"):
        raise ProtocolError("connect.malformed", "a name in the Connect data is not NUL-terminated")
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(
            "connect.malformed", "a name in the Connect data isn't UTF-8"
        ) from error
