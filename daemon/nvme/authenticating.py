"""Authentication of a host on its queues, and the answers to Connect that demand it."""

import secrets

from sealane.daemon.nvme.exported import Exported
from sealane.errors import VerificationError
from sealane.protocol.nvme.authentication import (
    AUTHENTICATION_REQUIRED,
    ControllerAuthentication,
)
from sealane.protocol.nvme.command import Answer, encode_completion
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import PduKind
from sealane.protocol.nvme.in_band import QueueAuthentication
from sealane.transport.nvme.stream import PduFaultError, PduStream

SEQUENCE_ERROR = 2  # fatal error status for a PDU out of sequence


def make_authentication(exported: Exported, connect: Connect) -> ControllerAuthentication | None:
    """Return the state machine of one queue; None if this host needs no authentication."""
    known = exported.secrets_of(connect.host_nqn)
    if known is None:
        return None
    secret, controller_secret = known
    return ControllerAuthentication(
        host_nqn=connect.host_nqn,
        subsystem_nqn=connect.subsystem_nqn,
        secret=secret,
        controller_secret=controller_secret,
        random=secrets.token_bytes,
    )


async def authenticate_queue(stream: PduStream, machine: ControllerAuthentication | None) -> None:
    """Answer authentication commands on an I/O queue until its host is authenticated.

    Each queue authenticates: otherwise only the admin queue's connection would be bound to the
    host's secret, and any user of a shared machine could send a Connect in that host's name.
    VerificationError `authentication.failed`; PduFaultError for any other PDU.
    """
    queue = QueueAuthentication(machine)
    while not queue.is_open:
        capsule, data = await stream.receive()
        if capsule.kind != PduKind.CAPSULE_CMD:
            raise PduFaultError(
                f"PDU type {capsule.kind:#04x} before authentication", fatal_status=SEQUENCE_ERROR
            )
        await send_answer(stream, queue.handle(capsule.entry, data))
        if queue.is_ending:
            raise VerificationError("authentication.failed", "the host failed to authenticate")


async def send_answer(stream: PduStream, answer: Answer) -> None:
    """Send an answer: its data, if any, then its response."""
    parts = [stream.encode_data(answer.command_id, answer.data)] if answer.data else []
    await stream.send(*parts, stream.encode_response(answer.completion))


async def respond(stream: PduStream, command_id: int, *, status: int = 0, result: int = 0) -> None:
    """Send a response without data."""
    completion = encode_completion(command_id, status=status, result=result)
    await stream.send(stream.encode_response(completion))


def connect_result(controller_id: int, *, authentication: bool) -> int:
    """Return the result of a successful Connect."""
    return controller_id | (AUTHENTICATION_REQUIRED if authentication else 0)
