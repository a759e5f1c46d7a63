"""How many units of a block are lost: exact, with independent losses and with bursts."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sealane.errors import UsageError
from sealane.transport.model.completion import Values
from sealane.transport.model.path import Loss

BLOCK_UNITS_MAX = 255
"""Data and parity units of a block together, most (docs/session-wire.md)."""


def check_code(k: int, m: int) -> None:
    """Refuse a code that the wire has no room for."""
    if k < 1 or m < 1 or k + m > BLOCK_UNITS_MAX:
        raise UsageError("model.code.range", f"code ({k}, {m}) needs k, m ≥ 1 and k + m ≤ 255")


@dataclass(frozen=True, slots=True)
class BlockLosses:
    """Losses of one block of k data and m parity units, sent `depth` packets apart."""

    enough: Values
    """[x], 0 ≤ x ≤ m: probability that k of the first k + x units arrive."""
    lost: Values
    """[x], 0 ≤ x ≤ k + m: probability that x units are lost."""

    @property
    def success(self) -> float:
        """Probability that parity mends the block."""
        return float(self.enough[-1])


@lru_cache(maxsize=4096)
def block_losses(loss: Loss, k: int, m: int, depth: int = 1) -> BlockLosses:
    """Count losses unit by unit: by number lost so far and by what became of the newest unit."""
    check_code(k, m)
    after_arrived, after_lost = loss.after(depth)
    arrived = np.zeros(k + m + 1)
    lost = np.zeros(k + m + 1)
    arrived[0], lost[1] = 1 - loss.rate, loss.rate
    enough = []
    for sent in range(1, k + m + 1):
        if sent > 1:
            newly_lost = arrived * after_arrived + lost * after_lost
            arrived, lost = (
                arrived * (1 - after_arrived) + lost * (1 - after_lost),
                np.concatenate(([0.0], newly_lost[:-1])),
            )
        if sent >= k:
            enough.append(float((arrived + lost)[: sent - k + 1].sum()))
    return BlockLosses(np.array(enough), arrived + lost)


def block_success(loss: Loss, k: int, m: int, depth: int = 1) -> float:
    """Probability that at most m of a block's units are lost (P_EC of the paper's §4.2.3, MDS)."""
    return block_losses(loss, k, m, depth).success


def xor_success(loss: float, k: int, m: int) -> float:
    """Probability that m modulo groups of a XOR code lose at most one unit each (P_EC, XOR)."""
    check_code(k, m)
    if k % m:
        raise UsageError("model.code.range", f"a XOR code needs groups alike: {m} do not cut {k}")
    n = k // m + 1
    return float(((1 - loss) ** n + n * loss * (1 - loss) ** (n - 1)) ** m)
