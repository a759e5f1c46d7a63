"""Exact distributions of a block's lost units, for independent losses and for bursts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sealane.errors import UsageError
from sealane.planning.model.completion import Values
from sealane.planning.model.path import Loss

BLOCK_UNITS_MAX = 255
"""Largest number of data and parity units of a block together (docs/formats/session-wire.md)."""


def check_code(k: int, m: int) -> None:
    """Raise UsageError `model.code.range` for a code that the wire format can't express."""
    if k < 1 or m < 1 or k + m > BLOCK_UNITS_MAX:
        raise UsageError(
            "model.code.range",
            f"code ({k}, {m}); allowed: k and m at least 1, k + m up to {BLOCK_UNITS_MAX}",
        )


@dataclass(frozen=True, slots=True)
class BlockLosses:
    """Losses of one block of k data units and m parity units behind them."""

    enough: Values
    """[x], 0 ≤ x ≤ m: probability that k of the first k + x units arrive."""
    lost: Values
    """[x], 0 ≤ x ≤ k + m: probability that x units are lost."""
    lost_data: Values
    """The same, and more than m of them are data units."""

    @property
    def success(self) -> float:
        """Probability that parity repairs the block."""
        return float(self.enough[-1])


@lru_cache(maxsize=4096)
def block_losses(
    loss: Loss,
    k: int,
    m: int,
    depth: int = 1,
    *,
    parity_step: int | None = None,
    gap: int = 0,
    paths: int = 1,
    repeated: float | None = None,
) -> BlockLosses:
    """Return a block's losses, by a Markov chain over the number lost and the newest unit's fate.

    Data is sent `depth` packets apart, parity `parity_step` (None: like data), the first one `gap`
    packets' time later. With `repeated`, data units were retransmitted one at a time, and each is
    still missing with that probability. Packets take `paths` paths in turn, whose losses are
    independent.
    """
    check_code(k, m)
    if paths > 1 and loss.is_timed and repeated is None:
        return _over_paths(loss, (k, m), (depth, parity_step or depth, gap), paths)
    step = parity_step or depth
    data, parity, first = loss.after(depth), loss.after(step), loss.after(step + gap)
    rate = loss.rate
    if repeated is not None:
        # The fate of retransmitted units is independent of the packets that follow.
        rate, data, first = repeated, (repeated, repeated), (loss.rate, loss.rate)
    counts = _Counts.none(k + m)
    counts.send((rate, rate))
    for _ in range(1, k):
        counts.send(data)
    enough = [counts.at_most(0)]
    counts_beyond = counts.beyond(m)
    for sent in range(1, m + 1):
        after = first if sent == 1 else parity
        counts.send(after)
        counts_beyond.send(after)
        enough.append(counts.at_most(sent))
    return BlockLosses(np.array(enough), counts.all(), counts_beyond.all())


def _over_paths(
    loss: Loss, code: tuple[int, int], spacing: tuple[int, int, int], paths: int
) -> BlockLosses:
    """Return the losses of a block whose packets take several paths in turn.

    Each path has a chain of its own. `lost_data` is approximate: as if losses of data and of parity
    were independent.
    """
    (k, m), (depth, parity_step, gap) = code, spacing
    positions = [unit * depth for unit in range(k)]
    positions += [positions[-1] + (index + 1) * parity_step for index in range(m)]
    counts = [_Counts.none(k + m) for _ in range(paths)]
    newest: dict[int, int] = {}
    enough: list[float] = []
    beyond = 0.0
    for sent, position in enumerate(positions):
        path, at = position % paths, position + (gap if sent >= k else 0)
        after = loss.after(at - newest[path]) if path in newest else (loss.rate, loss.rate)
        newest[path] = at
        counts[path].send(after)
        if sent >= k - 1:
            total = _sum_of(counts)
            enough.append(float(total[: sent - k + 2].sum()))
            beyond = float(total[m + 1 :].sum()) if sent == k - 1 else beyond
    lost = _sum_of(counts)
    failing = float(lost[m + 1 :].sum())
    share = min(1.0, beyond / failing) if failing > 0 else 0.0
    return BlockLosses(np.array(enough), lost, lost * share)


def _sum_of(counts: Sequence["_Counts"]) -> Values:
    """Return the probability of each number of losses on all paths together."""
    total = counts[0].all()
    for more in counts[1:]:
        total = np.convolve(total, more.all())[: len(total)]
    return total


@dataclass(slots=True)
class _Counts:
    """Probability of each number of losses, with the newest unit arrived, and with it lost."""

    arrived: Values
    lost: Values

    @staticmethod
    def none(most: int) -> "_Counts":
        """Return the counts before anything was sent."""
        arrived = np.zeros(most + 1)
        arrived[0] = 1.0
        return _Counts(arrived, np.zeros(most + 1))

    def send(self, after: tuple[float, float]) -> None:
        """Send a unit; `after` is the probability of its loss after (an arrival, a loss)."""
        after_arrived, after_lost = after
        newly_lost = self.arrived * after_arrived + self.lost * after_lost
        self.arrived = self.arrived * (1 - after_arrived) + self.lost * (1 - after_lost)
        self.lost = np.concatenate(([0.0], newly_lost[:-1]))

    def all(self) -> Values:
        """Return the probability of each number of losses."""
        return self.arrived + self.lost

    def at_most(self, number: int) -> float:
        """Return the probability of at most `number` losses."""
        return float(self.all()[: number + 1].sum())

    def beyond(self, number: int) -> "_Counts":
        """Return the counts restricted to more than `number` losses."""
        found = _Counts(self.arrived.copy(), self.lost.copy())
        found.arrived[: number + 1] = 0.0
        found.lost[: number + 1] = 0.0
        return found


def block_success(loss: Loss, k: int, m: int, depth: int = 1) -> float:
    """Return the probability that at most m units of a block are lost (P_EC, MDS; paper §4.2.3)."""
    return block_losses(loss, k, m, depth).success


def xor_success(loss: float, k: int, m: int) -> float:
    """Return the probability that m modulo groups lose at most one unit each (P_EC, XOR)."""
    check_code(k, m)
    if k % m:
        raise UsageError(
            "model.code.range", f"XOR code ({k}, {m}); allowed: k a multiple of m (equal groups)"
        )
    n = k // m + 1
    return float(((1 - loss) ** n + n * loss * (1 - loss) ** (n - 1)) ** m)
