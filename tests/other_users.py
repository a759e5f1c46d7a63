"""Jobs that run as other users than the daemon: processes that give up root before they connect.

Their interpreter may be out of other users' reach, so everything is imported first.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

import pytest

from patience import PATIENCE_SECONDS

ALICE, BOB, MALLORY = 54_321, 54_322, 54_323
"""Users that no machine has."""
GROUP = 54_400

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as other users")

_FIRST = """
import asyncio, concurrent.futures.thread, contextlib, ctypes, encodings.idna, errno, json, os
import signal, socket, sys, threading
import grpc
import sealane.client.connection as connection
from pathlib import Path
from sealane.client import connect, grants, session, translated
from sealane.errors import Error, UsageError, VerificationError
from sealane.protocol.refusal import refusal_of
from sealane.protocol.v1 import nodes_pb2, sessions_pb2, sessions_pb2_grpc, volumes_pb2_grpc

uid, gid, groups, *arguments = json.loads(sys.argv[1])
PATIENCE_SECONDS = {patience}
os.setgroups(groups)
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)


def say(value):
    print(json.dumps(value), flush=True)


def heard():
    return json.loads(sys.stdin.readline())


async def reason(call):
    try:
        with translated():
            await call
    except Error as error:
        return error.reason
    return "served"


async def first(call):
    async for _ in call:
        return


async def conversation(method):
    # Nothing is written: if a message can't be sent because the call was refused meanwhile, gRPC's
    # client says "internal error" in place of the refusal.
    call = method(timeout=PATIENCE_SECONDS)
    with contextlib.suppress(Exception):
        await call.done_writing()
    await first(call)


async def refused(socket):
    try:
        async with connect(socket):
            return "served"
    except Error as error:
        return error.reason


async def main():
"""


class Job:
    """A process of a user that runs the body of an asynchronous function.

    In it, `arguments` holds what was given, `say` sends a value here, `heard()` returns one sent to
    it, `reason(call)` the reason for which a call fails, `refused(socket)` for which connecting to
    a daemon does. `first(call)` awaits the first message of a stream; `conversation(method)` calls
    a method to which both sides may write, and awaits its first.
    """

    def __init__(
        self,
        uid: int,
        body: str,
        *arguments: Any,
        gid: int | None = None,
        groups: Sequence[int] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        lines = [f"    {line}" for line in body.strip("\n").splitlines()]
        script = _FIRST.replace("{patience}", str(PATIENCE_SECONDS)) + "\n".join(lines)
        given = [uid, uid if gid is None else gid, list(groups), *arguments]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", f"{script}\n\nasyncio.run(main())", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def said(self) -> Any:
        """Return the next value that the job says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the job ended: {self.process.wait(PATIENCE_SECONDS)}"
        return json.loads(line)

    def tell(self, value: Any) -> None:
        """Send the job a value."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()


def answer_of(uid: int, body: str, *arguments: Any, **how: Any) -> Any:
    """Run a job until it has said one value."""
    with Job(uid, body, *arguments, **how) as job:
        return job.said()
