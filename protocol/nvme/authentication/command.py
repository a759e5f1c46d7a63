"""The commands that carry authentication messages, and the Connect result that requires them.

NVMe Base 2.0 §6.1 and §6.2 (Authentication Receive and Send), §6.3 (Connect response).
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

from sealane.errors import ProtocolError

# Bits in the result of Connect, above the controller id: AUTHREQ.ATR and AUTHREQ.ASCR.
AUTHENTICATION_REQUIRED = 1 << 17
CHANNEL_REQUIRED = 1 << 18

# The largest message, a Reply with SHA-512 and ffdhe8192, has 1168 bytes; hosts receive up to 4096.
MESSAGE_BYTES_MAX = 4096

_SECURITY_PROTOCOL = 0xE9  # NVMe
_PROTOCOL_SPECIFIC = 0x01
_FABRICS = 0x7F
_SGL = 0x40
_SGL_IN_CAPSULE = 0x01
_SGL_TRANSPORT = 0x5A
_ENTRY = struct.Struct("<BBHB19xQI3xBxBBBI16x")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticationCommand:
    """Authentication Send or Receive. `length` is TL or AL: the bytes sent, or room for them."""

    SEND: ClassVar[int] = 0x05  # fabrics command types
    RECEIVE: ClassVar[int] = 0x06

    command_id: int
    kind: int
    length: int

    def encode(self) -> bytes:
        """Return the submission entry; the message of a Send is in the capsule."""
        return _ENTRY.pack(
            _FABRICS,
            _SGL,
            self.command_id,
            self.kind,
            0,
            self.length,
            _SGL_IN_CAPSULE if self.kind == self.SEND else _SGL_TRANSPORT,
            _PROTOCOL_SPECIFIC,
            _PROTOCOL_SPECIFIC,
            _SECURITY_PROTOCOL,
            self.length,
        )


def decode_authentication(entry: bytes) -> AuthenticationCommand:
    """Decode the entry of either command. ProtocolError: answer it with Invalid Field."""
    opcode, _, command_id, kind, _, _, _, spsp0, spsp1, protocol, length = _ENTRY.unpack(entry)
    known = kind in {AuthenticationCommand.SEND, AuthenticationCommand.RECEIVE}
    if opcode != _FABRICS or not known:
        raise ProtocolError("authentication.command", "not an authentication command")
    if (protocol, spsp0, spsp1) != (
        _SECURITY_PROTOCOL,
        _PROTOCOL_SPECIFIC,
        _PROTOCOL_SPECIFIC,
    ):
        raise ProtocolError(
            "authentication.command", f"security protocol {protocol:#04x}; allowed: 0xe9"
        )
    if not 0 < length <= MESSAGE_BYTES_MAX:
        raise ProtocolError(
            "authentication.command", f"{length} bytes; allowed: 1 to {MESSAGE_BYTES_MAX}"
        )
    return AuthenticationCommand(command_id=command_id, kind=kind, length=length)
