"""Time-outs and errors of all calls to the daemon."""

import contextlib
from collections.abc import Iterator
from typing import Final

import grpc

from sealane.errors import UsageError
from sealane.protocol.status import error_of
from sealane.reasons import ReasonId

CALL_SECONDS: Final = 60.0
"""Time-out of a call that has none of its own."""


@contextlib.contextmanager
def translated(peer: str = "sealaned") -> Iterator[None]:
    """Raise a failed call to `peer` inside the block as the Sealane error it stands for."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer=peer) from error


@contextlib.contextmanager
def sayable(reason: ReasonId) -> Iterator[None]:
    """Raise UsageError `reason` for values that don't fit the request's fields."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(reason, str(error)) from error
