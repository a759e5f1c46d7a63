"""Choice of the scheme for a message: candidates within a parity budget, ranked by the model.

A plan is the choice for every message size, for one path and one estimate of its loss. The engine
installs its rows (`SessionEndpoint.install_plan`).
"""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from sealane.errors import UsageError
from sealane.planning.model import (
    RTO_FACTOR,
    ErasureCoded,
    Loss,
    Path,
    Scheme,
    SelectiveRepeat,
    completion,
    ideal,
    wire_units,
)

DATA_UNITS: Final = (4, 8, 16, 32, 64, 128)
PARITY_UNITS: Final = (1, 2, 4, 8, 16, 32)
LONG_PARITY_UNITS: Final = (*PARITY_UNITS, 64, 127)
"""The same against bursts that last for a time."""
GAPS: Final = (0.5, 1.0, 2.0, 4.0)
"""Pauses between data and parity, in mean bursts, when optimizing a quantile."""
GAP_SECONDS_MAX: Final = 1.0
"""Longest pause that the engine accepts."""
BURST_SHARE: Final = 16
"""When optimizing a quantile, a message may have as much parity as one of so many mean bursts, if
these last for a time."""
DEPTHS: Final = (1, 4, 8, 16, 32)
BURST_MIN: Final = 1.2
"""Smallest mean run of losses for which interleaving is considered."""
PARITY_BUDGET: Final = 0.25
"""Largest ratio of parity to data on the wire."""
SHORT_UNITS: Final = 128
"""When optimizing a quantile, a message of fewer units may have as much parity as one of this
size, since bursts are as long for it; but never more than SHORT_SHARE of its data."""
SHORT_SHARE: Final = 2.0
RESERVE: Final = 0.7
"""Share of a quantile's allowed misses that a safe scheme may use up, because acknowledgements
get lost, too, and estimates have errors."""
SURE: Final = 1.1
"""A scheme that keeps the reserve may cost this factor more than the best without it."""
TIE: Final = 1.02
"""Scores within this factor count as equal; then the simpler scheme, with less parity, wins."""
SIZE_MIN: Final = 4 << 10
SIZE_MAX: Final = 64 << 30
RESOLUTION: Final = 48


NO_LOSS: Final = Loss(rate=0.0)


class Objective(enum.Enum):
    """The statistic of the completion time to minimize."""

    AUTO = "auto"
    """P99 of a message that is sent within a round trip, the mean of longer ones."""
    MEAN = "mean"
    P99 = "p99"
    P999 = "p999"

    def of(self, path: Path, message_bytes: int) -> "Objective":
        """Return the statistic for a message of this length; never AUTO."""
        if self is not Objective.AUTO:
            return self
        fits = path.units(message_bytes) * path.unit_seconds <= path.round_trip_seconds
        return Objective.P99 if fits else Objective.MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A scheme and its model results for one message; times in seconds."""

    scheme: Scheme
    mean: float
    p50: float
    p99: float
    p999: float
    p99_reserved: float
    p999_reserved: float
    """The quantile with RESERVE."""
    parity: float
    """Ratio of parity to data units in the first transmission."""

    def score(self, objective: Objective) -> float:
        """Return the time to compare, in seconds."""
        scores = {Objective.MEAN: self.mean, Objective.P99: self.p99, Objective.P999: self.p999}
        return scores[objective]

    def is_sure(self, objective: Objective, limit: float) -> bool:
        """Return True if it is as fast as `limit` seconds, even with the reserve."""
        reserved = {
            Objective.MEAN: self.mean,
            Objective.P99: self.p99_reserved,
            Objective.P999: self.p999_reserved,
        }
        return reserved[objective] <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The scheme for messages of up to `length_max` bytes; k = m = 0 is selective repeat."""

    length_max: int
    k: int
    m: int
    depth: int
    parity_gap_nanos: int = 0
    """Pause between the data and the parity of a message."""

    @property
    def scheme(self) -> Scheme:
        """The scheme, for the model."""
        if not self.k:
            return SelectiveRepeat()
        return ErasureCoded(self.k, self.m, self.depth, gap_seconds=self.parity_gap_nanos / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Schemes by size, for one path and loss."""

    path: Path
    objective: Objective
    parity_budget: float
    caution: float
    """The least loss assumed for rows that AUTO plans for P99."""
    rows: tuple[PlanRow, ...]
    """In ascending `length_max`; the last one is for all longer messages, too."""

    def row(self, message_bytes: int) -> PlanRow:
        """Return the row for a message of this length."""
        rows = (row for row in self.rows if row.length_max >= message_bytes)
        return next(rows, self.rows[-1])


def parity_units_max(
    units: int, objective: Objective, parity_budget: float, loss: Loss = NO_LOSS
) -> float:
    """Return the largest number of parity units for a message of `units` data units."""
    if objective is Objective.MEAN:
        return parity_budget * units
    bursts = BURST_SHARE * loss.burst_packets if loss.is_timed else 0.0
    return min(SHORT_SHARE * units, parity_budget * max(units, SHORT_UNITS, bursts))


def candidates(
    path: Path, message_bytes: int, objective: Objective, parity_budget: float
) -> Iterator[Scheme]:
    """Yield selective repeat, then every code whose parity is within the budget."""
    yield SelectiveRepeat()
    loss, units = path.loss, path.units(message_bytes)
    parity_max = parity_units_max(units, objective, parity_budget, loss)
    has_bursts = loss.burst_packets >= BURST_MIN and not loss.is_independent
    is_timed = has_bursts and loss.is_timed and objective is not Objective.MEAN
    # Longer messages have several blocks, whose parity is spread already.
    gaps = _gaps(path, message_bytes) if is_timed and units <= SHORT_UNITS else []
    for k in DATA_UNITS:
        blocks = math.ceil(units / k)
        if is_timed and blocks > 1 and units <= SHORT_UNITS:
            # A burst may be longer than the message: one block has the most of its parity.
            continue
        for m in LONG_PARITY_UNITS if is_timed else PARITY_UNITS:
            if blocks * m > parity_max:
                break
            for depth in DEPTHS if has_bursts else (1,):
                yield ErasureCoded(k, m, depth)
                if depth >= blocks:
                    for gap in gaps:
                        yield ErasureCoded(k, m, depth, gap_seconds=gap)
                    break
        if blocks == 1:
            return


def _gaps(path: Path, message_bytes: int) -> list[float]:
    """Return the pauses before parity, in seconds, that end before the first repairs arrive.

    None is longer than GAP_SECONDS_MAX.
    """
    burst = path.loss.burst_packets * path.unit_seconds
    left = path.round_trip_seconds - path.units(message_bytes) * path.unit_seconds
    gaps = [share * burst for share in GAPS]
    return [gap for gap in gaps if gap < left and gap <= GAP_SECONDS_MAX]


def evaluate(path: Path, message_bytes: int, scheme: Scheme) -> Candidate:
    """Evaluate a scheme by the model."""
    found = completion(path, message_bytes, scheme, RESOLUTION)
    units = path.units(message_bytes)
    return Candidate(
        scheme=scheme,
        mean=found.mean,
        p50=found.quantile(0.5),
        p99=found.quantile(0.99),
        p999=found.quantile(0.999),
        p99_reserved=found.quantile(1 - 0.01 * RESERVE),
        p999_reserved=found.quantile(1 - 0.001 * RESERVE),
        parity=(wire_units(path, message_bytes, scheme) - units) / units,
    )


def rank(
    path: Path,
    message_bytes: int,
    objective: Objective = Objective.MEAN,
    parity_budget: float = PARITY_BUDGET,
    *,
    check: Callable[[], None] = lambda: None,
) -> list[Candidate]:
    """Return all candidates within the budget: first the chosen one, the others by score.

    The budget is relative to the data units; for short messages and quantiles see SHORT_UNITS.
    `check` is called before each evaluation, and may raise to end the work. UsageError
    `plan.budget.range`.
    """
    check_budget(parity_budget)
    objective = objective.of(path, message_bytes)
    found = []
    for scheme in candidates(path, message_bytes, objective, parity_budget):
        check()
        found.append(evaluate(path, message_bytes, scheme))
    found.sort(key=lambda candidate: candidate.score(objective))
    best = _first(found, objective)
    return [best, *(candidate for candidate in found if candidate is not best)]


def plan_row(
    path: Path,
    length_max: int,
    objective: Objective = Objective.MEAN,
    parity_budget: float = PARITY_BUDGET,
    *,
    caution: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> PlanRow:
    """Choose the scheme for messages of more than half of `length_max` bytes, and up to that.

    `caution`: with AUTO, the least loss that is assumed for messages sent within a round trip.
    `check` and errors as in `rank`.
    """
    wanted = objective.of(path, length_max)
    if (objective, wanted) == (Objective.AUTO, Objective.P99):
        path = replace(path, loss=replace(path.loss, rate=max(path.loss.rate, caution)))
    # For the mean, evaluate in the middle of the row, on a logarithmic scale. Quantiles jump, and
    # lengths are mostly powers of two, so evaluate those at the row's end.
    length = length_max / math.sqrt(2) if wanted is Objective.MEAN else length_max
    scheme = _choose(path, round(length), wanted, parity_budget, check)
    k, m, depth = code_of(scheme)
    gap = scheme.gap_seconds if isinstance(scheme, ErasureCoded) else 0.0
    return PlanRow(length_max=length_max, k=k, m=m, depth=depth, parity_gap_nanos=round(gap * 1e9))


class RowMaker(Protocol):
    """Chooses the scheme of one row: `plan_row`, or what gives the same."""

    def __call__(
        self,
        path: Path,
        length_max: int,
        objective: Objective,
        parity_budget: float,
        *,
        caution: float,
        check: Callable[[], None],
    ) -> PlanRow:
        """Return the row, with arguments and errors of `plan_row`."""


def plan(
    path: Path,
    objective: Objective = Objective.MEAN,
    parity_budget: float = PARITY_BUDGET,
    *,
    caution: float = 0.0,
    lengths: Sequence[int] | None = None,
    check: Callable[[], None] = lambda: None,
    row: RowMaker = plan_row,
) -> Plan:
    """Choose a scheme for every size: a row per power of two, with equal neighbours merged.

    `lengths`: only rows for messages of up to these, in ascending order. `row` makes each; other
    arguments and errors are those of `plan_row`. Takes seconds of CPU time for high losses and long
    messages.
    """
    rows: list[PlanRow] = []
    for length in lengths or row_lengths():
        made = row(path, length, objective, parity_budget, caution=caution, check=check)
        if rows and replace(rows[-1], length_max=length) == made:
            rows.pop()
        rows.append(made)
    return Plan(
        path=path,
        objective=objective,
        parity_budget=parity_budget,
        caution=caution,
        rows=tuple(rows),
    )


def row_lengths(message_bytes_max: int = SIZE_MAX) -> tuple[int, ...]:
    """Return the `length_max` of all rows that messages of up to so many bytes need."""
    longest = row_length(message_bytes_max)
    return tuple(1 << bit for bit in range(SIZE_MIN.bit_length() - 1, longest.bit_length()))


def row_length(message_bytes: int) -> int:
    """Return the `length_max` of the row for a message."""
    return int(1 << (max(SIZE_MIN, min(message_bytes, SIZE_MAX)) - 1).bit_length())


def _choose(
    path: Path,
    message_bytes: int,
    objective: Objective,
    parity_budget: float,
    check: Callable[[], None],
) -> Scheme:
    """Return the first of `rank`, without ranking if selective repeat is certain to win."""
    check()
    repeat = evaluate(path, message_bytes, SelectiveRepeat())
    if repeat.is_sure(objective, TIE * ideal(path, message_bytes)):
        # Nothing can be faster by more than a tie.
        return repeat.scheme
    return rank(path, message_bytes, objective, parity_budget, check=check)[0].scheme


def code_of(scheme: Scheme) -> tuple[int, int, int]:
    """Return (k, m, depth) as for the engine and on the wire; (0, 0, 1) for selective repeat."""
    if isinstance(scheme, ErasureCoded):
        return scheme.k, scheme.m, scheme.depth
    return 0, 0, 1


def scheme_text(scheme: Scheme) -> str:
    """Return a scheme's name for people."""
    if isinstance(scheme, SelectiveRepeat):
        return "selective repeat" + (" (RTO)" if scheme.timeout_factor == RTO_FACTOR else "")
    name = "XOR" if scheme.m == 1 else "MDS"
    depth = f" depth {scheme.depth}" if scheme.depth > 1 else ""
    gap = f", parity {scheme.gap_seconds * 1e3:.1f} ms later" if scheme.gap_seconds else ""
    return f"{name} ({scheme.k}, {scheme.m}){depth}{gap}"


def why(path: Path, message_bytes: int, ranked: Sequence[Candidate], objective: Objective) -> str:
    """Return one sentence that explains why the first candidate is chosen."""
    objective = objective.of(path, message_bytes)
    best, repeat = ranked[0], next(c for c in ranked if isinstance(c.scheme, SelectiveRepeat))
    expected = path.units(message_bytes) * path.loss.rate
    fastest = ideal(path, message_bytes)
    losses = f"{expected:.2g} lost units expected in a message"
    if best is repeat:
        others = [c.score(objective) for c in ranked[1:]]
        if not others or min(others) >= best.score(objective):
            return f"{losses}: parity would cost more time than repeating"
        return f"{losses}: parity would gain less than {TIE - 1:.0%}, so none is used"
    gain = repeat.score(objective) / best.score(objective)
    return (
        f"{losses}: {gain:.2f} times as fast as selective repeat, "
        f"{best.score(objective) / fastest:.2f} of ideal, for {best.parity:.0%} parity"
        f"{_beside_faster(ranked, objective)}"
    )


def _beside_faster(ranked: Sequence[Candidate], objective: Objective) -> str:
    """Return why the first is chosen although others score better; empty if none does."""
    best = ranked[0]
    faster = [c.score(objective) for c in ranked[1:] if c.score(objective) < best.score(objective)]
    if not faster:
        return ""
    gain = best.score(objective) / min(faster) - 1
    if gain <= TIE - 1:
        return f"; more parity or depth would gain {gain:.1%}"
    return f"; a scheme that is {gain:.0%} faster lacks the safety margin"


def check_budget(parity_budget: float) -> None:
    """Raise UsageError `plan.budget.range` for an invalid budget."""
    if not 0 <= parity_budget <= 1:
        raise UsageError(
            "plan.budget.range", f"parity budget {parity_budget}; allowed: from 0 to 1"
        )


def _first(found: Sequence[Candidate], objective: Objective) -> Candidate:
    """Return the simplest of the best among the sure candidates; `found` is by ascending score."""
    limit = found[0].score(objective) * SURE
    sure = [candidate for candidate in found if candidate.is_sure(objective, limit)] or found
    limit = sure[0].score(objective) * TIE
    return min((c for c in sure if c.score(objective) <= limit), key=_effort)


def _effort(candidate: Candidate) -> tuple[bool, float, float, int, int]:
    k, _, depth = code_of(candidate.scheme)
    gap = candidate.scheme.gap_seconds if isinstance(candidate.scheme, ErasureCoded) else 0.0
    return k != 0, candidate.parity, gap, depth, k
