"""`python -m benchmarks.sessions pace`: processor time of a GB by rate, compared with TLS and QUIC.

Two network namespaces joined by a veth pair. Sessions are those of two daemons as shipped, with
jobs that send messages of 1 MiB, four in flight; a session opened for a rate paces itself. TLS over
TCP is paced by the kernel (SO_MAX_PACING_RATE) and QUIC (quinn) by itself, on a link limited to the
rate, since it takes none. Pace 0 is as fast as possible. Transports take turns within a round.

Processor time is that of whole processes at both ends, kernel included; of a session, daemons and
jobs. What flatters TLS: its timers, packets and acknowledgements run in interrupts, which count for
nobody; its pace limits the payload, the others' the wire. Prints a table, draws a plot and saves
every sample as a line of JSON; an interrupted run goes on when started again. Needs root and Cargo.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import benchmarks.sessions.packets
import matplotlib as mpl
from benchmarks.digests import digest
from benchmarks.kept import Records
from benchmarks.sessions import packets
from benchmarks.sessions.fairness.command import MIB, SETTLE_SECONDS, Jobs
from benchmarks.sessions.lab.daemons import FAR, NEAR, Host, fabrics
from benchmarks.sessions.lab.lanes import processor_seconds
from benchmarks.sessions.report import NAMES
from benchmarks.sessions.veth import ADDRESSES, veth
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sealane.cli.demo.cluster import Daemon

mpl.use("Agg")
from matplotlib import pyplot as plt

SUMMARY: Final = "processor time of a GB at given rates, compared with TLS and QUIC"
RATE_MAX: Final = 40_000_000_000
SATURATING_BYTES: Final = 1 << 29
PACKET_BYTES: Final = {1500: 1408, 9000: 8896}
"""Payload of a session's packet, by MTU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement."""

    round: int
    mtu: int
    pace: int
    """Bit/s; 0: as fast as possible."""
    way: str

    @property
    def key(self) -> str:
        """Name of its record."""
        return f"{self.mtu} {self.pace} {self.way} {self.round}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add("--mtu", type=int, nargs="+", default=[1500, 9000], choices=PACKET_BYTES)
    paces = [100_000_000, 1_000_000_000, 0]
    add("--pace", type=int, nargs="+", default=paces, help="bit/s; 0: as fast as possible")
    add("--rounds", type=int, default=3, help="rounds; the table shows medians (default 3)")
    add("--seconds", type=float, default=3.0, help="of each measurement (default 3)")
    add("--output", type=Path, default=Path("sealane-sessions/pace"), help="directory for results")


def cells(arguments: argparse.Namespace, mtu: int) -> Iterator[Cell]:
    """Yield all cells of an MTU; each round starts with another transport."""
    for number, pace in itertools.product(range(arguments.rounds), arguments.pace):
        start = number % len(packets.WAYS)
        for way in packets.WAYS[start:] + packets.WAYS[:start]:
            yield Cell(round=number, mtu=mtu, pace=pace, way=way)


class Sessions:
    """Two daemons and a receiving job."""

    def __init__(self, jobs: Jobs, near: Daemon, far: tuple[int, ...]) -> None:
        self._jobs, self._near, self._far = jobs, near, far

    async def measure(self, cell: Cell, seconds: float) -> packets.Sample:
        """Send for some seconds, once the rate has settled."""
        sender = await self._jobs.start(
            *("share", self._near),
            seconds=seconds,
            sessions=1,
            message_bytes=MIB,
            rate_bits_per_second=cell.pace or RATE_MAX,
        )
        ends = (self._near.pid, sender.pid), self._far
        ending = asyncio.ensure_future(sender.communicate(b"go\n"))
        await asyncio.sleep(SETTLE_SECONDS)
        before = [processor_seconds(end) for end in ends]
        await asyncio.sleep(seconds)
        after = [processor_seconds(end) for end in ends]
        output, _ = await ending
        (count,) = json.loads(output)["bytes"]
        return packets.Sample(
            way=cell.way,
            mtu=cell.mtu,
            bytes=count,
            seconds=seconds,
            processor_sender=after[0] - before[0],
            processor_receiver=after[1] - before[1],
            processor_job=0.0,
            statistics={},
            pace=cell.pace,
        )


@contextlib.asynccontextmanager
async def sessions(mtu: int) -> AsyncIterator[Sessions]:
    """Start two daemons and a receiving job."""
    settings = {
        "rate_max_bits_per_second": RATE_MAX,
        "unit_bytes": PACKET_BYTES[mtu],
    }
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sealane-pace-"))
        ends = await stack.enter_async_context(veth(mtu))
        hosts = {
            name: Host(address=address, namespace=end)
            for name, address, end in zip((NEAR, FAR), ADDRESSES, ends, strict=True)
        }
        daemons = await stack.enter_async_context(fabrics(Path(scratch), hosts, settings))
        jobs = Jobs(daemons[NEAR], daemons[FAR], region_bytes=16 * MIB)
        receiver = await jobs.start("receive", daemons[FAR])
        try:
            yield Sessions(jobs, daemons[NEAR], (daemons[FAR].pid, receiver.pid))
        finally:
            receiver.kill()
            await receiver.wait()


async def _measure(arguments: argparse.Namespace, records: Records) -> list[packets.Sample]:
    samples = []
    for mtu in arguments.mtu:
        wanted = list(cells(arguments, mtu))
        async with contextlib.AsyncExitStack() as stack:
            own: Sessions | None = None
            for cell in track(wanted, description=f"MTU {mtu}"):
                record = records.get(cell.key)
                if record is None:
                    if cell.way == "session":
                        own = own or await stack.enter_async_context(sessions(mtu))
                        sample = await own.measure(cell, arguments.seconds)
                    else:
                        size = int(cell.pace // 8 * arguments.seconds) or SATURATING_BYTES
                        sample = await packets.transfer(
                            cell.way, mtu=mtu, size=size, pace=cell.pace
                        )
                    records.put(cell.key, sample.to_dict() | {"load": os.getloadavg()[0]})
                    record = records.get(cell.key) or {}
                samples.append(packets.Sample(**{name: record[name] for name in sample_fields()}))
    return samples


def sample_fields() -> list[str]:
    """Return the names of a sample's fields."""
    return list(packets.Sample.__dataclass_fields__)


def _cost(samples: list[packets.Sample]) -> float:
    return statistics.median(sample.processor_per_gb for sample in samples)


def table(samples: list[packets.Sample]) -> Table:
    """Return medians by MTU, pace and transport; "/ TLS" is the ratio of medians."""
    found = Table(title="Processor seconds per GB, both ends (range)")
    for heading in ("MTU", "Mbit/s", "transport", "s/GB", "sender", "receiver", "rate", "/ TLS"):
        found.add_column(heading, justify="left" if heading == "transport" else "right")
    for mtu, pace in sorted({(sample.mtu, sample.pace or RATE_MAX) for sample in samples}):
        here = [s for s in samples if (s.mtu, s.pace or RATE_MAX) == (mtu, pace)]
        tls = _cost([sample for sample in here if sample.way == "tls"])
        for way in packets.WAYS:
            mine = [sample for sample in here if sample.way == way]
            costs = [sample.processor_per_gb for sample in mine]
            parts = [
                statistics.median(getattr(s, f"processor_{part}") / s.bytes * 1e9 for s in mine)
                for part in ("sender", "receiver")
            ]
            rate = statistics.median(s.bytes * 8e-6 / s.seconds for s in mine)
            found.add_row(
                str(mtu),
                "saturated" if pace == RATE_MAX else f"{pace / 1e6:.0f}",
                NAMES[way],
                f"{_cost(mine):.2f} ({min(costs):.2f} to {max(costs):.2f})",
                *(f"{part:.2f}" for part in parts),
                f"{rate:.0f}",
                f"{_cost(mine) / tls:.2f}",
            )
    return found


def plot(path: Path, samples: list[packets.Sample]) -> None:
    """Draw processor seconds per GB against the rate: medians as lines, samples as points."""
    mtus = sorted({sample.mtu for sample in samples})
    figure, several = plt.subplots(
        1, len(mtus), figsize=(4.5 * len(mtus), 4), sharey=True, squeeze=False
    )
    for mtu, axes in zip(mtus, several[0], strict=True):
        for index, way in enumerate(packets.WAYS):
            mine = [s for s in samples if (s.mtu, s.way) == (mtu, way)]
            paces = sorted({s.pace for s in mine}, key=lambda pace: pace or RATE_MAX)
            points = [[s for s in mine if s.pace == pace] for pace in paces]
            rates = [statistics.median(s.bytes * 8e-6 / s.seconds for s in at) for at in points]
            axes.plot(rates, [_cost(at) for at in points], f"C{index}o-", label=NAMES[way])
            for sample in mine:
                rate = sample.bytes * 8e-6 / sample.seconds
                axes.plot(rate, sample.processor_per_gb, f"C{index}.", markersize=3)
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s carried", title=f"MTU {mtu}")
        axes.grid(alpha=0.3, which="both")
    several[0][0].set_ylabel("processor seconds per GB, both ends")
    several[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(arguments: argparse.Namespace) -> int:
    """Measure what is missing; print, save and draw."""
    packets.build()
    arguments.output.mkdir(parents=True, exist_ok=True)
    made_by = digest([benchmarks.sessions.packets]) + f" {arguments.seconds}"
    records = Records(arguments.output / "records.jsonl", made_by=made_by)
    samples = asyncio.run(_measure(arguments, records))
    console = Console(width=120)
    console.print(table(samples))
    plot(arguments.output / "pace.png", samples)
    console.print(f"saved in {arguments.output}")
    return 0
