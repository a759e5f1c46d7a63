"""`python -m benchmarks.sessions bursts`: bursts of losses that last for a time, by plan.

One message at a time at 100 Mbit/s; data is lost, acknowledgements aren't. Compares plans that know
bursts as packets, plans that know their length in time, and those for two paths, with the least
that any sender on one path could reach: it sends useful units without a pause until enough have
arrived.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path as FilePath
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from sealane import _native
from sealane.planning.model import ErasureCoded, Loss, Path, ideal
from sealane.planning.packet import PACKET_OVERHEAD_BYTES
from sealane.planning.planner import Objective, rank, scheme_text
from sealane.planning.planner.choice import code_of

SUMMARY: Final = "bursts that last for a time: plans by packets, by time, over two paths"
RATE: Final = 100_000_000
UNIT_BYTES: Final = 1408
LOSS: Final = 1e-2
ROUND_TRIPS_MS: Final = (5, 25, 100)
BURSTS: Final = (32, 128)
"""Mean bursts, in packets sent back to back."""
SIZES: Final = (64 << 10, 1 << 20)
QUANTILES: Final = {Objective.P99: 0.99, Objective.P999: 0.999}
BOUND_RUNS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of planning."""

    name: str
    is_timed: bool
    paths: int


WAYS: Final = (
    Way(name="packets", is_timed=False, paths=1),
    Way(name="time", is_timed=True, paths=1),
    Way(name="two paths", is_timed=True, paths=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of a way in a cell; times over the ideal."""

    objective: str
    round_trip_ms: int
    message_bytes: int
    burst: int
    way: str
    scheme: str
    messages: int
    p50: float
    tail: float
    """The quantile that was planned for."""
    bound: float
    """The same of the best sender on one path."""
    bytes_over_payload: float
    burst_estimate: float
    """The session's measurement of the mean burst in time, over the true one."""


def path_of(round_trip_ms: int, burst: int, way: Way) -> Path:
    """Return the model of a cell's path."""
    return Path(
        rate_bits_per_second=RATE,
        round_trip_seconds=round_trip_ms / 1e3,
        loss=Loss(rate=LOSS, burst_packets=burst, is_timed=way.is_timed),
        unit_bytes=UNIT_BYTES,
        overhead_bytes=PACKET_OVERHEAD_BYTES,
        count=way.paths,
    )


def bounds(path: Path, message_bytes: int, count: int, *, seed: int) -> NDArray[np.float64]:
    """Draw completion times of the best sender on one path, in seconds."""
    random = np.random.default_rng(seed)
    bad = path.loss.burst_packets * path.unit_seconds
    good = bad * (1 - LOSS) / LOSS
    needed = path.units(message_bytes) * path.unit_seconds
    found = np.empty(count)
    for index in range(count):
        left, passed, is_bad = needed, 0.0, bool(random.random() < LOSS)
        while left > 0:
            lasts = float(random.exponential(bad if is_bad else good))
            passed += lasts if is_bad else min(lasts, left)
            left -= 0.0 if is_bad else lasts
            is_bad = not is_bad
        found[index] = passed + path.round_trip_seconds
    return found


def _link(path: Path, *, has_bursts: bool) -> _native.LinkSettings:
    bad = round(path.loss.burst_packets * path.unit_seconds * 1e9)
    return _native.LinkSettings(
        rate_bits_per_second=RATE,
        delay_nanos=round(path.round_trip_seconds / 2 * 1e9),
        buffer_bytes=64 << 20,
        timed_bursts=(round(bad * (1 - LOSS) / LOSS), bad) if has_bursts else None,
    )


def measure(objective: Objective, cell: tuple[int, int, int, Way], units: int) -> Row:
    """Plan and simulate (round trip, message, burst, way); RuntimeError on a violated rule."""
    round_trip_ms, message_bytes, burst, way = cell
    path = path_of(round_trip_ms, burst, way)
    scheme = rank(path, message_bytes, objective)[0].scheme
    k, m, depth = code_of(scheme)
    gap = scheme.gap_seconds if isinstance(scheme, ErasureCoded) else 0.0
    count = units // path.units(message_bytes)
    result = _native.simulate(
        count=count,
        message_bytes=message_bytes,
        seed=burst,
        erasure_code=(k, m) if k else None,
        interleaving=depth,
        parity_gap_nanos=round(gap * 1e9),
        path_count=way.paths,
        unit_bytes=UNIT_BYTES,
        slots=2,
        forward=_link(path, has_bursts=True),
        backward=_link(path, has_bursts=False),
    )
    if result["violations"]:
        raise RuntimeError(f"{path}, {scheme}: {result['violations'][:3]}")
    times = np.asarray(result["completion_nanos"]) / 1e9
    fastest = ideal(path, message_bytes)
    sent, quantile = result["sender"], QUANTILES[objective]
    true = path.loss.burst_packets * path.unit_seconds * 1e9
    best = bounds(path, message_bytes, BOUND_RUNS if message_bytes == SIZES[0] else 20_000, seed=1)
    return Row(
        objective=objective.value,
        round_trip_ms=round_trip_ms,
        message_bytes=message_bytes,
        burst=burst,
        way=way.name,
        scheme=scheme_text(scheme),
        messages=count,
        p50=float(np.quantile(times, 0.5)) / fastest,
        tail=float(np.quantile(times, quantile)) / fastest,
        bound=float(np.quantile(best, quantile)) / fastest,
        bytes_over_payload=sent["wire_bytes_sent"] / (count * message_bytes),
        burst_estimate=sent["timed_runs_nanos"] / max(sent["timed_runs"], 1) / true,
    )


def rows(units: int) -> Iterator[Row]:
    """Measure all cells, each with messages of `units` units in all; p99.9 with short ones only."""
    for objective, size in ((Objective.P99, SIZES), (Objective.P999, SIZES[:1])):
        for cell in product(ROUND_TRIPS_MS, size, BURSTS, WAYS):
            yield measure(objective, cell, units * (2 if objective is Objective.P999 else 1))


def table(found: list[Row], objective: Objective) -> Table:
    """Return a table with the ways of a cell beside each other."""
    name = objective.value.replace("999", "99.9")
    made = Table(title=f"p50, {name} over ideal, planned for {name}", box=box.SIMPLE_HEAD)
    for heading in ("RTT", "size", "burst", *(way.name for way in WAYS), "bound"):
        made.add_column(heading)
    mine = [row for row in found if row.objective == objective.value]
    for start in range(0, len(mine), len(WAYS)):
        ways = mine[start : start + len(WAYS)]
        cells = [
            f"{row.scheme}: {row.p50:.2f}, {row.tail:.2f} ({row.bytes_over_payload:.2f})"
            for row in ways
        ]
        one = ways[0]
        size = f"{one.message_bytes >> 10} KiB"
        made.add_row(f"{one.round_trip_ms} ms", size, str(one.burst), *cells, f"{one.bound:.2f}")
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add("--units", type=int, default=2_000_000, help="units of a cell's messages")
    add("--output", type=FilePath, default=FilePath("sealane-sessions/bursts"), help="for the JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and save as JSON."""
    output: FilePath = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    found = list(rows(arguments.units))
    (output / "results.json").write_text(json.dumps([asdict(row) for row in found], indent=1))
    console = Console(width=200)
    for objective in QUANTILES:
        console.print(table(found, objective))
    console.print(f"saved in {output}")
    return 0
