"""The demo's long link: a relay of the link lab between loopback ports."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sealane.lab.emulator import EmulatorProcess
from sealane.lab.lab import laboratory
from sealane.lab.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParameters:
    """Properties of the emulated link, in each direction."""

    rate_bits_per_second: int = 200_000_000
    delay_micros: int = 12_500
    loss: float = 0.001
    # A fifth of a second at full rate, so that the buffer never overflows and adds no loss.
    buffer_bytes: int = 5_000_000

    @property
    def rtt_seconds(self) -> float:
        """Round-trip time: the delay in both directions."""
        return 2e-6 * self.delay_micros


class Link:
    """A running link."""

    def __init__(self, emulator: EmulatorProcess) -> None:
        self._emulator = emulator
        self.address = emulator.address or ""

    async def lost_packets(self) -> int:
        """Return the packets lost in both directions together."""
        report = await self._emulator.report()
        ways = (report["forward"], report["backward"])
        return sum(path["lost_packets"] for way in ways for path in way["paths"])


@contextlib.asynccontextmanager
async def linked(parameters: LinkParameters, *, forward_to: str, seed: int) -> AsyncIterator[Link]:
    """Run a link to `forward_to` until the block is left; UnavailableError if it can't start."""
    wan = {
        "name": "demo",
        "left": ["near"],
        "right": ["far"],
        "forward_to": forward_to,
        "rate_bits_per_second": parameters.rate_bits_per_second,
        "delay_micros": parameters.delay_micros,
        "buffer_bytes": parameters.buffer_bytes,
        "loss": parameters.loss,
    }
    topology = Topology.model_validate({"seed": seed, "wan": [wan]})
    async with laboratory(topology, relays=True) as lab:
        yield Link(lab.emulators["demo"])
