"""Reasons that make a run void, and the load that a machine may carry."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from sealane.errors import UsageError
from sealane.lab.holder import check_capacity
from sealane.lab.measure import Capacity
from sealane.lab.report import nothing, quantile, run_report
from sealane.lab.topology import Topology

LINK = {"rate_bits_per_second": 12_000_000, "delay_micros": 0, "buffer_bytes": 1500}
TOPOLOGY = Topology.model_validate({"wan": [{"name": "x", "left": ["a"], "right": ["b"], **LINK}]})
PATH = {
    f"{name}_packets": 0
    for name in (
        *("lost", "overflowed", "down", "dropped_early", "marked", "reordered", "duplicated"),
        *("corrupted", "crowded"),
    )
} | {"offered_packets": 100, "offered_bytes": 1000, "delivered_packets": 100}
WAY = {"paths": [PATH], "sent_packets": 100, "unsent_packets": 0, "slip_nanos": [(50_000, 100)]}
REPORT: dict[str, Any] = {
    "x": {
        "forward": WAY,
        "backward": copy.deepcopy(WAY),
        "missed_packets": 0,
        "oversized_packets": 0,
        "foreign_packets": 3,
    }
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    report = copy.deepcopy(REPORT)
    change(report["x"])
    return report


def test_a_run_is_what_came_between_two_reports() -> None:
    later = changed(lambda link: link["forward"]["slip_nanos"].append((70_000, 100)))
    later["x"]["forward"]["paths"][0]["lost_packets"] = 7

    report = run_report(TOPOLOGY, REPORT, later)

    forward, backward = report.ways
    assert (forward.lost, forward.packets, backward.packets, report.foreign) == (7, 0, 0, 0)
    assert (forward.slip_p50_micros, backward.slip_max_micros) == (70.0, 0.0)
    assert report.void == []


def test_since_the_start_counts_everything() -> None:
    report = run_report(TOPOLOGY, nothing(REPORT), REPORT)

    assert [way.packets for way in report.ways] == [100, 100]
    assert report.ways[0].slip_p99_micros == 50.0
    assert report.void == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda link: link["backward"]["slip_nanos"].append((1_000_001, 2)),
            "x ←: 2 of 100 packets left more than 1000 µs late",
        ),
        (
            lambda link: link["forward"].update(unsent_packets=1),
            "1 packets were refused by the kernel",
        ),
        (
            lambda link: link["forward"]["paths"][0].update(crowded_packets=1),
            "1 packets did not fit the emulator's memory",
        ),
        (
            lambda link: link.update(missed_packets=1),
            "1 packets were dropped before they reached the link",
        ),
        (lambda link: link.update(oversized_packets=1), "1 packets were longer than the MTU"),
    ],
)
def test_what_the_machine_did_to_packets_voids_a_run(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    (void,) = run_report(TOPOLOGY, nothing(REPORT), changed(change)).void

    assert reason in void


def test_a_few_late_packets_are_borne() -> None:
    later = changed(lambda link: link["backward"]["slip_nanos"].append((1_000_001, 1)))

    assert run_report(TOPOLOGY, nothing(REPORT), later).void == []


def test_quantiles_are_steps() -> None:
    steps = [(10, 50), (20, 0), (30, 49), (40, 1)]
    assert [quantile(steps, share) for share in (0.5, 0.51, 0.99, 1.0)] == [10, 30, 30, 40]
    assert quantile([], 0.5) == 0


@pytest.mark.parametrize(("others", "is_allowed"), [(0, True), (1, False)])
def test_links_may_ask_for_three_fifths_of_what_was_measured(others: int, is_allowed: bool) -> None:
    # 12 Mbit/s are 1000 packets per second in each direction.
    capacity = Capacity(
        mtu=1500,
        packets_per_second=3334,
        cpu_micros_per_packet=1.0,
        idle_slip_p50_micros=1.0,
        idle_slip_p99_micros=1.0,
    )
    if is_allowed:
        check_capacity(TOPOLOGY, capacity, others)
    else:
        with pytest.raises(
            UsageError, match=r"2001 packets .* 1 of them in other labs; allowed: 2000"
        ):
            check_capacity(TOPOLOGY, capacity, others)
