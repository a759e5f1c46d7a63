"""Admin and fabrics commands as received, and their answers."""

import struct
from dataclasses import dataclass
from typing import Self

from sealane.errors import ProtocolError
from sealane.protocol.nvme.constants import DO_NOT_RETRY, SUBMISSION_BYTES, Status

_SGL_TRANSPORT = 0x5A
_SGL_IN_CAPSULE = 0x01
_FLAGS = 0x40  # SGLs, not fused
_FLAGS_MASK = 0xC3

# opcode, flags, command id, namespace id, 16 unused, SGL (address, length, kind), CDW10 to CDW15
_ENTRY = struct.Struct("<BBHI16xQI3xB6I")
_COMPLETION = struct.Struct("<QHHHH")


class RefusedError(Exception):
    """A command must be answered with the error `status`."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a command: data first, if any, then the completion entry."""

    command_id: int
    completion: bytes
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A submission entry with the data of its capsule. `words` are CDW10 to CDW15."""

    opcode: int
    flags: int
    command_id: int
    nsid: int
    sgl_offset: int
    sgl_length: int
    sgl_kind: int
    words: tuple[int, ...]
    entry: bytes
    data: bytes

    @classmethod
    def decode(cls, entry: bytes, data: bytes) -> Self:
        """Split an entry into its fields; ProtocolError for another length."""
        if len(entry) != SUBMISSION_BYTES:
            raise ProtocolError("pdu.malformed", f"a submission queue entry of {len(entry)} bytes")
        opcode, flags, command_id, nsid, offset, length, kind, *words = _ENTRY.unpack(entry)
        return cls(
            opcode=opcode,
            flags=flags,
            command_id=command_id,
            nsid=nsid,
            sgl_offset=offset,
            sgl_length=length,
            sgl_kind=kind,
            words=tuple(words),
            entry=entry,
            data=data,
        )

    def check_flags(self) -> None:
        """Refuse fused commands and PRPs, which don't exist in fabrics."""
        if self.flags & _FLAGS_MASK != _FLAGS:
            raise RefusedError(Status.INVALID_FIELD)

    def check_room(self, length: int) -> None:
        """Refuse unless the host has room for `length` bytes of data."""
        if not length:
            return
        if self.sgl_kind != _SGL_TRANSPORT:
            raise RefusedError(Status.SGL_TYPE_INVALID)
        if self.sgl_length < length:
            raise RefusedError(Status.SGL_LENGTH_INVALID)

    def in_capsule(self, length: int) -> bytes:
        """Return the command's data; refuse unless its capsule holds `length` bytes."""
        if self.sgl_kind != _SGL_IN_CAPSULE:
            raise RefusedError(Status.SGL_TYPE_INVALID)
        if self.sgl_offset or self.sgl_length != length or len(self.data) != length:
            raise RefusedError(Status.SGL_LENGTH_INVALID)
        return self.data


def encode_completion(
    command_id: int, *, status: int = 0, result: int = 0, queue_head: int = 0, retry: bool = False
) -> bytes:
    """Return a completion entry; errors say "do not retry" unless `retry`, or they are temporary.

    A host that must not retry a Connect gives up its controller: Linux then fails all I/O.
    """
    final = status not in (0, Status.CONNECT_BUSY) and not retry
    field = status | DO_NOT_RETRY if final else status
    return _COMPLETION.pack(result, queue_head, 0, command_id, field << 1)


def says_do_not_retry(entry: bytes) -> bool:
    """Return whether a completion entry says that repeating the command will not succeed."""
    *_, field = _COMPLETION.unpack(entry)
    return bool(field >> 1 & DO_NOT_RETRY)


def decode_completion(entry: bytes) -> tuple[int, int, int]:
    """Return command id, status (type and code) and result of a completion entry."""
    result, _, _, command_id, field = _COMPLETION.unpack(entry)
    return command_id, (field >> 1) & 0x7FF, result
