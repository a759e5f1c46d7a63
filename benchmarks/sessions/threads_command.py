"""`python -m benchmarks.sessions threads`: rate of a session by path threads, message and chunk.

Both ends of a session in one process over loopback, back to back messages, without a congestion
controller. Three experiments after figures 14 to 16 of the SDR-RDMA paper:

  messages  message size, 16 in flight, chunks of 64 KiB, without and with path threads
  chunks    units of 256 bytes (the least; the paper's packets have 64), chunks of 1 to 64 units
  threads   path threads, a path each, at a series of rates; the figure is the highest rate reached

A figure counts only if less than 0.1 % of the packets were sent again: beyond that, the rate is
more than the receiver takes. Goodput is payload; processor seconds are those of both ends, kernel
and jobs included. Prints tables, saves every sample as a line of JSON and draws a plot. `--samples`
shows the samples of another machine instead of measuring.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib.pyplot as plt
from benchmarks.sessions.packets import PROGRAM, build
from rich.console import Console
from rich.progress import track
from rich.table import Table

SUMMARY: Final = "rate of a session by path threads, message size and chunk"
UNITS: Final = (1408, 8896)
LOSS_MAX: Final = 1e-3
TIMEOUT_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: what was asked for and what came of it; None: it failed."""

    shape: str
    figures: dict[str, Any] | None

    def value(self, name: str) -> int:
        """Return a number of the shape."""
        named = dict(part.split("=") for part in self.shape.split(","))
        return int(float(named.get(name, 0)))

    @property
    def goodput(self) -> float | None:
        """Payload, bit/s; None if the run failed or overran the receiver."""
        if self.figures is None:
            return None
        sender = self.figures["sender"]
        lost = sender.get("retransmitted_packets", 0) / max(1, sender["data_packets_sent"])
        rate: float = self.figures["bytes"] * 8 / self.figures["seconds"]
        return rate if lost < LOSS_MAX else None

    @property
    def processor_per_gb(self) -> float:
        """Processor seconds of both ends per 10^9 bytes."""
        figures = self.figures or {}
        found: float = figures["processor_seconds"] / figures["bytes"] * 1e9
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    cores = os.cpu_count() or 1
    counts = [count for count in (0, 1, 2, 4, 8) if count <= max(1, cores // 2 - 1)]
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=counts,
        help="path threads at each end (default: as many as half the cores hold, up to 8)",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[4, 8, 12, 16, 20, 24, 32, 48, 64], help="Gbit/s"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds (default 2)")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a run (default 0.6)")
    parser.add_argument("--samples", type=Path, help="show these samples instead of measuring")
    parser.add_argument("--output", type=Path, default=Path("sealane-sessions/threads"))


def shapes(arguments: argparse.Namespace) -> Iterator[str]:
    """Return all runs in order."""
    end = f"seconds={arguments.seconds}"
    most = max(arguments.threads)
    for _ in range(arguments.rounds):
        for threads in arguments.threads:
            of = f"threads={threads},paths={max(1, threads)}"
            for unit in UNITS:
                for rate in arguments.rates:
                    yield f"unit={unit},{of},rate={rate * 1e9:.0f},{end}"
            if threads in {0, most}:
                for exponent in range(12, 23, 2):
                    yield f"message={1 << exponent},chunk=47,{of},{end}"
        for exponent in range(7):
            yield f"unit=256,chunk={1 << exponent},message=262144,{end}"


def measure(shape: str) -> Sample:
    """Run once."""
    command = [str(PROGRAM), "session", shape]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if ran.returncode != 0:
        print(f"{shape}: {ran.stderr.splitlines()[:1]}", file=sys.stderr)
        return Sample(shape, None)
    return Sample(shape, json.loads(ran.stdout))


def best(samples: list[Sample], unit: int, threads: int) -> list[Sample]:
    """Return the runs at the rate with the highest median goodput that the receiver took."""
    rates: dict[int, list[Sample]] = {}
    for sample in samples:
        is_of = (sample.value("unit"), sample.value("threads")) == (unit, threads)
        if is_of and sample.value("rate"):
            rates.setdefault(sample.value("rate"), []).append(sample)
    taken = {
        rate: runs
        for rate, runs in rates.items()
        if all(sample.goodput is not None for sample in runs)
    }
    if not taken:
        return []
    return max(taken.values(), key=lambda runs: median(sample.goodput or 0 for sample in runs))


def thread_table(samples: list[Sample]) -> Table:
    """Return the highest goodputs by path threads."""
    table = Table(title="highest goodput by path threads (one path each)")
    for column in ("unit", "path threads", "Gbit/s", "of none", "M packets/s", "s/GB"):
        table.add_column(column, justify="right")
    counts = sorted({sample.value("threads") for sample in samples if sample.value("rate")})
    for unit in UNITS:
        first = None
        for threads in counts:
            runs = best(samples, unit, threads)
            if not runs:
                table.add_row(str(unit), str(threads), "–", "", "", "")
                continue
            rate = median(sample.goodput or 0 for sample in runs)
            first = first or rate
            cost = median(sample.processor_per_gb for sample in runs)
            table.add_row(
                str(unit),
                str(threads),
                f"{rate / 1e9:.1f}",
                f"{rate / first:.2f}",
                f"{rate / 8e6 / unit:.2f}",
                f"{cost:.2f}",
            )
    return table


def size_table(samples: list[Sample], name: str, title: str) -> Table:
    """Return goodputs by message size or chunk."""
    table = Table(title=title)
    for column in (name, "path threads", "Gbit/s", "thousand messages/s"):
        table.add_column(column, justify="right")
    groups: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        is_wanted = (
            sample.value("chunk") == 47 if name == "message" else sample.value("unit") == 256
        )
        if is_wanted and not sample.value("rate") and sample.goodput is not None:
            groups.setdefault((sample.value(name), sample.value("threads")), []).append(sample)
    for (size, threads), runs in sorted(groups.items()):
        rate = median(sample.goodput or 0 for sample in runs)
        messages = median(
            sample.figures["messages"] / sample.figures["seconds"]
            for sample in runs
            if sample.figures
        )
        table.add_row(str(size), str(threads), f"{rate / 1e9:.2f}", f"{messages / 1e3:.1f}")
    return table


def plot(samples: list[Sample], path: Path) -> None:
    """Draw goodput against path threads."""
    counts = sorted({sample.value("threads") for sample in samples if sample.value("rate")})
    figure, axes = plt.subplots(figsize=(6, 4))
    for unit in UNITS:
        found = [(count, best(samples, unit, count)) for count in counts]
        points = [(count, median(s.goodput or 0 for s in runs)) for count, runs in found if runs]
        axes.plot(
            [count for count, _ in points],
            [rate / 1e9 for _, rate in points],
            marker="o",
            label=f"{unit} bytes a packet",
        )
    axes.set(xlabel="path threads (0: the session's own thread)", ylabel="goodput, Gbit/s")
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read samples; print, save and draw."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.samples:
        lines = arguments.samples.read_text().splitlines()
        samples = [Sample(**json.loads(line)) for line in lines]
    else:
        build()
        samples = []
        with (arguments.output / "results.jsonl").open("w") as results:
            for shape in track(list(shapes(arguments)), description="runs"):
                samples.append(measure(shape))
                line = {"shape": shape, "figures": samples[-1].figures}
                print(json.dumps(line), file=results, flush=True)
    console = Console()
    console.print(thread_table(samples))
    console.print(size_table(samples, "message", "by message size (16 in flight, 64 KiB chunks)"))
    console.print(size_table(samples, "chunk", "by chunk, in units of 256 bytes"))
    plot(samples, arguments.output / "threads.png")
    console.print(f"saved in {arguments.output}")
    return 0
