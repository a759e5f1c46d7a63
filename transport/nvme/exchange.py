"""One command on a connection, and the PDUs that may answer it."""

import struct
from dataclasses import dataclass, field

from sealane import _native
from sealane.protocol.nvme.command import decode_completion, says_do_not_retry
from sealane.protocol.nvme.constants import PduKind
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.stream import PduFaultError, PduStream

# Fatal error statuses of a termination request PDU.
HEADER_FIELD = 1
SEQUENCE = 2
OUT_OF_RANGE = 4
_LAST = 0x04
_SUCCESS = 0x08


@dataclass(slots=True, kw_only=True)
class Answer:
    """Collects the answer to a command with room for `room` bytes of data."""

    command_id: int
    room: int = 0
    data: bytearray = field(default_factory=bytearray)
    result: int = 0

    def take(self, header: _native.PduHeader, payload: bytes) -> bool:
        """Process one PDU; return True when the command is complete.

        PduFaultError if the PDU is not allowed here, NvmeStatusError if the command failed.
        """
        if header.kind == PduKind.C2H_DATA:
            if header.cid != self.command_id:
                raise PduFaultError("data for another command", fatal_status=HEADER_FIELD, offset=8)
            if header.offset != len(self.data):
                raise PduFaultError("data at an unexpected offset", fatal_status=SEQUENCE)
            if len(self.data) + len(payload) > self.room:
                raise PduFaultError("more data than requested", fatal_status=OUT_OF_RANGE)
            self.data += payload
            if header.flags & _SUCCESS and not header.flags & _LAST:
                raise PduFaultError(
                    "success before the last data", fatal_status=HEADER_FIELD, offset=1
                )
            # A controller that sends no completion entry indicates success in the last data PDU
            # (SUCCESS).
            return bool(header.flags & _SUCCESS)
        if header.kind != PduKind.CAPSULE_RESP:
            raise PduFaultError(f"unexpected PDU {header.kind:#04x}", fatal_status=SEQUENCE)
        answered, status, self.result = decode_completion(header.entry)
        if answered != self.command_id:
            raise PduFaultError(
                "completion of another command", fatal_status=HEADER_FIELD, offset=20
            )
        if status:
            raise NvmeStatusError(status, is_final=says_do_not_retry(header.entry))
        return True


async def exchange(
    stream: PduStream, entry: bytes, *, data: bytes = b"", room: int = 0
) -> tuple[bytes, int]:
    """Send a command and wait for its end; nothing else may be in flight on the connection."""
    command_id = struct.unpack_from("<H", entry, 2)[0]
    answer = Answer(command_id=command_id, room=room)
    await stream.send(stream.encode_command(entry, data))
    while not answer.take(*await stream.receive()):
        pass
    return bytes(answer.data), answer.result
