"""Exact distributions of a block's lost units, for independent losses and for bursts."""

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
    repeated: float | None = None,
) -> BlockLosses:
    """Return a block's losses, by a Markov chain over the number lost and the newest unit's fate.

    Data is sent `depth` packets apart, parity `parity_step` (None: like data). With `repeated`,
    data units were retransmitted one at a time, and each is still missing with that probability.
    """
    check_code(k, m)
    data, parity = loss.after(depth), loss.after(parity_step or depth)
    rate = loss.rate
    if repeated is not None:
        rate, data = repeated, (repeated, repeated)
    counts = _Counts.none(k + m)
    counts.send((rate, rate))
    for _ in range(1, k):
        counts.send(data)
    enough = [counts.at_most(0)]
    counts_beyond = counts.beyond(m)
    for sent in range(1, m + 1):
        # The fate of retransmitted units is independent of the packets that follow.
        after = (loss.rate, loss.rate) if sent == 1 and repeated is not None else parity
        counts.send(after)
        counts_beyond.send(after)
        enough.append(counts.at_most(sent))
    return BlockLosses(np.array(enough), counts.all(), counts_beyond.all())


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
