"""The simulator through its Python interface."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from sealane import _native

MEBIBYTE = 1 << 20
PERCENT = 10_000_000


def fast(**faults: Any) -> _native.LinkSettings:
    """Return a link of 400 Gbit/s with a round trip of 25 ms."""
    return _native.LinkSettings(
        rate_bits_per_second=400_000_000_000,
        delay_nanos=12_500_000,
        buffer_bytes=16 << 20,
        **faults,
    )


def test_equal_arguments_give_equal_results_and_seeds_differ() -> None:
    def run(seed: int) -> _native.SimulationResult:
        lossy = fast(loss_parts_per_billion=PERCENT)
        return _native.simulate(count=20, message_bytes=MEBIBYTE, seed=seed, forward=lossy)

    assert run(1) == run(1)
    assert run(1)["trace_hash"] != run(2)["trace_hash"]


def test_parity_keeps_the_completion_time_of_a_lossless_path() -> None:
    result = _native.simulate(
        count=50,
        message_bytes=8 * MEBIBYTE,
        erasure_code=(32, 8),
        forward=fast(loss_parts_per_billion=PERCENT // 10),
        backward=fast(),
    )
    assert result["violations"] == []
    times = np.asarray(result["completion_nanos"])
    assert times.shape == (50,)
    assert times.max() < 1.02 * times.min()
    assert result["receiver"]["decoded_units"] > 0
    assert result["sender"]["retransmitted_packets"] == 0
    assert result["forward"]["lost_packets"] > 0


def test_real_payload_survives_every_fault_at_once() -> None:
    result = _native.simulate(
        count=20,
        message_bytes=0,
        message_bytes_max=60_000,
        depth=8,
        unit_bytes=1408,
        real_payload=True,
        forward=_native.LinkSettings(
            rate_bits_per_second=200_000_000,
            delay_nanos=12_500_000,
            buffer_bytes=16 << 20,
            gilbert_elliott=(PERCENT, 20 * PERCENT, 100 * PERCENT, 0),
            jitter_nanos=1_000_000,
            duplicate_parts_per_billion=5 * PERCENT,
            reorder_parts_per_billion=5 * PERCENT,
            reorder_nanos_max=20_000_000,
            corrupt_parts_per_billion=5 * PERCENT,
        ),
        blackout_nanos=(50_000_000, 150_000_000),
    )
    assert result["violations"] == []
    assert result["receiver"]["receives_completed"] == 20
    assert result["receiver"]["forged"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"depth": 17}, "depth is 17"),
        ({"unit_bytes": 255}, "unit_bytes is 255"),
        ({"erasure_code": (4, 0)}, r"k: 4, m: 0, depth: 1 } is not a valid"),
        ({"forward": fast(corrupt_parts_per_billion=1)}, "corruption needs real payload"),
    ],
)
def test_impossible_scenarios_name_the_value(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"count": 1, "message_bytes": 1} | change
    with pytest.raises(ValueError, match=message):
        _native.simulate(**arguments)


def test_other_threads_run_meanwhile() -> None:
    stop = threading.Event()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=tick, name="ticker")
    thread.start()
    try:
        before = ticks
        _native.simulate(count=20, message_bytes=8 * MEBIBYTE)
        assert ticks > before
    finally:
        stop.set()
        thread.join()


def test_without_message_numbers_late_packets_land_in_the_next_message() -> None:
    def run(slots: int) -> _native.SimulationResult:
        late = fast(reorder_parts_per_billion=5 * PERCENT, reorder_nanos_max=50_000_000)
        return _native.simulate(
            count=300,
            message_bytes=65_536,
            seed=13,
            depth=2,
            slots=slots,
            forward=late,
            backward=late,
        )

    few, many = run(2), run(512)  # of which none is posted twice
    assert few["violations"] == many["violations"] == []
    assert few["foreign_units"] >= few["foreign_messages"] > 0
    assert (many["foreign_units"], many["foreign_messages"]) == (0, 0)


def through_timed_bursts(**options: Any) -> _native.SimulationResult:
    """Send 64 KiB through bursts of 3.8 ms, 1 % of the time, at 100 Mbit/s and 100 ms."""

    def link(**losses: Any) -> _native.LinkSettings:
        return _native.LinkSettings(
            rate_bits_per_second=100_000_000,
            delay_nanos=50_000_000,
            buffer_bytes=1 << 20,
            **losses,
        )

    result = _native.simulate(
        count=3000,
        message_bytes=64 << 10,
        seed=1,
        erasure_code=(64, 64),
        unit_bytes=1408,
        forward=link(timed_bursts=(376_200_000, 3_800_000)),
        backward=link(),
        **options,
    )
    assert result["violations"] == []
    return result


def test_parity_after_a_pause_outlives_a_burst_that_takes_the_message() -> None:
    def slow(**options: Any) -> int:
        times = through_timed_bursts(**options)["completion_nanos"]
        return sum(1 for nanos in times if nanos > 170_000_000)

    at_once, later = slow(), slow(parity_gap_nanos=15_000_000)
    assert later * 3 < at_once, (at_once, later)


def test_two_paths_outlive_a_burst_of_one() -> None:
    times = through_timed_bursts(path_count=2)["completion_nanos"]
    assert sum(1 for nanos in times if nanos > 170_000_000) <= 1


def test_bursts_are_measured_in_time_although_messages_meet_only_a_part() -> None:
    sent = through_timed_bursts(parity_gap_nanos=7_600_000)["sender"]
    mean = sent["timed_runs_nanos"] / sent["timed_runs"]
    assert 1_900_000 < mean < 5_700_000, mean


def test_a_link_loses_packets_in_one_way() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        fast(loss_parts_per_billion=PERCENT, timed_bursts=(9, 1))
    with pytest.raises(ValueError, match="pause before parity"):
        _native.simulate(
            count=1, message_bytes=1, erasure_code=(4, 2), parity_gap_nanos=1_000_000_001
        )
