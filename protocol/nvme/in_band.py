"""Authentication commands of one queue, before and after its host is authenticated."""

from typing import Protocol

from sealane.errors import ProtocolError
from sealane.protocol.nvme.authentication import (
    AuthenticationCommand,
    AuthenticationError,
    decode_authentication,
)
from sealane.protocol.nvme.command import Answer, Command, RefusedError, encode_completion
from sealane.protocol.nvme.constants import AdminOpcode, Status

_KINDS = (AuthenticationCommand.SEND, AuthenticationCommand.RECEIVE)


class Authentication(Protocol):
    """The controller's side of an authentication (`ControllerAuthentication`)."""

    @property
    def is_authenticated(self) -> bool:
        """Whether the host has authenticated."""

    @property
    def has_failed(self) -> bool:
        """Whether the authentication has failed permanently."""

    @property
    def has_message(self) -> bool:
        """Whether the host is expected to fetch a message."""

    def send(self, data: bytes) -> None:
        """Process a message of the host."""

    def receive(self, length: int) -> bytes:
        """Return the message that the host asks for, of at most `length` bytes."""


class QueueAuthentication:
    """Gates a queue until its host is authenticated; without `Authentication` it is always open."""

    def __init__(self, machine: Authentication | None) -> None:
        self._machine = machine

    @property
    def is_open(self) -> bool:
        """Whether the queue accepts other commands."""
        return self._machine is None or self._machine.is_authenticated

    @property
    def is_ending(self) -> bool:
        """Whether it failed and the host has received all messages: close the connection."""
        machine = self._machine
        return machine is not None and machine.has_failed and not machine.has_message

    def handle(self, entry: bytes, data: bytes) -> Answer:
        """Answer a command on a queue that accepts only authentication commands for now."""
        command = Command.decode(entry, data)
        status, answer = Status.SUCCESS, None
        try:
            command.check_flags()
            if command.opcode == AdminOpcode.FABRICS:
                answer = self.execute(command)
            if answer is None:
                status = Status.AUTHENTICATION_REQUIRED
        except RefusedError as error:
            status = error.status
        completion = encode_completion(command.command_id, status=status)
        return Answer(command_id=command.command_id, completion=completion, data=answer or b"")

    def execute(self, command: Command) -> bytes | None:
        """Execute an authentication command and return its data; None for another command."""
        if command.entry[4] not in _KINDS:
            return None
        if self._machine is None:
            raise RefusedError(Status.INVALID_OPCODE)
        try:
            decoded = decode_authentication(command.entry)
        except ProtocolError:
            raise RefusedError(Status.INVALID_FIELD) from None
        if decoded.kind == AuthenticationCommand.RECEIVE:
            command.check_room(decoded.length)
            return self._machine.receive(decoded.length)
        message = command.in_capsule(decoded.length)
        try:
            self._machine.send(message)
        except AuthenticationError:
            # The command itself succeeded; the host fetches the failure, or the connection ends.
            return b""
        return b""
