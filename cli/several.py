"""Several daemons of this machine in one command: `--also`."""

import argparse
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TypeVar

from sealane.cli.traced import traceparent_of
from sealane.client import Client, connect
from sealane.client.connection import default_socket
from sealane.errors import Error

_Result = TypeVar("_Result")


def add_also(parser: argparse.ArgumentParser) -> None:
    """Add the option for more daemons than one."""
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PATH",
        help="socket of another daemon on this machine to show with it; may be repeated",
    )


def first(options: argparse.Namespace) -> str:
    """Return the socket of the command's own daemon."""
    return os.fspath(options.socket or default_socket())


def others(options: argparse.Namespace) -> list[str]:
    """Return the sockets of `--also`: each once, and without the command's own daemon."""
    paths = {os.path.realpath(first(options)): ""}
    for path in options.also:
        paths.setdefault(os.path.realpath(path), path)
    return [path for path in paths.values() if path]


@contextlib.asynccontextmanager
async def daemons(
    client: Client, options: argparse.Namespace
) -> AsyncIterator[Mapping[str, Client]]:
    """Connect to the daemons of `--also`, too; yields all by socket. Raises as `connect` does."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {first(options): client}
        for path in others(options):
            clients[path] = await stack.enter_async_context(other(path, options))
        yield clients


@contextlib.asynccontextmanager
async def other(path: str, options: argparse.Namespace) -> AsyncIterator[Client]:
    """Connect to another daemon, in the command's trace; raises as `connect` does."""
    async with connect(path, traceparent=traceparent_of(options)) as client:
        yield client


async def named(path: str, call: Awaitable[_Result]) -> _Result:
    """Await a call; an error says which daemon's it is."""
    try:
        return await call
    except Error as error:
        error.args = (f"daemon {path}: {error.args[0]}", *error.args[1:])
        raise
