"""Ring all-reduce composed of measured messages: 2N - 2 accumulated rounds (reference, §5)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from benchmarks.sessions.simulate.cells import Measured
from benchmarks.sessions.simulate.curves import distribution
from benchmarks.sessions.simulate.experiments import RING_BYTES
from numpy.typing import NDArray

RINGS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Completion of an all-reduce, in seconds."""

    sites: int
    loss: float
    scheme: str
    mean: float
    p999: float
    """Computed from resampled measured steps, so it misses delays rarer than those measured."""
    model_mean: float
    model_p999: float


def accumulate(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Accumulate steps [round, ring, site]; a step waits for the last of site and neighbour."""
    done = np.zeros(steps.shape[1:])
    for step in steps:
        done = np.maximum(np.roll(done, 1, axis=1), done) + step
    found: NDArray[np.float64] = done.max(axis=1)
    return found


def rings(measured: Iterable[Measured]) -> Sequence[Ring]:
    """Return a ring for each cell, composed of its steps and of the model's."""
    return [_ring(one) for one in measured]


def _ring(measured: Measured) -> Ring:
    cell = measured.cell
    sites = RING_BYTES // cell.message_bytes
    shape = (2 * sites - 2, RINGS, sites)
    random = np.random.default_rng(int(cell.key, 16))
    found = accumulate(random.choice(np.asarray(measured.samples), shape))
    model = distribution(cell.path, cell.message_bytes, cell.scheme)
    index = np.searchsorted(model.cumulative, random.random(shape))
    expected = accumulate(model.times[np.minimum(index, len(model.times) - 1)])
    return Ring(
        sites=sites,
        loss=cell.loss,
        scheme=cell.scheme.name,
        mean=float(found.mean()),
        p999=float(np.quantile(found, 0.999)),
        model_mean=float(expected.mean()),
        model_p999=float(np.quantile(expected, 0.999)),
    )
