"""One run of the simulator: a workload, a scheme and a seed; and what is kept of it."""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from benchmarks.uno.networks import Network, Scheme
from benchmarks.uno.traffic import PACKET_BYTES, Chain, Flow, Rings, is_far
from numpy.typing import NDArray

from sealane import _native

WIRE_FACTOR: Final = 4160 / 4096
"""Wire bytes of a packet per payload byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A run."""

    figure: str
    workload: str
    scheme: Scheme
    seed: int
    network: Network
    flows: tuple[Flow, ...]
    chains: tuple[Chain, ...] = ()
    rings: Rings | None = None
    """The collectives of which the flows are part; their times are kept instead of the flows'."""
    sample_millis: int = 0
    """Interval of samples of rates and of the queue before the last host; 0: none."""
    time_millis: int = 5_000

    @property
    def key(self) -> str:
        """Name under which the result is saved."""
        return f"{self.figure}/{self.workload}/{self.scheme.name}/{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Completion times of a class of flows, in milliseconds."""

    count: int
    mean: float
    p50: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is kept of a run."""

    key: str
    figure: str
    workload: str
    scheme: str
    seed: int
    all: Times | None
    near: Times | None
    far: Times | None
    unfinished: int
    wire_per_payload: float
    jain: float | None
    """Fairness of the rates in the second half of the samples."""
    near_per_far: float | None
    """Mean rate of near flows over that of far flows, in the same time."""
    queue_p99: float | None
    """Bytes before the last host, in the same time."""
    ideal: float | None
    """Mean time of a collective whose workers have idle links, in milliseconds."""
    processor_seconds: float


def times(values: NDArray[np.float64]) -> Times | None:
    if not len(values):
        return None
    return Times(
        count=len(values),
        mean=float(values.mean()),
        p50=float(np.quantile(values, 0.5)),
        p99=float(np.quantile(values, 0.99)),
        worst=float(values.max()),
    )


def jain(rates: NDArray[np.float64]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = float((rates**2).sum())
    return float(rates.sum()) ** 2 / (len(rates) * squares) if squares else 1.0


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell and return its record as JSON values."""
    begun = time.thread_time()
    result = _native.simulate_flows(
        flows=cell.flows,
        congestion=cell.scheme.congestion,
        without=cell.scheme.without,
        balance=cell.scheme.balance,
        code=cell.scheme.code,
        chains=cell.chains,
        sample_every_nanos=cell.sample_millis * 1_000_000,
        sample_host=cell.flows[0][1],
        seed=cell.seed,
        time_nanos_max=cell.time_millis * 1_000_000,
        **cell.network.links(cell.scheme.marking),
    )
    far = np.array([is_far(flow) for flow in cell.flows])
    ends = np.array([flow[0] for flow in result["flows"]], dtype=np.float64)
    starts = np.array([flow[2] for flow in cell.flows], dtype=np.float64)
    done = ends > 0
    taken = (ends - starts) / 1e6
    sent = sum(flow[1] for flow in result["flows"])
    payload = sum(-(-flow[3] // 4096) for flow in cell.flows)
    shares = _shares(result["samples"], far) if cell.sample_millis else (None, None, None)
    values, ideal = (taken[done], None)
    if cell.rings is not None:
        values, ideal = _collectives(result, cell.rings, far)
    is_apart = cell.rings is None
    record = Record(
        key=cell.key,
        figure=cell.figure,
        workload=cell.workload,
        scheme=cell.scheme.name,
        seed=cell.seed,
        all=times(values),
        near=times(taken[done & ~far]) if is_apart else None,
        far=times(taken[done & far]) if is_apart else None,
        unfinished=int((~done).sum()),
        wire_per_payload=sent / payload * WIRE_FACTOR if done.all() else 0.0,
        jain=shares[0],
        near_per_far=shares[1],
        queue_p99=shares[2],
        ideal=ideal,
        processor_seconds=time.thread_time() - begun,
    )
    return asdict(record)


def _collectives(
    result: Mapping[str, Any], rings: Rings, far: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], float]:
    """Return the time of each collective that has ended, and what one takes on idle links, in ms.

    One begins when the last worker of its ring has all of the one before.
    """
    ends = [
        [
            max(result["chunks"][worker][(number + 1) * rings.steps - 1] for worker in ring)
            for number in range(rings.rounds)
            if all(len(result["chunks"][worker]) >= (number + 1) * rings.steps for worker in ring)
        ]
        for ring in np.arange(len(far)).reshape(rings.rings, rings.workers)
    ]
    taken = np.concatenate([np.diff([0, *ring]) for ring in ends]) / 1e6
    return taken, _ideal(result, rings, far[: rings.workers]) / 1e6


def _ideal(result: Mapping[str, Any], rings: Rings, far: NDArray[np.bool_]) -> float:
    """Return the mean time of a ring's collectives in nanoseconds, each chunk on idle links."""
    packets = rings.chunk_bytes // PACKET_BYTES
    sending = packets * result["packet_nanos"]
    way = np.where(far, result["far_way_nanos"], result["near_way_nanos"])
    free = np.zeros(rings.workers)
    arrived = np.zeros(rings.workers)
    for _ in range(rings.rounds * rings.steps):
        # What a worker sends next has arrived of the one before it.
        left = np.maximum(free, np.roll(arrived, 1))
        free = left + sending
        arrived = free - result["packet_nanos"] + way
    return float(arrived.max()) / rings.rounds


def _shares(
    samples: Sequence[tuple[int, list[int], int]], far: NDArray[np.bool_]
) -> tuple[float | None, float | None, float | None]:
    """Return fairness, near by far, and the queue's p99 while all flows send."""
    acked = np.array([sample[1] for sample in samples], dtype=np.float64)
    if len(acked) < 4:
        return None, None, None
    # Until the first flow has all: after that, rates are not comparable.
    growing = (np.diff(acked, axis=0) > 0).all(axis=1)
    steps = len(growing) if growing.all() else int(np.argmin(growing[1:])) + 1
    half = steps // 2
    rates = acked[steps] - acked[half]
    queue = float(np.quantile([sample[2] for sample in samples[half:steps]], 0.99))
    has_both = far.any() and (~far).any() and rates[far].mean() > 0
    near_per_far = float(rates[~far].mean() / rates[far].mean()) if has_both else None
    return jain(rates), near_per_far, queue


def call(cell: Cell) -> functools.partial[dict[str, Any]]:
    """Return the call that measures a cell."""
    return functools.partial(measure, cell)
