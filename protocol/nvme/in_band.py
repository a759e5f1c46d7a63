"""Authentication commands of one queue: Authentication Send and Receive (NVMe Base 2.0 §6.1, §6.2).

The messages themselves belong to the authentication machine.
"""

from typing import Protocol

from sealane.protocol.nvme.command import Command, RefusedError
from sealane.protocol.nvme.constants import AUTHENTICATION_BYTES_MAX, FabricsType, Status

_PROTOCOL = (0x01, 0x01, 0xE9)  # protocol-specific fields and the security protocol: NVMe


class Authentication(Protocol):
    """The controller's side of one authentication."""

    @property
    def is_authenticated(self) -> bool:
        """Whether the host has proved its secret."""

    @property
    def has_failed(self) -> bool:
        """Whether the connection must end."""

    def send(self, data: bytes) -> None:
        """Take a message of the host."""

    def receive(self, length: int) -> bytes:
        """Return the message the host asks for, of at most `length` bytes."""


class QueueAuthentication:
    """Gates a queue until its host is authenticated; without a machine it always is."""

    def __init__(self, machine: Authentication | None) -> None:
        self._machine = machine
        self._is_open = machine is None

    @property
    def is_open(self) -> bool:
        """Whether the queue takes other commands. A later authentication doesn't close it."""
        return self._is_open

    @property
    def has_failed(self) -> bool:
        """Whether the connection must end after the answer that is due."""
        return self._machine is not None and self._machine.has_failed

    def execute(self, command: Command) -> bytes | None:
        """Execute an authentication command and return its data; None for another command."""
        fabrics_type = command.entry[4]
        if fabrics_type not in {
            FabricsType.AUTHENTICATION_SEND,
            FabricsType.AUTHENTICATION_RECEIVE,
        }:
            return None
        if self._machine is None:
            raise RefusedError(Status.INVALID_OPCODE)
        length = command.words[1]
        is_sized = 1 <= length <= AUTHENTICATION_BYTES_MAX
        if tuple(command.entry[41:44]) != _PROTOCOL or not is_sized:
            raise RefusedError(Status.INVALID_FIELD)
        if fabrics_type == FabricsType.AUTHENTICATION_SEND:
            self._machine.send(command.in_capsule(length))
            data = b""
        else:
            command.check_room(length)
            data = self._machine.receive(length)
        self._is_open = self._is_open or self._machine.is_authenticated
        return data
