"""The Unix sockets from which a job fetches the rings of a granted session (ring-abi.md).

The job connects, sends the 16-byte token of its grant and receives five descriptors by SCM_RIGHTS.
A token is single-use, short-lived, and good for the user of its session only. Before that the job
has introduced itself with 16 zero bytes, and received the token that identifies its process in
calls.
"""

import asyncio
import functools
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

from sealane.daemon.runtime.door import Admit, Caller, NoteRefused, door, own_user
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError

TOKEN_BYTES = 16
INTRODUCTION = bytes(TOKEN_BYTES)
"""Sent instead of a token by a process that has none."""
INTRODUCED = b"\x02"
"""Followed by the job token."""
GRANTED = b"\x01"
"""Followed by nothing; comes with the descriptors of region, submission, completion, doorbell and
call."""
REFUSED = b"\x00"

HELLO_TIMEOUT_SECONDS = 5.0
"""Time limit for a job that connects and sends nothing, because it occupies a thread."""

Claim = Callable[[bytes, int], tuple[int, int, int, int, int] | None]
Introduce = Callable[[socket.socket], bytes]
R = TypeVar("R")


def serve(
    path: Path,
    claim: Claim,
    introduce: Introduce,
    *,
    admit: Admit = own_user,
    note_refused: NoteRefused = lambda _caller, _error: None,
    mode: int = 0o600,
) -> AbstractAsyncContextManager[None]:
    """Serve `path` for the duration of the block, to whom `admit` admits.

    `claim` redeems a token of a user or returns None; `introduce` gives the process that made a
    connection its job token, or raises UnavailableError. Both run in the event loop.

    Raises UsageError for a path that can't be a socket's, UnavailableError for one that is in use.
    """
    loop = asyncio.get_running_loop()

    def in_loop(function: Callable[[], R]) -> R:
        async def call() -> R:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), loop).result()

    def answer(caller: Caller) -> None:
        token = caller.receive_exactly(TOKEN_BYTES, timeout_seconds=HELLO_TIMEOUT_SECONDS)
        if token == INTRODUCTION:
            answer = in_loop(functools.partial(_introduced, caller.socket, introduce))
            caller.socket.send(answer, socket.MSG_NOSIGNAL)
            return
        descriptors = in_loop(functools.partial(claim, token, caller.user))
        if descriptors is None:
            caller.socket.send(REFUSED, socket.MSG_NOSIGNAL)
            return
        try:
            socket.send_fds(caller.socket, [GRANTED], list(descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    return door(path, answer, admit=admit, note_refused=note_refused, mode=mode)


def _introduced(connection: socket.socket, introduce: Introduce) -> bytes:
    try:
        return INTRODUCED + introduce(connection)
    except UnavailableError as error:
        get_logger().warning("job_refused", reason=error.reason, message=error.args[0])
        return REFUSED
