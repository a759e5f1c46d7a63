"""Cells: messages of one size and scheme over one path, run by the stack in virtual time."""

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from benchmarks.sessions.intervals import Summary, summarize
from benchmarks.sessions.simulate.curves import Curve, Scheme, curve, modelled

from sealane import _native
from sealane.planning.model import Loss, Path, ideal, wire_units
from sealane.planning.packet import PACKET_OVERHEAD_BYTES

UNIT_BYTES: Final = 4096
PARTS: Final = 1_000_000_000
SLOTS: Final = 2
BUFFER_BYTES: Final = 64 << 20
"""Buffer in front of the link; it never overflows, because the ends pace themselves."""
COUNTED: Final[tuple[str, ...]] = ("retransmitted_packets", "spurious_retransmissions", "timeouts")
"""Statistics of the sending end that are saved, where present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Parameters of a measurement: seconds, bits per second, bytes, probabilities per packet."""

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
    """Loss of packets in the reverse direction."""
    acknowledgement_burst: float = 1.0
    unit_bytes: int = UNIT_BYTES
    chunk_units: int = 16
    runs: int = 1000
    slots: int = SLOTS
    depth: int = 1
    """Maximum number of messages posted at a time."""

    @property
    def key(self) -> str:
        """Digest of all parameters."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """Model of the path."""
        return Path(
            rate_bits_per_second=self.rate,
            round_trip_seconds=self.round_trip,
            loss=Loss(rate=self.loss, burst_packets=max(1.0, self.burst_packets)),
            unit_bytes=self.unit_bytes,
            overhead_bytes=PACKET_OVERHEAD_BYTES,
        )

    @property
    def ideal(self) -> float:
        """Completion in seconds without loss and parity."""
        return ideal(self.path, self.message_bytes)

    @property
    def first_transmission(self) -> float:
        """Seconds until all data and parity are acknowledged if nothing is lost."""
        found = modelled(self.scheme)
        units = wire_units(self.path, self.message_bytes, found)
        return units * self.path.unit_seconds + self.round_trip

    @property
    def is_modelled(self) -> bool:
        """Whether the model covers all effects of this path."""
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
        """Run the stack; raise RuntimeError on a violated rule or an incomplete message."""
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
    """A cell and its results; times in seconds."""

    cell: Cell
    summary: Summary
    curve: Curve | None
    fallbacks: float
    """Share of messages that took at least half a round trip beyond their first transmission."""
    counters: dict[str, int]
    processor_seconds: float
    samples: list[float]
    """Completion times in ascending order, if other figures are computed from them; else empty."""

    @property
    def slowdown(self) -> float:
        """Mean completion over the ideal."""
        return self.summary.mean / self.cell.ideal

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(found: dict[str, Any]) -> "Measured":
        """Return the object that `to_dict` was called on."""
        cell, summary, known = (found[name] for name in ("cell", "summary", "curve"))
        made = {
            "cell": Cell(**(cell | {"scheme": Scheme(**cell["scheme"])})),
            "summary": Summary(**summary),
            "curve": None if known is None else Curve(**known),
        }
        return Measured(**(found | made))


def measure(cell: Cell, *, keep_samples: bool) -> Measured:
    """Run a cell and compute the model's prediction."""
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
