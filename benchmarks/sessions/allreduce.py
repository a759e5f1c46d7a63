"""All-reduces around rings of real session machines in virtual time, compared with the model."""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from benchmarks.sessions.intervals import Summary, summarize
from benchmarks.sessions.simulate.cells import BUFFER_BYTES, PARTS, UNIT_BYTES
from benchmarks.sessions.simulate.curves import FACTORS, Scheme, modelled
from benchmarks.sessions.simulate.experiments import MDS, REPEAT, REPEAT_TIMEOUT

from sealane import _native
from sealane.client.collectives import schedule
from sealane.planning.model import Loss, Path, all_reduce, all_reduce_ideal
from sealane.planning.packet import PACKET_OVERHEAD_BYTES

ARRAY_BYTES: Final = 128 << 20
RATE: Final = 400_000_000_000
ROUND_TRIP: Final = 0.025
SITES: Final = (2, 3, 4, 6, 8)
LOSSES: Final = (0.0, 1e-4, 1e-3, 1e-2)
SCHEMES: Final = (REPEAT_TIMEOUT, REPEAT, MDS)
PIECES: Final = 16
SLOTS: Final = 64
RINGS_MIN: Final = 4
MODEL_RINGS: Final = 20_000
ERROR_MAX: Final = 0.05
DEVIATIONS: Final = 4.0
"""Standard errors of a mean that are attributed to chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A ring of sites, a way of splitting the array and a scheme."""

    sites: int
    loss: float
    scheme: Scheme
    pieces: int
    """Messages per segment. One, acknowledged before the next is sent, is the paper's rounds."""
    rings: int

    @property
    def depth(self) -> int:
        """Maximum number of unacknowledged messages per site."""
        return 1 if self.pieces == 1 else SLOTS

    @property
    def way(self) -> str:
        """Readable name of the splitting."""
        return "rounds" if self.pieces == 1 else f"{self.pieces} pieces"

    @property
    def path(self) -> Path:
        """Model of each link of the ring."""
        return Path(
            rate_bits_per_second=RATE,
            round_trip_seconds=ROUND_TRIP,
            loss=Loss(rate=self.loss),
            unit_bytes=UNIT_BYTES,
            overhead_bytes=PACKET_OVERHEAD_BYTES,
        )

    @property
    def is_exact(self) -> bool:
        """Whether the model is exact: no retransmission delays the pieces after it."""
        segment = ARRAY_BYTES // self.sites
        injection = self.path.units(segment) * self.path.unit_seconds
        return self.pieces == 1 and injection <= FACTORS[self.scheme.detection] * ROUND_TRIP

    @property
    def packets(self) -> int:
        """Approximate number of data packets, without retransmissions."""
        return self.rings * ring_packets(self.sites)

    @property
    def key(self) -> str:
        """Digest of all parameters."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def seed(self) -> int:
        """Random seed, derived from the parameters."""
        return int(self.key, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cell and its results; times in seconds."""

    cell: Cell
    summary: Summary
    deviation: float
    model_mean: float
    model_p99: float
    ideal: float
    packets: int
    processor_seconds: float

    @property
    def ratio(self) -> float:
        """Mean of the stack over that of the model."""
        return self.summary.mean / self.model_mean

    @property
    def is_beyond(self) -> bool:
        """Whether the mean contradicts the model where that is exact, allowing for chance."""
        chance = DEVIATIONS * self.deviation / math.sqrt(self.summary.count)
        error = abs(self.summary.mean - self.model_mean)
        return self.cell.is_exact and error > ERROR_MAX * self.model_mean + chance

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(found: dict[str, Any]) -> "Measured":
        """Return the object that `to_dict` was called on."""
        cell = found["cell"]
        made = {
            "cell": Cell(**(cell | {"scheme": Scheme(**cell["scheme"])})),
            "summary": Summary(**found["summary"]),
        }
        return Measured(**(found | made))


def ring_packets(sites: int) -> int:
    """Return the approximate number of packets of one all-reduce, over all links."""
    return 2 * (sites - 1) * ARRAY_BYTES // UNIT_BYTES


def cells(packets: int) -> Iterator[Cell]:
    """Yield every cell, with enough rings for about `packets` packets."""
    for sites, loss, scheme, pieces in product(SITES, LOSSES, SCHEMES, (1, PIECES)):
        rings = max(RINGS_MIN, packets // ring_packets(sites)) if loss else RINGS_MIN
        yield Cell(sites=sites, loss=loss, scheme=scheme, pieces=pieces, rings=rings)


def measure(cell: Cell) -> Measured:
    """Run the rings of a cell, and sample the model often enough for its mean."""
    piece = math.ceil(ARRAY_BYTES / (cell.sites * cell.pieces))
    plans = [schedule.all_reduce(n, cell.sites, ARRAY_BYTES, piece) for n in range(cell.sites)]
    started = time.thread_time()
    result = _native.simulate_ring(
        sites=[plan.in_bytes(1) for plan in plans],
        repeats=cell.rings,
        seed=cell.seed >> 8,
        depth=cell.depth,
        slots=SLOTS,
        erasure_code=(cell.scheme.k, cell.scheme.m) if cell.scheme.k else None,
        interleaving=cell.scheme.depth,
        unit_bytes=UNIT_BYTES,
        link=_native.LinkSettings(
            rate_bits_per_second=RATE,
            delay_nanos=round(ROUND_TRIP / 2 * 1e9),
            buffer_bytes=BUFFER_BYTES,
            loss_parts_per_billion=round(cell.loss * PARTS),
        ),
        detection=cell.scheme.detection,
    )
    elapsed = time.thread_time() - started
    for session in result["sessions"]:
        if session["violations"]:
            raise RuntimeError(f"{cell}: {session['violations'][:3]}")
    times = np.asarray(result["completion_nanos"]) / 1e9
    expected = all_reduce(
        cell.path,
        ARRAY_BYTES,
        cell.sites,
        modelled(cell.scheme),
        count=MODEL_RINGS // cell.pieces,
        random=np.random.default_rng(cell.seed),
        pieces=cell.pieces,
        depth=cell.depth,
    )
    return Measured(
        cell=cell,
        summary=summarize(times, seed=cell.seed),
        deviation=float(expected.std()),
        model_mean=float(expected.mean()),
        model_p99=float(np.quantile(expected, 0.99)),
        ideal=all_reduce_ideal(cell.path, ARRAY_BYTES, cell.sites, pieces=cell.pieces),
        packets=sum(session["forward"]["offered_packets"] for session in result["sessions"]),
        processor_seconds=elapsed,
    )
