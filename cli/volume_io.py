"""`sealanectl volume read|write`: copy a volume's bytes to and from the standard streams.

The command attaches the volume to a host NQN of its own, and detaches it at the end.
"""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator
from typing import BinaryIO, Final

from sealane.client import Client, Disk
from sealane.errors import UsageError

_STEP_BYTES: Final = 1 << 20


def add_range(parser: argparse.ArgumentParser, *, length_default: str) -> None:
    """Add --offset and --length."""
    parser.add_argument("--offset", type=_count, default=0, metavar="BYTES", help="default: 0")
    parser.add_argument("--length", type=_count, metavar="BYTES", help=f"default: {length_default}")


async def volume_read(client: Client, options: argparse.Namespace, output: object) -> None:
    """Copy a range of the volume to standard output."""
    async with _opened(client, options.name) as disk:
        end = disk.size if options.length is None else options.offset + options.length
        if not options.offset <= end <= disk.size:
            raise _outside(options.offset, end, disk)
        for offset in range(options.offset, end, _STEP_BYTES):
            data = await disk.read(offset, min(_STEP_BYTES, end - offset))
            await asyncio.to_thread(sys.stdout.buffer.write, data)
        await asyncio.to_thread(sys.stdout.buffer.flush)


async def volume_write(client: Client, options: argparse.Namespace, output: object) -> None:
    """Copy standard input to the volume and flush."""
    async with _opened(client, options.name) as disk:
        offset = options.offset
        end = disk.size if options.length is None else offset + options.length
        if not offset <= end <= disk.size:
            raise _outside(offset, end, disk)
        while data := await _input(sys.stdin.buffer, end - offset, options.length is None):
            if len(data) > end - offset:
                raise _outside(offset, offset + len(data), disk)
            offset += await disk.write(offset, data)
        if options.length is not None and offset < end:
            raise UsageError(
                "input.short", f"standard input ended {end - offset} bytes before --length"
            )
        await disk.flush()


async def _input(source: BinaryIO, left: int, must_end: bool) -> bytes:
    # One byte more than fits shows that the input is too long.
    return await asyncio.to_thread(source.read, min(_STEP_BYTES, left + must_end))


@contextlib.asynccontextmanager
async def _opened(client: Client, name: str) -> AsyncIterator[Disk]:
    host_nqn = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid4()}"
    volume = await client.volumes.attach(name, host_nqn=host_nqn)
    try:
        async with client.open(volume) as disk:
            yield disk
    finally:
        await client.volumes.detach(name)


def _outside(offset: int, end: int, disk: Disk) -> UsageError:
    return UsageError(
        "disk.range", f"bytes {offset} to {end}; allowed: inside the volume's {disk.size} bytes"
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number of bytes")
    return int(text)
