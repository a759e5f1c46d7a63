"""A cell: one path, one size, one scheme, so many messages; run by the stack in virtual time."""

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from benchmarks.sessions.intervals import Summary, summarize
from benchmarks.sessions.simulate.curves import Curve, curve, modelled

from sealane import _native
from sealane.planning.model import Loss, Path, ideal, wire_units
from sealane.planning.model.path import PACKET_OVERHEAD_BYTES

UNIT_BYTES: Final = 4096
PARTS: Final = 1_000_000_000
SLOTS: Final = 2
BUFFER_BYTES: Final = 64 << 20
"""Before the wire: nothing is dropped there, the ends pace themselves."""
COUNTED: Final[tuple[str, ...]] = ("retransmitted_packets", "spurious_retransmissions", "timeouts")
"""What is kept of the sending end's statistics, where it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the stack survives loss: selective repeat without `k`, or MDS or XOR (m = 1)."""

    k: int = 0
    m: int = 0
    depth: int = 1
    detection: Literal["reports", "timeout"] = "reports"
    """`reports`: of gaps, by the peer (the paper's NACK); `timeout`: of 3 round trips only."""

    @property
    def name(self) -> str:
        """For people, in legends."""
        if not self.k:
            ways = {"reports": "SR (NACK)", "timeout": "SR (3 RTT)"}
            return ways[self.detection]
        name = f"{'XOR' if self.m == 1 else 'MDS'} ({self.k}, {self.m})"
        return name + (f" × {self.depth}" if self.depth > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What decides a measurement. Seconds, bits per second, bytes, probabilities per packet."""

    message_bytes: int
    scheme: Scheme
    loss: float = 0.0
    burst_packets: float = 1.0
    rate: int = 400_000_000_000
    round_trip: float = 0.025
    jitter: float = 0.0
    reorder: float = 0.0
    reorder_seconds: float = 0.0
    duplicate: float = 0.0
    acknowledgement_loss: float = 0.0
    """Of packets on the way back."""
    acknowledgement_burst: float = 1.0
    unit_bytes: int = UNIT_BYTES
    chunk_units: int = 16
    runs: int = 1000
    slots: int = SLOTS
    depth: int = 1
    """Messages posted at once."""

    @property
    def key(self) -> str:
        """Name of exactly this measurement."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """The same for the model."""
        return Path(
            rate_bits_per_second=self.rate,
            round_trip_seconds=self.round_trip,
            loss=Loss(rate=self.loss, burst_packets=max(1.0, self.burst_packets)),
            unit_bytes=self.unit_bytes,
            overhead_bytes=PACKET_OVERHEAD_BYTES,
        )

    @property
    def ideal(self) -> float:
        """Seconds without loss and parity."""
        return ideal(self.path, self.message_bytes)

    @property
    def first_transmission(self) -> float:
        """Seconds until all data and parity are acknowledged, if they are."""
        found = modelled(self.scheme)
        units = wire_units(self.path, self.message_bytes, found)
        return units * self.path.unit_seconds + self.round_trip

    @property
    def is_modelled(self) -> bool:
        """Whether the model has everything that this path does."""
        return not (self.jitter or self.reorder or self.duplicate or self.acknowledgement_loss)

    def _way(self, loss: float, burst: float) -> _native.LinkSettings:
        chain = None
        if burst > 1:
            end = 1 / burst
            begin = loss * end / (1 - loss)
            chain = (round(begin * PARTS), round(end * PARTS), PARTS, 0)
        return _native.LinkSettings(
            rate_bits_per_second=self.rate,
            delay_nanos=round(self.round_trip / 2 * 1e9),
            buffer_bytes=BUFFER_BYTES,
            loss_parts_per_billion=0 if chain else round(loss * PARTS),
            gilbert_elliott=chain,
            jitter_nanos=round(self.jitter * 1e9),
            reorder_parts_per_billion=round(self.reorder * PARTS),
            reorder_nanos_max=round(self.reorder_seconds * 1e9),
            duplicate_parts_per_billion=round(self.duplicate * PARTS),
        )

    def simulate(self) -> "_native.SimulationResult":
        """Run the stack; RuntimeError if a rule was broken or a message did not complete."""
        scheme = self.scheme
        result = _native.simulate(
            count=self.runs,
            message_bytes=self.message_bytes,
            seed=int(self.key, 16) >> 1,
            depth=self.depth,
            slots=self.slots,
            erasure_code=(scheme.k, scheme.m) if scheme.k else None,
            interleaving=scheme.depth,
            detection=scheme.detection,
            unit_bytes=self.unit_bytes,
            chunk_units=self.chunk_units,
            forward=self._way(self.loss, self.burst_packets),
            backward=self._way(self.acknowledgement_loss, self.acknowledgement_burst),
        )
        if result["violations"]:
            raise RuntimeError(f"{self}: {result['violations'][:3]}")
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cell and what it showed; times in seconds."""

    cell: Cell
    summary: Summary
    curve: Curve | None
    fallbacks: float
    """Share of messages that took half a round trip longer than their first transmission needs."""
    counters: dict[str, int]
    processor_seconds: float
    samples: list[float]
    """Rising; of cells that other figures are made of, else empty."""

    @property
    def slowdown(self) -> float:
        """Mean over the ideal."""
        return self.summary.mean / self.cell.ideal

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @staticmethod
    def from_dict(found: dict[str, Any]) -> "Measured":
        """Read what `to_dict` wrote."""
        cell, summary, known = (found[name] for name in ("cell", "summary", "curve"))
        made = {
            "cell": Cell(**(cell | {"scheme": Scheme(**cell["scheme"])})),
            "summary": Summary(**summary),
            "curve": None if known is None else Curve(**known),
        }
        return Measured(**(found | made))


def measure(cell: Cell, *, keep_samples: bool) -> Measured:
    """Run a cell and ask the model about it."""
    started = time.thread_time()
    result = cell.simulate()
    elapsed = time.thread_time() - started
    times = np.sort(np.asarray(result["completion_nanos"], dtype=np.float64)) / 1e9
    sent, received = result["sender"], result["receiver"]
    counters = {name: sent[name] for name in COUNTED if name in sent}
    counters |= {name: received[name] for name in ("late", "surplus", "decoded_units")}
    counters["lost_packets"] = result["forward"]["lost_packets"]
    counters["packets"] = result["forward"]["offered_packets"]
    counters["foreign_units"] = result["foreign_units"]
    counters["foreign_messages"] = result["foreign_messages"]
    return Measured(
        cell=cell,
        summary=summarize(times, seed=int(cell.key, 16)),
        curve=curve(cell.path, cell.message_bytes, cell.scheme) if cell.is_modelled else None,
        fallbacks=float((times > cell.first_transmission + cell.round_trip / 2).mean()),
        counters=counters,
        processor_seconds=elapsed,
        samples=times.tolist() if keep_samples else [],
    )
