"""Completion times of the schemes as this stack runs them (docs/understand/sessions.md).

Time runs from the first transmission to the acknowledgement of the last unit, in seconds. A lost
unit is retransmitted one round trip after its transmission, when the receiver has reported the
loss, as often as needed; without reports, one time-out after it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sealane.errors import UsageError
from sealane.planning.model.blocks import check_code
from sealane.planning.model.completion import (
    RESOLUTION,
    Completion,
    Items,
    Values,
    certain,
    mixture,
    repeated,
)
from sealane.planning.model.path import Loss, Path
from sealane.planning.model.tail import Age, Tail

NACK_FACTOR: Final = 1.0
"""Round trips from a transmission to the report of its loss: the paper's SR NACK."""
RTO_FACTOR: Final = 3.0
"""The same by time-outs alone, the paper's SR RTO: 1 + alpha, alpha = 2."""
NEGLIGIBLE: Final = 1e-15


@dataclass(frozen=True, slots=True)
class SelectiveRepeat:
    """Lost units are retransmitted."""

    timeout_factor: float = NACK_FACTOR


@dataclass(frozen=True, slots=True)
class ErasureCoded:
    """Blocks of k data and m parity units, `depth` of them interleaved; (k, 1) is an XOR code.

    All data is sent first, then parity (`model.tail`). Losses known before that are retransmitted
    at once; a block that its parity can't repair gets exactly the units that it lacks. UsageError
    `model.code.range`.
    """

    k: int
    m: int
    depth: int = 1
    timeout_factor: float = NACK_FACTOR
    gap_seconds: float = 0.0
    """Pause between data and parity, so that one burst does not hit both."""

    def __post_init__(self) -> None:
        check_code(self.k, self.m)
        if self.gap_seconds < 0:
            raise UsageError(
                "model.code.range", f"pause of {self.gap_seconds} s before parity; at least 0"
            )
        if self.depth < 1:
            raise UsageError("model.code.range", f"depth {self.depth}; allowed: at least 1")


Scheme = SelectiveRepeat | ErasureCoded


def completion(
    path: Path, message_bytes: int, scheme: Scheme, resolution: int = RESOLUTION
) -> Completion:
    """Return the distribution of one message's completion time on an idle path.

    With independent losses, exact if injection takes no longer than a time-out, otherwise a lower
    bound. With bursts, an approximation (sessions.md): a run of lost units counts as one event, and
    interleaved blocks as fewer than they are.
    """
    step = scheme.timeout_factor * path.round_trip_seconds + path.unit_seconds
    units = path.units(message_bytes)
    if isinstance(scheme, ErasureCoded):
        found = _coded(path, units, scheme, step, resolution)
    else:
        found = _repeated(path, units, step, resolution)
    return found.later(path.round_trip_seconds)


def wire_units(path: Path, message_bytes: int, scheme: Scheme) -> int:
    """Return the units of the first transmission, including all parity.

    A message longer than a round trip sends fewer: none for blocks known to be complete when all
    its data has been sent.
    """
    units = path.units(message_bytes)
    if isinstance(scheme, SelectiveRepeat):
        return units
    return units + math.ceil(units / scheme.k) * scheme.m


def _repeated(path: Path, units: int, step: float, resolution: int) -> Completion:
    loss, unit = path.loss.every(path.count), path.unit_seconds
    end = units * unit
    if loss.rate == 0:
        return certain(end)
    if loss.is_independent:

        def pending(n: Values) -> Values:
            return np.asarray(loss.rate**n)

        items = [Items(count=units, first=unit, spacing=unit, pending=pending)]
        return repeated(items, step, end, resolution)
    # A burst is one event, at its last unit. It is retransmitted together, and may be hit again.
    again = loss.again_after(round(step / (unit * path.count)))
    inside = loss.rate * loss.end

    def burst(n: Values) -> Values:
        return np.asarray(inside * again ** (n - 1))

    def first(n: Values) -> Values:
        # The message may begin within a burst.
        return np.asarray((loss.rate - inside) / (1 - inside) * again ** (n - 1))

    items = [
        Items(count=units, first=unit, spacing=unit, pending=burst),
        Items(count=1, first=unit, spacing=0.0, pending=first),
    ]
    return repeated(items, step, end, resolution)


def _coded(
    path: Path, units: int, scheme: ErasureCoded, step: float, resolution: int
) -> Completion:
    tail = Tail(path, units, scheme.k, scheme.m, scheme.depth, step, scheme.gap_seconds)
    if path.loss.rate == 0:
        return certain(tail.data_end)
    likely, whole, end = tail.completion(resolution)
    if likely >= 1:
        return whole
    items = [items for age in tail.ages for items in _failing(tail, age, end)]
    late = repeated(items, step, end, resolution)
    if len(late.times) == 1:
        return whole
    # What parity doesn't complete, retransmissions do.
    cumulative = np.maximum(late.cumulative - likely, 0.0)
    rest = Completion(late.times, cumulative / cumulative[-1])
    return mixture([(likely, whole), (1 - likely, rest)])


def _failing(tail: Tail, age: Age, end: float) -> Iterator[Items]:
    """Yield the blocks that lack more units than parity replaces, at the first unit too many."""
    unit, m = tail.path.unit_seconds, tail.m
    again = tail.path.loss.again_after(round(tail.step / unit))
    data = age.losses.lost_data[m + 1 :]
    parity = np.maximum(age.losses.lost[m + 1 :] - data, 0.0)
    last = min((age.first + 1) * tail.k, tail.units) * unit + (age.transmissions - 1) * tail.step
    places = ((data, last, tail.k * unit), (parity, end - (age.count - 1) * unit, unit))
    for lacking, first, spacing in places:
        # Ignore what is less likely than a rounding error.
        carried = int(np.searchsorted(-lacking[::-1].cumsum()[::-1], -NEGLIGIBLE))
        if carried:
            pending = _BlockPending(tail.path.loss, lacking[:carried], again)
            yield Items(
                count=age.count, first=first, spacing=spacing, pending=pending, weight=age.weight
            )


@dataclass(frozen=True, slots=True)
class _BlockPending:
    """Probability that a block is incomplete after n transmissions of the units that it lacks."""

    loss: Loss
    lacking: Values
    """[e - 1]: probability that e more units are lost than parity replaces."""
    again: float
    """Probability that the retransmission of a burst is lost, too."""

    def __call__(self, n: Values) -> Values:
        lacking = np.arange(1.0, len(self.lacking) + 1)
        if self.loss.is_independent:
            still = 1 - (1 - self.loss.rate ** (n[:, None] - 1)) ** lacking[None, :]
        else:
            survive = (1 - self.loss.rate) * (1 - self.loss.begin) ** (lacking - 1)
            survive *= (1 - self.again) / (1 - self.loss.again)
            still = (1 - survive[None, :]) ** (n[:, None] - 1)
        return np.asarray((still * self.lacking[None, :]).sum(axis=1))
