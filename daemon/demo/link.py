"""The demo's long link as a process of its own: `python -m sealane.daemon.demo.link …`.

Prints its address as one JSON line, relays until its standard input ends, prints its counters.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from sealane._native import Emulator
from sealane.errors import UnavailableError

PARTS_PER_BILLION: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParameters:
    """What the emulated link does to packets, each way."""

    rate_bits_per_second: int = 200_000_000
    delay_nanos: int = 12_500_000
    loss_parts_per_billion: int = 1_000_000
    # A fifth of a second at full rate: losses are the link's own, not its buffer's.
    buffer_bytes: int = 5_000_000

    @property
    def loss(self) -> float:
        """The loss as a probability."""
        return self.loss_parts_per_billion / PARTS_PER_BILLION

    @property
    def rtt_seconds(self) -> float:
        """Both ways' delay."""
        return 2e-9 * self.delay_nanos


class Link:
    """A running link process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address

    async def finish(self) -> dict[str, Any]:
        """End the relay and take its counters."""
        output, _ = await self._process.communicate(b"")
        counters: dict[str, Any] = json.loads(output)
        return counters

    def kill(self) -> None:
        """End the process without asking."""
        if self._process.returncode is None:
            self._process.kill()


@contextlib.asynccontextmanager
async def linked(parameters: LinkParameters, *, forward_to: str, seed: int) -> AsyncIterator[Link]:
    """Run a link towards `forward_to` until the block is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "sealane.daemon.demo.link"),
        *("--forward-to", forward_to, "--seed", str(seed)),
        *("--rate", str(parameters.rate_bits_per_second)),
        *("--delay", str(parameters.delay_nanos)),
        *("--loss", str(parameters.loss_parts_per_billion)),
        *("--buffer", str(parameters.buffer_bytes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None  # noqa: S101 - asked for above
    line = await process.stdout.readline()
    if not line:
        raise UnavailableError("demo.link.start", f"the link ended with {await process.wait()}")
    link = Link(process, json.loads(line)["address"])
    try:
        yield link
    finally:
        link.kill()
        await process.wait()


def main() -> None:
    """Relay until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward-to", required=True)
    for name in ("--rate", "--delay", "--loss", "--buffer", "--seed"):
        parser.add_argument(name, required=True, type=int)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    emulator = Emulator(
        rate_bits_per_second=options.rate,
        delay_ns=options.delay,
        buffer_bytes=options.buffer,
        loss_ppb=options.loss,
        seed=options.seed,
        forward_to=options.forward_to,
    )
    print(json.dumps({"address": emulator.address}), flush=True)
    sys.stdin.buffer.read()
    emulator.stop()
    print(json.dumps(emulator.counters()), flush=True)


if __name__ == "__main__":
    main()
