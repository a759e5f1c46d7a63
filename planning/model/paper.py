"""The erasure-coded model of SDR-RDMA (arXiv:2505.05366, §4.2.3 and Appendix B), as published.

All data is sent before its parity; after a fallback time-out, a failed submessage is sent again as
a whole, with selective repeat. `schemes` models what this stack does instead.
"""

import math
from typing import Final

import numpy as np

from sealane.planning.model.blocks import block_success, xor_success
from sealane.planning.model.completion import Completion, certain, mixture
from sealane.planning.model.path import Loss, Path
from sealane.planning.model.schemes import RTO_FACTOR, SelectiveRepeat, completion

FALLBACK_FACTOR: Final = 1.0
"""Beta: the wait for late parity before a submessage falls back, in round trips."""
WEIGHT_MIN: Final = 1e-12
PARTS_MAX: Final = 48
"""Numbers of failed submessages that are distinguished; neighbours are merged beyond that."""


def erasure_coded(
    path: Path, message_bytes: int, *, k: int, m: int, xor: bool = False
) -> Completion:
    """Return the distribution of T_EC, in seconds, for independent losses."""
    rate = path.loss.rate
    units = path.units(message_bytes)
    blocks = math.ceil(units / k)
    base = (units + math.ceil(units * m / k)) * path.unit_seconds + path.round_trip_seconds
    success = xor_success(rate, k, m) if xor else block_success(Loss(rate=rate), k, m)
    parts = []
    for weight, failures in _failures(blocks, 1 - success):
        if failures == 0:
            parts.append((weight, certain(base)))
            continue
        resent = round(failures * min(k, units)) * path.unit_bytes
        again = completion(path, resent, SelectiveRepeat(RTO_FACTOR), resolution=64)
        wait = base + FALLBACK_FACTOR * path.round_trip_seconds
        parts.append((weight, again.later(wait)))
    return mixture(parts)


def fallback_probability(loss: float, blocks: int, k: int, m: int, *, xor: bool = False) -> float:
    """Return P_fallback, the probability that any submessage can't be decoded."""
    success = xor_success(loss, k, m) if xor else block_success(Loss(rate=loss), k, m)
    return float(-math.expm1(blocks * math.log(success))) if success > 0 else 1.0


def _failures(blocks: int, failure: float) -> list[tuple[float, float]]:
    """Return (probability, number) of failed submessages; neighbours are merged if many matter."""
    if failure <= 0:
        return [(1.0, 0.0)]
    if failure >= 1:
        return [(1.0, float(blocks))]
    numbers = np.arange(blocks + 1)
    factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1.0, blocks + 1)))))
    logs = factorials[-1] - factorials - factorials[::-1]
    logs = logs + numbers * math.log(failure) + (blocks - numbers) * math.log1p(-failure)
    weights = np.exp(logs)
    counted = numbers[weights > WEIGHT_MIN]
    found = []
    for group in np.array_split(counted, min(len(counted), PARTS_MAX)):
        weight = float(weights[group].sum())
        found.append((weight, float((weights[group] * group).sum() / weight)))
    return found
