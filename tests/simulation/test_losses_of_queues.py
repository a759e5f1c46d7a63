"""Two sessions share a link: what a full buffer drops gets no parity, what the path loses does."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from sealane import _native
from sealane.planning.model import Loss, Path
from sealane.planning.packet import PACKET_OVERHEAD_BYTES
from sealane.planning.planner import Objective, PathCounters, Planner

LINK = 100_000_000
BUFFER_BYTES = 250_000
SECOND = 1_000_000_000
READS = 5
PARTS = 1_000_000_000
PERCENT = PARTS // 100
PHANTOM_BYTES = LINK // 8 // 10
PHANTOM = (952_380_952, PHANTOM_BYTES, PHANTOM_BYTES // 50, PHANTOM_BYTES // 5 * 3, PARTS)
RED = (50_000, 150_000, PARTS)


@dataclass(frozen=True)
class Way:
    """How sessions send, and what their link marks."""

    congestion: str | None
    rate_bits_per_second: int = LINK
    are_marks_queues: bool = True
    marks: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "rate": Way(None, rate_bits_per_second=60_000_000),
    "uno, phantom queues": Way("uno", are_marks_queues=False, marks={"phantom": PHANTOM}),
    "uno, phantom queues that mark nothing": Way("uno", are_marks_queues=False),
    "uno, real queues": Way("uno-queue", marks={"red": RED}),
    "uno or gemini, nothing marks": Way("delay"),
    "gemini, real queues": Way("gemini", marks={"red": RED}),
    "dctcp, real queues": Way("dctcp", marks={"red": RED}),
    "dctcp, queues that mark nothing": Way("dctcp"),
}


def watched(way: Way, *, starts: list[int], loss: int = 0) -> list[list[dict[str, int]]]:
    """Return each session's statistics, every four seconds."""
    link = _native.LinkSettings(
        rate_bits_per_second=LINK,
        delay_nanos=12_500_000,
        buffer_bytes=BUFFER_BYTES,
        loss_parts_per_billion=loss,
        **way.marks,
    )
    reads = [
        _native.simulate_sessions(
            starts_nanos=starts,
            rate_bits_per_second=way.rate_bits_per_second,
            link=link,
            time_nanos=4 * read * SECOND,
            congestion=way.congestion,
            are_marks_queues=way.are_marks_queues,
            seed=1,
        )
        for read in range(1, READS + 1)
    ]
    return [list(session) for session in zip(*reads, strict=True)]


def has_parity(reads: list[dict[str, int]], way: Way) -> bool:
    """Return whether a session with these statistics ever gets parity."""
    path = Path(
        rate_bits_per_second=way.rate_bits_per_second,
        round_trip_seconds=0.025,
        loss=Loss(rate=1e-5),
        unit_bytes=4096,
        overhead_bytes=PACKET_OVERHEAD_BYTES,
    )
    planner = Planner(path, Objective.AUTO)
    assert not any(row.m for row in planner.plan.rows)
    for read in reads:
        planner.estimator.observe(
            PathCounters(
                sent=read["clear_packets"], lost=read["clear_losses"], loss_runs=read["clear_runs"]
            )
        )
        planner.update()
        if any(row.m for row in planner.plan.rows):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 3 * SECOND], ids=["together", "one after the other"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_losses_of_a_full_buffer_get_no_parity(way: Way, late: int) -> None:
    sessions = watched(way, starts=[0, late])
    assert not any(has_parity(reads, way) for reads in sessions)


def test_buffers_do_overflow_where_nothing_marks() -> None:
    for name in (
        "rate",
        "uno, phantom queues that mark nothing",
        "dctcp, queues that mark nothing",
    ):
        lost = sum(reads[-1]["lost_packets"] for reads in watched(WAYS[name], starts=[0, 0]))
        assert lost > 100, name


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_losses_of_the_path_get_parity(way: Way) -> None:
    sessions = watched(way, starts=[0, 0], loss=PERCENT)
    assert all(has_parity(reads, way) for reads in sessions)


@pytest.mark.parametrize("name", ["uno, real queues", "dctcp, real queues"])
def test_a_path_that_is_marked_all_the_time_still_shows_its_loss(name: str) -> None:
    for reads in watched(WAYS[name], starts=[0, 0], loss=PERCENT // 10):
        found = reads[-1]
        assert found["ce_echoed"] > found["packets_sent"] / 100
        assert found["clear_packets"] > found["packets_sent"] / 5
        assert found["clear_losses"] / found["clear_packets"] == pytest.approx(1e-3, rel=0.6)


def test_runs_that_cannot_be_run_are_refused() -> None:
    link = _native.LinkSettings(rate_bits_per_second=LINK, delay_nanos=0, buffer_bytes=10_000)
    for wrong in ({"congestion": "reno"}, {"starts_nanos": []}):
        given: dict[str, Any] = {
            "starts_nanos": [0],
            "rate_bits_per_second": LINK,
            "link": link,
            "time_nanos": SECOND,
        }
        with pytest.raises(ValueError, match=r"reno|flows"):
            _native.simulate_sessions(**given | wrong)
