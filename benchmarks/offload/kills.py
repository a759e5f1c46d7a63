"""Verified writes through a gateway whose card is killed again and again: real daemons.

A broker, a target with blocks in memory, a gateway and a card are processes of their own; this one
is the host. It keeps 32 writes of 4 KiB in flight, each with bytes of its own, then reads
everything back. Rounds alternate between the gateway alone and the ways of having a card.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.storage.measure import System, host_of, process_cpu_seconds
from rich import box
from rich.table import Table

from accelerators.cards import LABEL, World, running_card, world
from control_plane import short_directory
from sealane import _native
from sealane.client import Client, connect, translated
from sealane.protocol.v1 import offload_pb2
from sealane.transport.nvme.initiator import ConnectedQueue

mpl.use("Agg")
from matplotlib import pyplot as plt

HOST_NQN: Final = "nqn.2026-11.dev.sealane:benchmark"
DEPTH: Final = 32
IO_BYTES: Final = 4096
SPAN_BYTES: Final = 64 << 20
LIFE_SECONDS: Final = 1.0
CALL_SECONDS: Final = 60.0
PROCESSOR: Final = "no card"
CARD: Final = "card"
KILLED: Final = "card killed every second"
ENABLED: Final = "killed every second, enabled at once"
MODES: Final = (PROCESSOR, CARD, KILLED, ENABLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """One round of writes in one mode."""

    mode: str
    round: int
    commands: int
    commands_per_second: float
    latency_p50_micros: float
    latency_p999_micros: float
    latency_max_micros: float
    cpu_micros: Mapping[str, float]
    """Processor time for a command, by process: load, gateway, target and card (all of them)."""
    verified: int
    """Sectors that were read back, all of them right."""
    sealed_by_cards: int
    kills: int
    losses: int
    """Kills that a card's user noticed: the gateway was using it."""
    refusals: int


@dataclass
class Cards:
    """The cards of a round, one after the other."""

    site: World
    kills: int = 0
    cpu_seconds: float = 0.0
    """Of those that have ended."""
    _current: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start a card; return when it listens."""
        self._process = self._current.enter_context(
            running_card(self.site.socket, self.site.identity, has_ledger=False)
        )

    def end(self) -> None:
        """Kill the card, if one runs, and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_seconds += usage.ru_utime + usage.ru_stime
        self._current.close()

    async def keep_killing(self, client: Client | None) -> None:
        """Kill each card a second after its start; with a client, let the next be used at once."""
        while True:
            await asyncio.sleep(LIFE_SECONDS)
            self.end()
            self.kills += 1
            self.start()
            if client is not None:
                await enable(client)

    @property
    def spent_seconds(self) -> float:
        """Processor time of all cards so far."""
        running = 0.0 if self._process is None else process_cpu_seconds(self._process.pid)
        return self.cpu_seconds + running


async def enable(client: Client) -> None:
    """Have the gateway use its card; return when it does."""
    with translated():
        await client.offload.EnableAccelerator(
            offload_pb2.EnableAcceleratorRequest(label=LABEL), timeout=CALL_SECONDS
        )


@contextlib.asynccontextmanager
async def used_queue(system: System) -> AsyncIterator[ConnectedQueue]:
    """Connect a host's queue."""
    async with host_of(system) as host:
        await host.request_queues(1)
        queue = await host.connect_queue(1)
        try:
            yield queue
        finally:
            queue.close()


async def write(queue: ConnectedQueue, *, seconds: float, seed: int) -> "_native.LoadResult":
    """Write for some seconds, then read everything back; ValueError if something is wrong."""
    settings: _native.LoadSettings = {
        "is_write": True,
        "is_random": True,
        "io_bytes": IO_BYTES,
        "depth": DEPTH,
        "span_bytes": SPAN_BYTES,
        "seconds": seconds,
        "seed": seed,
        "is_verified": True,
    }
    return await asyncio.to_thread(_native.run_load, [queue.describe(block_bytes=4096)], settings)


async def round_of(
    site: World, client: Client, system: System, mode: str, *, number: int, seconds: float
) -> Writes:
    """Write in one mode, and verify."""
    cards = Cards(site)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(cards.end)
        queue = await stack.enter_async_context(used_queue(system))
        if mode != PROCESSOR:
            cards.start()
            await enable(client)
        await write(queue, seconds=0.3, seed=number)
        before = figures(site)
        spent = {name: process_cpu_seconds(pid) for name, pid in system.processes.items()}
        spent["card"] = cards.spent_seconds
        writing = asyncio.ensure_future(write(queue, seconds=seconds, seed=1000 + number))
        began = time.monotonic()
        if mode in (KILLED, ENABLED):
            killing = asyncio.ensure_future(cards.keep_killing(client if mode == ENABLED else None))
            # Reading back needs no card; its time counts for nothing.
            await asyncio.wait([killing, writing], timeout=seconds)
            killing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killing
        else:
            await asyncio.wait([writing], timeout=seconds)
        after = {name: process_cpu_seconds(pid) for name, pid in system.processes.items()}
        after["card"] = cards.spent_seconds
        elapsed = time.monotonic() - began
        result = await writing
        found = figures(site) - before
    commands = result["commands"]
    # What the others did in `elapsed`, for the commands of that time.
    scale = 1e6 * result["seconds"] / elapsed / commands
    return Writes(
        mode=mode,
        round=number,
        commands=commands,
        commands_per_second=commands / result["seconds"],
        latency_p50_micros=result["latency_p50_us"],
        latency_p999_micros=result["latency_p999_us"],
        latency_max_micros=result["latency_max_us"],
        cpu_micros={
            "load": result["cpu_seconds"] * 1e6 / commands,
            **{name: (after[name] - spent[name]) * scale for name in spent},
        },
        verified=result["verified"],
        sealed_by_cards=found["sectors_accelerated"],
        kills=cards.kills,
        losses=found["accelerators_lost"],
        refusals=found["accelerator_refusals"],
    )


def figures(site: World) -> Counter[str]:
    """Return the gateway's figures of its volume."""
    names = ("sectors_accelerated", "accelerators_lost", "accelerator_refusals")
    return Counter({name: site.statistic(name) for name in names})


async def measure_kills(
    *, seconds: float, rounds: int, modes: Sequence[str] = MODES, advance: Callable[[], None]
) -> list[Writes]:
    """Measure each mode once a round; every other round in reversed order."""
    found = []
    with short_directory() as root, world(root, target_options='store = "memory"\n') as site:
        async with connect(site.gateway.socket) as client:
            volume = await client.volumes.create(size_bytes=SPAN_BYTES)
            system = System.secure(
                await client.volumes.attach(volume.name, host_nqn=HOST_NQN),
                host_nqn=HOST_NQN,
                processes={
                    "gateway": site.gateway.process.pid,
                    "target": site.target.process.pid,
                },
            )
            for number in range(rounds):
                for mode in modes[:: -1 if number % 2 else 1]:
                    found.append(
                        await round_of(site, client, system, mode, number=number, seconds=seconds)
                    )
                    advance()
            await client.volumes.detach(volume.name)
    return found


def of_mode(samples: Sequence[Writes], mode: str) -> list[Writes]:
    """Return the rounds of a mode, in order."""
    return sorted((each for each in samples if each.mode == mode), key=lambda each: each.round)


def ratios(samples: Sequence[Writes], mode: str) -> list[float]:
    """Return a mode's rate over that without a card, round by round."""
    pairs = zip(of_mode(samples, mode), of_mode(samples, PROCESSOR), strict=True)
    return [own.commands_per_second / other.commands_per_second for own, other in pairs]


def kills_table(samples: Sequence[Writes]) -> Table:
    """Return a line for each mode: medians, and sums of what is counted."""
    title = f"verified writes of 4 KiB, {DEPTH} at a time (medians of rounds; counts are sums)"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for name in (
        "IOPS",
        "of no card's",
        "p50 µs",
        "p99.9 ms",
        "longest ms",
        "CPU µs: host",
        "gateway",
        "target",
        "card",
        "kills",
        "in use",
        "by cards",
        "verified",
    ):
        table.add_column(name, justify="right")
    for mode in dict.fromkeys(each.mode for each in samples):
        mine = of_mode(samples, mode)
        relative = ratios(samples, mode)
        cpu = [
            statistics.median(each.cpu_micros[name] for each in mine)
            for name in ("load", "gateway", "target", "card")
        ]
        by_cards = sum(each.sealed_by_cards for each in mine)
        table.add_row(
            mode,
            f"{statistics.median(each.commands_per_second for each in mine):,.0f}",
            f"{statistics.median(relative):.2f} ({min(relative):.2f}–{max(relative):.2f})",
            f"{statistics.median(each.latency_p50_micros for each in mine):,.0f}",
            f"{statistics.median(each.latency_p999_micros for each in mine) / 1e3:.1f}",
            f"{max(each.latency_max_micros for each in mine) / 1e3:.0f}",
            *(f"{each:.1f}" for each in cpu),
            str(sum(each.kills for each in mine)),
            str(sum(each.losses for each in mine)),
            f"{by_cards / sum(each.commands for each in mine):.0%}",
            f"{sum(each.verified for each in mine):,}",
        )
    return table


def plot_kills(path: Path, samples: Sequence[Writes]) -> None:
    """Draw the rate of each round, a line for each mode, and each mode's processor time."""
    figure, (rates, times) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    modes = list(dict.fromkeys(each.mode for each in samples))
    for mode in modes:
        mine = of_mode(samples, mode)
        rates.plot(
            [each.round + 1 for each in mine],
            [each.commands_per_second / 1e3 for each in mine],
            marker="o",
            label=mode,
        )
    rates.set(title="verified writes of 4 KiB, 1,000 a second", xlabel="round", ylim=(0, None))
    rates.grid(alpha=0.3)
    left = [0.0] * len(modes)
    for name in ("gateway", "card", "target", "load"):
        widths = [
            statistics.median(each.cpu_micros[name] for each in of_mode(samples, mode))
            for mode in modes
        ]
        times.barh(modes, widths, left=left, label="host" if name == "load" else name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    times.set(title="processor time of a write, µs")
    times.invert_yaxis()
    times.legend()
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    figure.savefig(path, dpi=150)
    plt.close(figure)
