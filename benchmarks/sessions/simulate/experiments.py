"""The experiments of the reference (§9b) and their cells.

Unless stated otherwise, parameters are the paper's: 400 Gbit/s, a round trip of 25 ms, units of
4 KiB, independent losses. Cells shared by experiments are run once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Final

from benchmarks.sessions.simulate.cells import UNIT_BYTES, Cell
from benchmarks.sessions.simulate.curves import Scheme

from sealane.planning.model import Loss
from sealane.planning.planner import Objective, Plan, plan

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
MS: Final = 1e-3

REPEAT_TIMEOUT: Final = Scheme(detection="timeout")
REPEAT: Final = Scheme()
MDS: Final = Scheme(k=32, m=8)
XOR: Final = Scheme(k=4, m=1, depth=8)
"""The paper's XOR (32, 8): eight parity units, each over four of 32 data units."""
SCHEMES: Final = (REPEAT_TIMEOUT, REPEAT, MDS, XOR)

SIZES: Final = (128 * KIB, MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB, 2 * GIB, 8 * GIB)
CODES: Final = ((32, 1), (32, 2), (32, 4), (32, 8), (32, 16), (64, 8), (8, 2))
ROUND_TRIPS: Final = tuple(ms * MS for ms in (0.5, 1, 2, 5, 10, 16, 25, 40))
HALF_DECADES: Final = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SITES: Final = (2, 4, 8)
RING_BYTES: Final = 128 * MIB
MAP_TAIL_BYTES: Final = 8 * MIB
MAP_TAIL_LOSS: Final = 1e-4
P99_RUNS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Amount of work per cell."""

    units: int
    """Approximate units in a cell, without retransmissions; determines its number of messages."""
    runs_min: int
    runs_max: int
    size_max: int
    """Longer messages are skipped."""

    def runs(self, message_bytes: int) -> int:
        """Return the number of messages of a cell."""
        units = max(1, message_bytes // UNIT_BYTES)
        return min(max(self.units // units, self.runs_min), self.runs_max)


FULL: Final = Effort(units=1_050_000, runs_min=8, runs_max=10_000, size_max=8 * GIB)
QUICK: Final = Effort(units=400_000, runs_min=4, runs_max=1000, size_max=128 * MIB)

Cells = Callable[[Effort], Iterator[Cell]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment of the paper, or beyond it."""

    name: str
    title: str
    parameters: str
    """Readable description of what the cells have in common."""
    cells: Cells
    keeps_samples: bool = field(default=False)
    is_about_slots: bool = field(default=False)
    """Whether to report a receiver that knows only slots, not message numbers, as well."""


def _cell(effort: Effort, size: int, scheme: Scheme, **rest: Any) -> Cell:
    return Cell(message_bytes=size, scheme=scheme, runs=effort.runs(size), **rest)


def _sizes(effort: Effort) -> Iterator[Cell]:
    sizes = [size for size in SIZES if size <= effort.size_max]
    for loss, size, scheme in product((1e-5, 1e-3), sizes, SCHEMES):
        yield _cell(effort, size, scheme, loss=loss)


def _round_trips(effort: Effort) -> Iterator[Cell]:
    for round_trip, scheme in product(ROUND_TRIPS, SCHEMES):
        # 8 GiB at 400 Gbit/s and a loss of 1e-5, all scaled by 8; quick: by 64.
        scale = 8 if effort is FULL else 64
        yield _cell(
            effort,
            8 * GIB // scale,
            scheme,
            loss=1e-5 * scale,
            rate=400_000_000_000 // scale,
            round_trip=round_trip,
        )


def _losses(effort: Effort) -> Iterator[Cell]:
    size = min(128 * MIB, effort.size_max)
    for loss, scheme in product(HALF_DECADES, SCHEMES):
        yield _cell(effort, size, scheme, loss=loss)


def _map(effort: Effort) -> Iterator[Cell]:
    sizes = [size for size in SIZES[:-1] if size <= effort.size_max]
    losses = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
    for loss, size, scheme in product(losses, sizes, (REPEAT_TIMEOUT, REPEAT, MDS)):
        # Enough messages for p99.9 where losses can show in it and messages aren't too long.
        is_tail_seen = size <= MIB or (size <= MAP_TAIL_BYTES and loss >= MAP_TAIL_LOSS)
        runs = effort.runs_max if is_tail_seen else effort.runs(size)
        yield Cell(message_bytes=size, scheme=scheme, runs=runs, loss=loss)


def _codes(effort: Effort) -> Iterator[Cell]:
    size = min(128 * MIB, effort.size_max)
    for (k, m), loss in product(CODES, HALF_DECADES[4:]):
        yield _cell(effort, size, Scheme(k=k, m=m), loss=loss)


def _products(effort: Effort) -> Iterator[Cell]:
    size = min(128 * MIB, effort.size_max)
    rates = (100_000_000_000, 200_000_000_000, 400_000_000_000)
    for rate, ms, scheme in product(rates, (5, 25, 75), (REPEAT_TIMEOUT, REPEAT, MDS)):
        yield _cell(effort, size, scheme, loss=1e-5, rate=rate, round_trip=ms * MS)


def ring_cell(effort: Effort, sites: int, loss: float, scheme: Scheme) -> Cell:
    """Return the cell whose messages are the steps of a ring all-reduce."""
    return _cell(effort, RING_BYTES // sites, scheme, loss=loss)


RING_LOSSES: Final = (1e-5, 1e-4, 1e-3, 1e-2)
RING_SCHEMES: Final = (REPEAT_TIMEOUT, REPEAT, MDS)


def _ring(effort: Effort) -> Iterator[Cell]:
    for sites, loss, scheme in product(SITES, RING_LOSSES, RING_SCHEMES):
        yield ring_cell(effort, sites, loss, scheme)


FAULT_BYTES: Final = 8 * MIB
FAULT_SCHEMES: Final = (
    REPEAT_TIMEOUT,
    REPEAT,
    MDS,
    Scheme(k=32, m=8, depth=8),
    Scheme(k=32, m=8, depth=32),
)
FAULTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("P = 1e-3", {"loss": 1e-3}),
    ("bursts of 8", {"loss": 1e-3, "burst_packets": 8.0}),
    ("bursts of 64", {"loss": 1e-3, "burst_packets": 64.0}),
    ("P = 1e-2", {"loss": 1e-2}),
    ("1e-2, bursts of 8", {"loss": 1e-2, "burst_packets": 8.0}),
    ("1e-2, bursts of 64", {"loss": 1e-2, "burst_packets": 64.0}),
    ("ACKs lost: 1 %", {"loss": 1e-3, "acknowledgement_loss": 1e-2}),
    ("ACKs lost: 10 %", {"loss": 1e-3, "acknowledgement_loss": 1e-1}),
    ("jitter 1 ms", {"loss": 1e-3, "jitter": MS}),
    ("1 % late by ≤ 1 ms", {"loss": 1e-3, "reorder": 1e-2, "reorder_seconds": MS}),
    ("bitmap chunk 4 KiB", {"loss": 1e-2, "chunk_units": 1}),
    ("bitmap chunk 256 KiB", {"loss": 1e-2, "chunk_units": 64}),
)


def fault_cell(effort: Effort, faults: dict[str, Any], scheme: Scheme) -> Cell:
    """Return a cell with faults that the paper doesn't cover."""
    runs = P99_RUNS if effort is FULL else effort.runs(FAULT_BYTES)
    return Cell(message_bytes=FAULT_BYTES, scheme=scheme, runs=runs, **faults)


def _faults(effort: Effort) -> Iterator[Cell]:
    for (_, faults), scheme in product(FAULTS, FAULT_SCHEMES):
        yield fault_cell(effort, faults, scheme)


LATE_SLOTS: Final = (2, 4, 16)
LATE_MESSAGES: Final = 100_000


def late_cell(effort: Effort, slots: int, scheme: Scheme) -> Cell:
    """Return a cell of short messages with many late and duplicate packets."""
    return Cell(
        message_bytes=64 * KIB,
        scheme=scheme,
        loss=1e-3,
        reorder=0.05,
        reorder_seconds=0.05,
        duplicate=0.05,
        slots=slots,
        depth=slots,
        runs=LATE_MESSAGES if effort is FULL else effort.runs(64 * KIB),
    )


def _late(effort: Effort) -> Iterator[Cell]:
    for slots, scheme in product(LATE_SLOTS, (REPEAT, MDS)):
        yield late_cell(effort, slots, scheme)


TAIL_LOSSES: Final = (
    Loss(rate=1e-4),
    Loss(rate=1e-3),
    Loss(rate=1e-2),
    Loss(rate=1e-2, burst_packets=8.0),
)
TAIL_RATES: Final = (20_000_000, 100_000_000)
TAIL_SIZES: Final = (MIB, 8 * MIB, 128 * MIB)
"""Message lengths at 12.8 Gbit/s; scaled with the rate, as in the lab."""
TAIL_UNIT_BYTES: Final = 1408


@cache
def _planned(rate: int, loss: Loss) -> Plan:
    path = Cell(message_bytes=1, scheme=REPEAT, rate=rate, unit_bytes=TAIL_UNIT_BYTES).path
    return plan(replace(path, loss=loss), Objective.P99)


def _tails(effort: Effort) -> Iterator[Cell]:
    for rate, loss, size in product(TAIL_RATES, TAIL_LOSSES, TAIL_SIZES):
        message_bytes = size * rate // 12_800_000_000
        row = _planned(rate, loss).row(message_bytes)
        yield Cell(
            message_bytes=message_bytes,
            scheme=Scheme(k=row.k, m=row.m, depth=row.depth),
            loss=loss.rate,
            burst_packets=loss.burst_packets,
            acknowledgement_loss=loss.rate,
            acknowledgement_burst=loss.burst_packets,
            rate=rate,
            unit_bytes=TAIL_UNIT_BYTES,
            runs=min(effort.units // (1 + message_bytes // TAIL_UNIT_BYTES), effort.runs_max),
        )


EXPERIMENTS: Final = (
    Experiment(
        name="E1",
        title="Completion by message size (paper's Fig. 3a, 10a)",
        parameters="400 Gbit/s, 25 ms",
        cells=_sizes,
    ),
    Experiment(
        name="E2",
        title="Completion by round trip (Fig. 3b)",
        parameters="8 GiB, 400 Gbit/s, P = 1e-5, scaled by 8: 1 GiB, 50 Gbit/s, 8e-5 "
        "(quick: scaled by 64)",
        cells=_round_trips,
    ),
    Experiment(
        name="E3",
        title="Completion by loss (Fig. 3c, 10b, 10c)",
        parameters="128 MiB, 400 Gbit/s, 25 ms",
        cells=_losses,
    ),
    Experiment(
        name="E4",
        title="Selective repeat / MDS (32, 8) (Fig. 9)",
        parameters="400 Gbit/s, 25 ms",
        cells=_map,
    ),
    Experiment(
        name="E5",
        title="Messages that fall back to retransmission, by code and loss (Fig. 10d)",
        parameters="128 MiB, 400 Gbit/s, 25 ms",
        cells=_codes,
    ),
    Experiment(
        name="E7",
        title="Completion by bandwidth and round trip (Fig. 12)",
        parameters="128 MiB, P = 1e-5",
        cells=_products,
    ),
    Experiment(
        name="E8",
        title="Ring all-reduce of 128 MiB (Fig. 13)",
        parameters="400 Gbit/s, 25 ms; 2N - 2 rounds, each of N measured steps of 128 MiB / N",
        cells=_ring,
        keeps_samples=True,
    ),
    Experiment(
        name="E12",
        title="Bursts, jitter, lost ACKs, chunks (beyond the paper)",
        parameters="8 MiB, 400 Gbit/s, 25 ms",
        cells=_faults,
    ),
    Experiment(
        name="E13",
        title="Late packets after their slot was reused (beyond the paper)",
        parameters="64 KiB, 400 Gbit/s, 25 ms, P = 1e-3, 5 % late by up to 50 ms, 5 % duplicated",
        cells=_late,
        is_about_slots=True,
    ),
    Experiment(
        name="E14",
        title="p99 of schemes planned for p99, losses in both directions (beyond the paper)",
        parameters="1, 8, 128 MiB at 12.8 Gbit/s, scaled to 20 and 100 Mbit/s; 25 ms, units of "
        "1408 bytes",
        cells=_tails,
    ),
)
