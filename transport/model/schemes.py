"""Completion times of the schemes as this stack runs them (docs/sessions.md).

Time runs from the first transmission to the acknowledgement of the last unit, in seconds. What is
lost is sent again one round trip after its transmission, when the receiver has reported it, however
often it takes; without reports, one time-out after it.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from sealane.errors import UsageError
from sealane.transport.model.blocks import BlockLosses, block_losses, check_code
from sealane.transport.model.completion import (
    RESOLUTION,
    Completion,
    Items,
    Values,
    certain,
    mixture,
    repeated,
)
from sealane.transport.model.path import Loss, Path

NACK_FACTOR: Final = 1.0
"""Round trips from a transmission to the report that it was lost: the paper's SR NACK."""
RTO_FACTOR: Final = 3.0
"""The same with time-outs alone, the paper's SR RTO: 1 + alpha, alpha = 2."""
NEGLIGIBLE: Final = 1e-15


@dataclass(frozen=True, slots=True)
class SelectiveRepeat:
    """What is lost is sent again."""

    timeout_factor: float = NACK_FACTOR


@dataclass(frozen=True, slots=True)
class ErasureCoded:
    """Blocks of k data and m parity units, `depth` of them interleaved; (k, 1) is a XOR code.

    Parity follows the data of its block at once. A block that it cannot mend gets exactly the
    units that it lacks, as soon as their loss is known.
    """

    k: int
    m: int
    depth: int = 1
    timeout_factor: float = NACK_FACTOR

    def __post_init__(self) -> None:
        check_code(self.k, self.m)
        if self.depth < 1:
            raise UsageError("model.code.range", f"depth {self.depth}: 1 at least")


Scheme = SelectiveRepeat | ErasureCoded


def completion(
    path: Path, message_bytes: int, scheme: Scheme, resolution: int = RESOLUTION
) -> Completion:
    """Distribution of the completion time of one message on an idle path.

    With independent losses exact while injection takes no longer than a time-out, a lower bound
    above. With bursts an approximation (docs/sessions.md): a run of lost units counts as one event,
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
    """Units of the first transmission, parity included."""
    units = path.units(message_bytes)
    if isinstance(scheme, SelectiveRepeat):
        return units
    return units + math.ceil(units / scheme.k) * scheme.m


def _repeated(path: Path, units: int, step: float, resolution: int) -> Completion:
    loss, unit = path.loss, path.unit_seconds
    end = units * unit
    if loss.rate == 0:
        return certain(end)
    if loss.is_independent:

        def pending(n: Values) -> Values:
            return np.asarray(loss.rate**n)

        items = [Items(count=units, first=unit, spacing=unit, pending=pending)]
        return repeated(items, step, end, resolution)
    # A burst is one event, at its last unit; sent again as one, it may be hit again.
    again = _burst_again(loss)
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


def _burst_again(loss: Loss) -> float:
    """Probability that a burst of a length drawn from its distribution is hit when sent again."""
    survive = (1 - loss.rate) * loss.end / (1 - (1 - loss.end) * (1 - loss.begin))
    return float(1 - survive)


def _coded(
    path: Path, units: int, scheme: ErasureCoded, step: float, resolution: int
) -> Completion:
    unit, m = path.unit_seconds, scheme.m
    blocks = math.ceil(units / scheme.k)
    rest = units - (blocks - 1) * scheme.k
    end = (units + blocks * m) * unit
    if path.loss.rate == 0:
        return certain(end - m * min(scheme.depth, blocks) * unit)
    depth = min(scheme.depth, blocks)
    full = block_losses(path.loss, scheme.k, m, depth)
    last = block_losses(path.loss, rest, m, depth)
    spacing = (scheme.k + m) * unit
    items = [Items(count=1, first=end, spacing=0.0, pending=_block_pending(path.loss, last, m))]
    if blocks > 1:
        pending = _block_pending(path.loss, full, m)
        items.append(
            Items(
                count=blocks - 1,
                first=spacing,
                spacing=spacing,
                pending=pending,
                weight=_event_share(path.loss, depth),
            )
        )
    late = repeated(items, step, end, resolution)
    return _early(path, late, (last, full), blocks=blocks, depth=depth)


def _event_share(loss: Loss, depth: int) -> float:
    """Independent events in a group of interleaved blocks, over the number of blocks.

    A burst hits neighbours of a group together: each next one is new only as far as the chain
    forgets in one packet.
    """
    return (1 + (depth - 1) * (loss.begin + loss.end)) / depth


def _early(
    path: Path,
    late: Completion,
    losses: tuple[BlockLosses, BlockLosses],
    *,
    blocks: int,
    depth: int,
) -> Completion:
    """Let the last group of blocks complete with its k-th units rather than with its last parity.

    If nothing is repeated, the x-th parity unit of `depth` blocks was the last that was needed.
    """
    last, full = losses
    m = len(last.enough) - 1
    group = (blocks - 1) % depth + 1
    share = _event_share(path.loss, depth)
    enough = last.enough * full.enough ** ((group - 1) * share)
    earlier = full.success ** ((blocks - group) * share)
    times = late.times[0] - (m - np.arange(m + 1)) * group * path.unit_seconds
    first = Completion(times, np.minimum(enough / enough[-1], 1.0))
    weight = min(float(enough[-1] * earlier), 1.0)
    if weight >= 1.0 or len(late.times) == 1:
        return first
    cumulative = np.maximum(late.cumulative - weight, 0.0)
    rest = Completion(late.times, cumulative / cumulative[-1])
    return mixture([(weight, first), (1 - weight, rest)])


def _block_pending(loss: Loss, losses: BlockLosses, m: int) -> "_BlockPending":
    lacking = losses.lost[m + 1 :]
    # What is less likely than a rounding error need not be carried along.
    count = int(np.searchsorted(-lacking[::-1].cumsum()[::-1], -NEGLIGIBLE))
    return _BlockPending(loss, lacking[: max(count, 1)])


@dataclass(frozen=True, slots=True)
class _BlockPending:
    """Probability that a block is not mended after n transmissions of what it lacks."""

    loss: Loss
    lacking: Values
    """[e - 1]: probability that e units more are lost than parity replaces."""

    def __call__(self, n: Values) -> Values:
        lacking = np.arange(1.0, len(self.lacking) + 1)
        if self.loss.is_independent:
            still = 1 - (1 - self.loss.rate ** (n[:, None] - 1)) ** lacking[None, :]
        else:
            survive = (1 - self.loss.rate) * (1 - self.loss.begin) ** (lacking - 1)
            still = (1 - survive[None, :]) ** (n[:, None] - 1)
        return np.asarray((still * self.lacking[None, :]).sum(axis=1))
