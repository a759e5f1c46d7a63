"""One run of the simulator: a workload, a scheme and a seed; and what is kept of it."""

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from benchmarks.uno.networks import Network, Scheme
from benchmarks.uno.traffic import Flow, is_far
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
    record = Record(
        key=cell.key,
        figure=cell.figure,
        workload=cell.workload,
        scheme=cell.scheme.name,
        seed=cell.seed,
        all=times(taken[done]),
        near=times(taken[done & ~far]),
        far=times(taken[done & far]),
        unfinished=int((~done).sum()),
        wire_per_payload=sent / payload * WIRE_FACTOR if done.all() else 0.0,
        jain=shares[0],
        near_per_far=shares[1],
        queue_p99=shares[2],
        processor_seconds=time.thread_time() - begun,
    )
    return asdict(record)


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
