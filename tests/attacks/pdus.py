"""NVMe/TCP PDUs for an adversary who can read and change every byte but knows no key.

This parser is deliberately separate from our codec: it has to read and create PDUs that our codec
refuses. Offsets are those of NVMe/TCP Transport 1.0 §3.6 and NVMe Base 2.0 §3.3.3.
"""

import enum
import struct
from dataclasses import dataclass, field, replace
from typing import Final, Self

COMMON_BYTES: Final = 8
PDU_BYTES_MAX: Final = 1 << 21
HEADER_DIGEST_FLAG: Final = 0x01
DATA_DIGEST_FLAG: Final = 0x02
DIGEST_BYTES: Final = 4
BLOCK: Final = 4160
DATA: Final = 4096
FORCE_UNIT_ACCESS: Final = 1 << 30

FLUSH, WRITE, READ, COMPARE, WRITE_ZEROES, DATASET = 0x00, 0x01, 0x02, 0x05, 0x08, 0x09
FLUSH_MILESTONE = 0x82
FABRICS: Final = 0x7F
IDENTIFY: Final = 0x06


class Way(enum.Enum):
    """Direction of travel."""

    TO_TARGET = "to target"
    TO_GATEWAY = "to gateway"


class Kind(enum.IntEnum):
    """PDU types."""

    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM = 0x02
    C2H_TERM = 0x03
    COMMAND = 0x04
    RESPONSE = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F6_3B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC32C: Final = _crc32c_table()


def crc32c(content: bytes | bytearray) -> bytes:
    """Return the CRC-32C (Castagnoli) as encoded in a digest."""
    value = 0xFFFF_FFFF
    for byte in content:
        value = value >> 8 ^ _CRC32C[(value ^ byte) & 0xFF]
    return (value ^ 0xFFFF_FFFF).to_bytes(4, "little")


def _number(at: int, form: str) -> property:
    """Return a property that reads and writes a header field as a number."""

    def get(pdu: "Pdu") -> int:
        value: int = struct.unpack_from("<" + form, pdu.header, at)[0]
        return value

    def put(pdu: "Pdu", value: int) -> None:
        struct.pack_into("<" + form, pdu.header, at, value)

    return property(get, put)


@dataclass(slots=True, eq=False)
class Pdu:
    """One PDU on one link. `encode` recomputes lengths and digests unless told otherwise."""

    link: int
    way: Way
    header: bytearray
    data: bytearray = field(default_factory=bytearray)
    entry: bytes = b""
    """Submission entry of the command this PDU is, answers or carries data of."""

    kind = _number(0, "B")
    flags = _number(1, "B")
    header_bytes = _number(2, "B")
    data_offset = _number(3, "B")
    pdu_bytes = _number(4, "I")
    # A command capsule's submission entry starts at byte 8.
    opcode = _number(8, "B")
    command_id = _number(10, "H")
    nsid = _number(12, "I")
    sgl_bytes = _number(40, "I")
    start_lba = _number(48, "Q")
    control = _number(56, "I")
    # A response capsule's completion entry starts at byte 8.
    result = _number(8, "Q")
    answered_id = _number(20, "H")
    status = _number(22, "H")
    # Data and R2T.
    data_command_id = _number(8, "H")
    tag = _number(10, "H")
    transfer_offset = _number(12, "I")
    transfer_bytes = _number(16, "I")

    @property
    def cid(self) -> int:
        """Command id, at the offset used by this kind of PDU."""
        if self.kind == Kind.COMMAND:
            return int(self.command_id)
        return int(self.answered_id if self.kind == Kind.RESPONSE else self.data_command_id)

    @property
    def blocks(self) -> int:
        """Number of blocks of a command."""
        return (int(self.control) & 0xFFFF) + 1

    @blocks.setter
    def blocks(self, count: int) -> None:
        self.control = int(self.control) & ~0xFFFF | count - 1

    def block(self, index: int) -> bytes:
        """Return a 4160-byte block of the data."""
        return bytes(self.data[index * BLOCK : (index + 1) * BLOCK])

    def set_block(self, index: int, block: bytes) -> None:
        """Replace one 4160-byte block of the data."""
        assert len(block) == BLOCK
        self.data[index * BLOCK : (index + 1) * BLOCK] = block

    def copy(self) -> Self:
        """Return an independent copy."""
        return replace(self, header=bytearray(self.header), data=bytearray(self.data))

    def sent(self, link: int | None = None, way: Way | None = None) -> Self:
        """Return a copy for another link or direction."""
        copy = self.copy()
        copy.link = self.link if link is None else link
        copy.way = way or self.way
        return copy

    def fit(self) -> Self:
        """Adjust the length fields to the data."""
        header_digest = DIGEST_BYTES if self.flags & HEADER_DIGEST_FLAG else 0
        data_digest = DIGEST_BYTES if self.flags & DATA_DIGEST_FLAG and self.data else 0
        if self.data and self.data_offset < len(self.header) + header_digest:
            self.data_offset = len(self.header) + header_digest
        gap = self.data_offset if self.data else len(self.header) + header_digest
        self.pdu_bytes = gap + len(self.data) + data_digest
        if self.kind in (Kind.H2C_DATA, Kind.C2H_DATA):
            self.transfer_bytes = len(self.data)
        return self

    def encode(self) -> bytes:
        """Return the bytes for the wire, with digests recomputed where the flags announce them."""
        out = bytearray(self.header)
        if self.flags & HEADER_DIGEST_FLAG:
            out += crc32c(self.header)
        if self.data:
            out += bytes(max(self.data_offset - len(out), 0)) + self.data
            if self.flags & DATA_DIGEST_FLAG:
                out += crc32c(self.data)
        return bytes(out)


def parse(link: int, way: Way, content: bytes) -> Pdu:
    """Parse one complete PDU; an invalid header counts as a header without data."""
    flags, header_bytes, data_offset = content[1], content[2], content[3]
    end = len(content)
    if flags & DATA_DIGEST_FLAG and end > header_bytes:
        end -= DIGEST_BYTES
    start = data_offset if header_bytes <= data_offset < end else end
    data = content[start:end] if data_offset else b""
    return Pdu(link, way, bytearray(content[:header_bytes]), bytearray(data))


def command(link: int, opcode: int, cid: int, *, lba: int = 0, blocks: int = 1, nsid: int = 1,
            data: bytes = b"", transfer: int = 0) -> Pdu:  # fmt: skip
    """Forge a command capsule; `transfer` bytes are transferred outside of it."""
    header = bytearray(72)
    header[0], header[2] = Kind.COMMAND, 72
    header[9] = 0x40
    pdu = Pdu(link, Way.TO_TARGET, header, bytearray(data))
    pdu.opcode, pdu.command_id, pdu.nsid, pdu.start_lba = opcode, cid, nsid, lba
    pdu.blocks = blocks
    if data or transfer:
        pdu.sgl_bytes = len(data) or transfer
        header[47] = 0x01 if data else 0x5A
    return pdu.fit()


def response(link: int, cid: int, *, result: int = 0, status: int = 0) -> Pdu:
    """Forge a completion."""
    header = bytearray(24)
    header[0], header[2] = Kind.RESPONSE, 24
    pdu = Pdu(link, Way.TO_GATEWAY, header)
    pdu.result, pdu.answered_id, pdu.status = result, cid, status
    return pdu.fit()


def data_pdu(link: int, kind: Kind, cid: int, data: bytes, *, offset: int = 0, tag: int = 0,
             flags: int = 0x04) -> Pdu:  # fmt: skip
    """Forge a data PDU for either direction."""
    header = bytearray(24)
    header[0], header[1], header[2] = kind, flags, 24
    way = Way.TO_TARGET if kind == Kind.H2C_DATA else Way.TO_GATEWAY
    pdu = Pdu(link, way, header, bytearray(data))
    pdu.data_command_id, pdu.tag, pdu.transfer_offset = cid, tag, offset
    return pdu.fit()


def r2t(link: int, cid: int, *, offset: int, length: int, tag: int = 0) -> Pdu:
    """Forge a request for data (R2T)."""
    pdu = data_pdu(link, Kind.R2T, cid, b"", offset=offset, tag=tag, flags=0)
    pdu.transfer_bytes = length
    pdu.pdu_bytes = 24
    return pdu
