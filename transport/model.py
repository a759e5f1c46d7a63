"""Completion-time model of a message over a long, lossy link (SDR-RDMA, arXiv:2505.05366 §4.2).

Time runs from the first transmission to the acknowledgement of the last unit. Losses are
independent per unit. Exact while a message is sent within one RTO; a lower bound above that.
All times in seconds.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sealane.errors import UsageError

RTO_FACTOR = 3.0
"""RTO in round-trip times: RTT + alpha·RTT with alpha = 2."""
FALLBACK_FACTOR = 1.0
"""beta: the wait for late parity before a block falls back, in round-trip times."""
TAIL = 1e-12
"""Terms of the expectation smaller than this are left out."""

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What the model needs to know of a link and of the units that cross it."""

    rate_bits_per_second: float
    round_trip_seconds: float
    loss: float
    """Probability that one unit is lost, 0 ≤ loss < 1."""
    unit_bytes: int
    """Payload bytes of one unit."""
    overhead_bytes: int = 0
    """Bytes that each unit's packet adds on the wire."""

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise UsageError("model.loss.range", f"loss {self.loss} is not within [0, 1)")
        if min(self.rate_bits_per_second, self.round_trip_seconds, self.unit_bytes) <= 0:
            raise UsageError("model.path.range", "rate, round trip and unit must be positive")

    @property
    def unit_seconds(self) -> float:
        """Time to put one unit on the wire (T_INJ)."""
        return (self.unit_bytes + self.overhead_bytes) * 8 / self.rate_bits_per_second

    @property
    def rto_seconds(self) -> float:
        """Time from a transmission until it is repeated."""
        return RTO_FACTOR * self.round_trip_seconds

    def units(self, message_bytes: int) -> int:
        """Units of a message."""
        return max(1, math.ceil(message_bytes / self.unit_bytes))


def ideal(path: Path, message_bytes: int) -> float:
    """Completion time without loss: injection and one round trip."""
    return path.units(message_bytes) * path.unit_seconds + path.round_trip_seconds


def sample_selective_repeat(
    path: Path, message_bytes: int, count: int, random: np.random.Generator
) -> Times:
    """Draw `count` completion times with selective repeat."""
    return _sample_units(path, path.units(message_bytes), count, random)


def expect_selective_repeat(path: Path, message_bytes: int) -> float:
    """Mean completion time with selective repeat (Appendix A of the paper)."""
    return _expect_units(path, path.units(message_bytes))


def block_success(loss: float, k: int, m: int) -> float:
    """Probability that a block of k data and m parity units decodes: at most m are lost."""
    n = k + m
    return math.fsum(math.comb(n, i) * loss**i * (1 - loss) ** (n - i) for i in range(m + 1))


def sample_erasure_coded(
    path: Path, message_bytes: int, *, k: int, m: int, count: int, random: np.random.Generator
) -> Times:
    """Draw `count` completion times with an MDS code of k data and m parity units."""
    _check_code(k, m)
    units, blocks, base = _coded(path, message_bytes, k, m)
    failed = random.binomial(blocks, 1 - block_success(path.loss, k, m), count)
    times = np.full(count, base)
    for failures in np.unique(failed[failed > 0]):
        hit = np.nonzero(failed == failures)[0]
        resent = int(failures) * min(k, units)
        times[hit] += FALLBACK_FACTOR * path.round_trip_seconds
        times[hit] += _sample_units(path, resent, len(hit), random)
    return times


def expect_erasure_coded(path: Path, message_bytes: int, *, k: int, m: int) -> float:
    """Mean completion time with an MDS code (§4.2.3): base, and the fallback by its number."""
    _check_code(k, m)
    units, blocks, base = _coded(path, message_bytes, k, m)
    failure = 1 - block_success(path.loss, k, m)
    expected = base
    for failures in range(1, blocks + 1):
        weight = _binomial(blocks, failures, failure)
        if weight < TAIL:
            if failures > blocks * failure:
                break
            continue
        extra = FALLBACK_FACTOR * path.round_trip_seconds
        extra += _expect_units(path, failures * min(k, units))
        expected += weight * extra
    return expected


def _check_code(k: int, m: int) -> None:
    if k < 1 or m < 1 or k + m > 255:
        raise UsageError("model.code.range", f"code ({k}, {m}) needs k, m ≥ 1 and k + m ≤ 255")


def _coded(path: Path, message_bytes: int, k: int, m: int) -> tuple[int, int, float]:
    units = path.units(message_bytes)
    blocks = math.ceil(units / k)
    parity = math.ceil(units * m / k)
    return units, blocks, (units + parity) * path.unit_seconds + path.round_trip_seconds


def _binomial(n: int, i: int, p: float) -> float:
    if p <= 0:
        return 0.0
    log = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
    return math.exp(log + i * math.log(p) + (n - i) * math.log1p(-p)) if p < 1 else float(i == n)


def _sample_units(path: Path, units: int, count: int, random: np.random.Generator) -> Times:
    """Draw completion times: unit i leaves at i·T, each loss of it costs RTO + T."""
    step = path.rto_seconds + path.unit_seconds
    last = np.full(count, units * path.unit_seconds)
    lost = random.binomial(units, path.loss, count)
    owner = np.repeat(np.arange(count), lost)
    position = random.integers(1, units + 1, owner.size)
    repeats = random.geometric(1 - path.loss, owner.size)
    np.maximum.at(last, owner, position * path.unit_seconds + step * repeats)
    return last + path.round_trip_seconds


def _expect_units(path: Path, units: int) -> float:
    """Integrate 1 - P(every unit is done by q) over q, exactly.

    Unit i is done at i·T + j·O if its first j transmissions are lost. The probability is constant
    between those instants and changes by a known factor at each.
    """
    unit, step, loss = path.unit_seconds, path.rto_seconds + path.unit_seconds, path.loss
    end = units * unit
    if loss == 0:
        return end + path.round_trip_seconds
    sent = np.arange(1, units + 1) * unit
    rounds = math.ceil(math.log(TAIL / units) / math.log(loss)) + math.ceil(end / step)
    repeat = np.arange(1, rounds + 1)
    # log(1 - loss^(j+1)) - log(1 - loss^j): what the j-th repetition of one unit adds.
    gains = np.log1p(-(loss ** (repeat + 1.0))) - np.log1p(-(loss ** repeat.astype(np.float64)))
    times = (sent[:, None] + step * repeat[None, :]).ravel()
    changes = np.broadcast_to(gains, (units, rounds)).ravel()
    early = times <= end
    start = units * math.log1p(-loss) + float(changes[early].sum())
    order = np.argsort(times[~early])
    times, changes = times[~early][order], changes[~early][order]
    pending = -np.expm1(np.concatenate(([start], start + np.cumsum(changes))))
    spans = np.diff(np.concatenate(([end], times)))
    return end + float((pending[:-1] * spans).sum()) + path.round_trip_seconds
