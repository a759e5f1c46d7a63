"""Runs in-band authentication on a queue, as its host."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sealane.errors import Error
from sealane.protocol.nvme.authentication import (
    MESSAGE_BYTES_MAX,
    AuthenticationCommand,
    AuthenticationError,
    HostAuthentication,
    HostSecret,
)

# (entry, data, room for the response's data) → that data and the result
Submit = Callable[[bytes, bytes, int], Awaitable[tuple[bytes, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Secrets of a host for one subsystem; with `controller_secret` it checks the controller."""

    secret: HostSecret
    controller_secret: HostSecret | None = None


async def authenticate(
    submit: Submit, *, host_nqn: str, subsystem_nqn: str, credentials: Credentials
) -> None:
    """Run one transaction. AuthenticationError, or an error of `submit`."""
    machine = HostAuthentication(
        host_nqn=host_nqn,
        subsystem_nqn=subsystem_nqn,
        secret=credentials.secret,
        controller_secret=credentials.controller_secret,
        random=secrets.token_bytes,
    )
    try:
        while not machine.is_authenticated:
            if machine.has_message:
                await _send(submit, machine.take())
            else:
                receive = AuthenticationCommand.RECEIVE
                data, _ = await submit(_entry(receive, MESSAGE_BYTES_MAX), b"", MESSAGE_BYTES_MAX)
                machine.receive(data)
    except AuthenticationError as failure:
        if machine.has_message:
            try:
                await _send(submit, machine.take())
            except Error as error:
                failure.add_note(f"the controller could not be notified of the failure: {error}")
        raise


async def _send(submit: Submit, message: bytes) -> None:
    await submit(_entry(AuthenticationCommand.SEND, len(message)), message, 0)


def _entry(kind: int, length: int) -> bytes:
    return AuthenticationCommand(command_id=0, kind=kind, length=length).encode()
