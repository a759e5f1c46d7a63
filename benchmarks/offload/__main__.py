"""`make bench-offload`: what sealing by a card costs a gateway's thread, and how long it takes.

Each card is a process of its own, as the gateway sees it: the emulated one in its profiles, and
DPDK's crypto devices if their driver was built (`make cryptodev`). A batch is submitted, awaited,
taken and checked; "processor" seals in place. Rounds alternate. On a machine with few cores a card
that polls takes time from the gateway's thread: compare processor time, not latency.

Then real daemons: a host writes and verifies while the emulated card is killed every second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from rich import box
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from benchmarks.offload.kills import (  # noqa: E402
    MODES,
    Writes,
    kills_table,
    measure_kills,
    plot_kills,
)

from accelerators.cards import program  # noqa: E402
from accelerators.cryptodevs import CRYPTODEVS, DRIVER, arguments  # noqa: E402

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
PROFILES: Final = ("bf3-doca", "bf3-dpdk", "tiny")
PROCESSOR: Final = "processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A device and a size of batch, in one round."""

    device: str
    batch: int
    round: int
    thread_nanos: float
    """Processor time of the gateway's thread for a sector."""
    card_nanos: float
    """Processor time of the card's process for a sector."""
    p50_micros: float
    """Of a batch."""
    p99_micros: float


def devices() -> dict[str, list[str]]:
    """Return the cards' arguments by name."""
    found = {profile: [f"--profile={profile}"] for profile in PROFILES}
    return found | ({name: arguments(name) for name in CRYPTODEVS} if DRIVER else {})


@contextlib.contextmanager
def card(socket: Path, options: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a card that listens, until the end of the block."""
    with subprocess.Popen(
        [program(), f"--socket={socket}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            if not any(line.startswith("ready: ") for line in process.stdout or ()):
                raise RuntimeError(f"no card with {' '.join(options)}")
            yield process
        finally:
            process.kill()


def processor_nanos(process: subprocess.Popen[str]) -> int:
    """Return the processor time of a process so far (Linux, `schedstat` of its threads)."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


def run(command: Path, socket: str, sectors: int, batch: int) -> dict[str, Any] | None:
    """Measure one batch; None if it doesn't fit in the card's queue."""
    printed = subprocess.run(
        [command, socket, str(sectors), str(batch)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(printed) if printed else None


def measure(command: Path, sectors: int, rounds: int) -> list[Sample]:
    """Measure each device and batch once a round; every other round in reversed order."""
    samples = []
    known = {PROCESSOR: [], **devices()}
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "card"
        turns = [
            (number, name)
            for number in range(rounds)
            for name in list(known)[:: -1 if number % 2 else 1]
        ]
        for number, name in track(turns, "measuring", console=Console(stderr=True)):
            is_card = name != PROCESSOR
            with card(socket, known[name]) if is_card else contextlib.nullcontext() as process:
                for batch in BATCHES:
                    before = processor_nanos(process) if process else 0
                    found = run(command, str(socket) if is_card else name, sectors, batch)
                    if found is None:
                        continue
                    used = processor_nanos(process) - before if process else 0
                    samples.append(
                        Sample(
                            device=name,
                            batch=batch,
                            round=number,
                            thread_nanos=found["thread_ns"],
                            card_nanos=used / found["sectors"],
                            p50_micros=found["p50_us"],
                            p99_micros=found["p99_us"],
                        )
                    )
    return samples


def median(samples: Sequence[Sample], device: str, batch: int, field: str) -> float | None:
    """Return the median over rounds; None if there are none."""
    found = [getattr(s, field) for s in samples if (s.device, s.batch) == (device, batch)]
    return statistics.median(found) if found else None


COLUMNS: Final = {
    "thread_nanos": "the gateway's thread, ns/sector",
    "card_nanos": "the card's process, ns/sector",
    "p50_micros": "latency of a batch, p50 µs",
    "p99_micros": "latency of a batch, p99 µs",
}


def tables(samples: Sequence[Sample]) -> Iterator[Table]:
    """Return a table for each figure: devices by batch."""
    for field, title in COLUMNS.items():
        table = Table(title=f"{title} (medians)", box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("device")
        for batch in BATCHES:
            table.add_column(str(batch), justify="right")
        for device in dict.fromkeys(sample.device for sample in samples):
            found = [median(samples, device, batch, field) for batch in BATCHES]
            table.add_row(device, *("" if value is None else f"{value:,.0f}" for value in found))
        yield table


def plot(path: Path, samples: Sequence[Sample]) -> None:
    """Draw processor time and latency by batch, a line for each device."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = list(dict.fromkeys(sample.device for sample in samples))
    for axis, field in zip(axes, ("thread_nanos", "p50_micros"), strict=True):
        for name in names:
            points = [(batch, median(samples, name, batch, field)) for batch in BATCHES]
            known = [(batch, value) for batch, value in points if value is not None]
            axis.plot(*zip(*known, strict=True), marker="o", label=name)
        axis.set(title=COLUMNS[field], xlabel="sectors in a batch", xscale="log", yscale="log")
        axis.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def kills(seconds: float, rounds: int) -> list[Writes]:
    """Measure daemons whose card is killed."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("killing", total=rounds * len(MODES))
        return asyncio.run(
            measure_kills(seconds=seconds, rounds=rounds, advance=lambda: progress.advance(bar))
        )


def main() -> int:
    """Measure, print tables, save results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="rounds; tables show medians (default 5)")
    add("--sectors", type=int, default=40_000, help="for each device, batch and round")
    add("--only", choices=("cost", "kills"), help="measure only that")
    add("--kill-seconds", type=float, default=10.0, help="writes of a round with daemons (10)")
    add("--output", type=Path, default=Path("sealane-offload"), help="directory for results")
    options = parser.parse_args()
    console = Console(width=180)
    document: dict[str, object] = {"cores": os.cpu_count()}
    options.output.mkdir(parents=True, exist_ok=True)
    if options.only != "kills":
        command = ROOT / "native/target/release/examples/cost"
        samples = measure(command, options.sectors, options.rounds)
        for table in tables(samples):
            console.print(table)
        if not DRIVER:
            console.print("Without DPDK's crypto devices: make cryptodev builds their driver.")
        document["samples"] = [asdict(sample) for sample in samples]
        plot(options.output / "offload.png", samples)
    if options.only != "cost":
        writes = kills(options.kill_seconds, options.rounds)
        console.print(kills_table(writes))
        document["kills"] = [asdict(each) for each in writes]
        plot_kills(options.output / "kills.png", writes)
    (options.output / "results.json").write_text(json.dumps(document, indent=1))
    console.print(f"saved in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
