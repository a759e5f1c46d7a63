"""A TCP link between a host and a gateway, as a process: `python link.py PORT`, to a loopback port.

It prints its own port. Stopped with SIGSTOP it is a network that was cut: nothing gets through, no
end is told, and what is on its way arrives once the process goes on.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Link:
    """A running link: its port, and the process to stop."""

    port: int
    process_id: int


@contextlib.contextmanager
def link_to(port: int) -> Iterator[Link]:
    """Run a link to a loopback port until the end of the block."""
    command = [sys.executable, Path(__file__), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Link(int(process.stdout.readline()), process.pid)
        finally:
            process.kill()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _serve(port: int) -> None:
    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.closing(writer):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.closing(far_writer):
                    async with asyncio.TaskGroup() as ways:
                        ways.create_task(_copy(reader, far_writer))
                        ways.create_task(_copy(far_reader, writer))
        except* OSError:
            pass  # An end that is reset or absent ends the other one, too.

    server = await asyncio.start_server(joined, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
