"""What all calls of the daemon have in common: how long they may take, what their failures are."""

import contextlib
from collections.abc import Iterator
from typing import Final

import grpc

from sealane.errors import UsageError
from sealane.protocol.status import error_of
from sealane.reasons import ReasonId

CALL_SECONDS: Final = 60.0
"""The most that a call may take, unless it says so itself."""


@contextlib.contextmanager
def translated(peer: str = "sealaned") -> Iterator[None]:
    """Turn a failed call of `peer` inside the block into the Sealane error it stands for."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer=peer) from error


@contextlib.contextmanager
def sayable(reason: ReasonId) -> Iterator[None]:
    """Raise UsageError `reason` for values that no request can have."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(reason, str(error)) from error
