"""In-band authentication of NVMe over Fabrics: DH-HMAC-CHAP, both roles, without I/O.

NVMe Base 2.0 §8.13 (TP 8006). One state machine authenticates one queue; its owner carries the
messages in Authentication Send and Authentication Receive commands, limits the time and closes the
connection after a failure. Secure channel concatenation is not supported.
"""

from sealane.protocol.nvme.authentication.command import (
    AUTHENTICATION_REQUIRED,
    CHANNEL_REQUIRED,
    MESSAGE_BYTES_MAX,
    AuthenticationCommand,
    decode_authentication,
)
from sealane.protocol.nvme.authentication.controller import ControllerAuthentication
from sealane.protocol.nvme.authentication.errors import AuthenticationError, Explanation
from sealane.protocol.nvme.authentication.groups import DhGroup
from sealane.protocol.nvme.authentication.host import HostAuthentication
from sealane.protocol.nvme.authentication.secret import HashFunction, HostSecret

__all__ = [
    "AUTHENTICATION_REQUIRED",
    "CHANNEL_REQUIRED",
    "MESSAGE_BYTES_MAX",
    "AuthenticationCommand",
    "AuthenticationError",
    "ControllerAuthentication",
    "DhGroup",
    "Explanation",
    "HashFunction",
    "HostAuthentication",
    "HostSecret",
    "decode_authentication",
]
