"""The comparison on real sockets: arrivals, schedules, fairness, records and tables."""

import importlib
import io
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    names = ("arrivals", "cells", "fairness", "flow_peer", "report", "runs")
    found = {name: importlib.import_module(f"benchmarks.uno.lab.{name}") for name in names}
    found["plots"] = importlib.import_module("benchmarks.uno.plots")
    return SimpleNamespace(**found)


def _scheme(bench: Any, name: str = "uno") -> Any:
    (found,) = (scheme for scheme in bench.cells.SCHEMES if scheme.name == name)
    return found


def _traffic(bench: Any, name: str) -> Any:
    (found,) = (traffic for traffic in bench.cells.TRAFFIC if traffic.name == name)
    return found


@pytest.mark.parametrize("load", [40, 80])
def test_arrivals_take_their_share_of_the_line(bench: Any, load: int) -> None:
    seconds = 200.0
    found = bench.arrivals.mixed(3, load=load, seconds=seconds)
    taken = sum(each.bytes for each in found) * 8 / seconds / bench.cells.LINE
    # Lengths have a heavy tail: some per cent of standard deviation.
    assert taken == pytest.approx(load / 100, rel=0.15)
    times = [each.at for each in found]
    assert times == sorted(times)
    assert times[-1] < seconds
    far = [each for each in found if each.kind == "far"]
    assert len(far) / len(found) == pytest.approx(0.2, abs=0.02)
    assert {each.host for each in far} == set(bench.cells.FAR)
    assert {each.host for each in found} == {*bench.cells.FAR, *bench.cells.NEAR}


def test_gaps_between_arrivals_are_exponential(bench: Any) -> None:
    times = [each.at for each in bench.arrivals.mixed(3, load=80, seconds=100.0)]
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_each_seed_has_arrivals_of_its_own_and_keeps_them(bench: Any) -> None:
    mixed = bench.arrivals.mixed
    assert mixed(1, load=40, seconds=5.0) == mixed(1, load=40, seconds=5.0)
    assert mixed(1, load=40, seconds=5.0) != mixed(2, load=40, seconds=5.0)


def test_messages_keep_their_ratio_to_what_is_on_their_path(bench: Any) -> None:
    cells, ends = bench.cells, np.array([1.0])
    for kind, longest, micros, uno_seconds in (
        ("near", 2_000_000, cells.NEAR_MICROS, 14e-6),
        ("far", 30_000_000, cells.FAR_MICROS, 1.8e-3),
    ):
        on_path, on_unos = cells.LINE * micros / 8e6, 100e9 * uno_seconds / 8
        assert bench.arrivals.sizes(kind, ends)[0] / on_path == pytest.approx(longest / on_unos)


def test_a_flapping_link_is_up_between_its_outages(bench: Any) -> None:
    outages = bench.cells.FLAPPING.outages
    assert outages[0] == (0.2, pytest.approx(0.52))
    for (start, end), (following, _) in pairwise(outages):
        assert end - start == pytest.approx(0.32)
        assert following - end == pytest.approx(0.32)
    assert outages[-1][1] > _traffic(bench, "flapping link").seconds_max


@pytest.mark.parametrize("name", ["8 far", "dead link", "flapping link", "bursts"])
def test_the_lab_takes_what_happens_to_the_links(bench: Any, name: str) -> None:
    links = _traffic(bench, name).links
    wan = bench.cells.network(_scheme(bench), links, seed=1).wan[0]
    starts = [outage.start_seconds for outage in wan.outages]
    assert starts == [bench.cells.PREPARED_SECONDS + start for start, _ in links.outages]
    assert {outage.path for outage in wan.outages} <= {0}
    bursts = [way.timed_bursts for way in (wan, wan.backward)]
    assert [each is not None for each in bursts] == [name == "bursts"] * 2


def test_connections_of_an_incast_are_spread_over_the_hosts(bench: Any) -> None:
    found = bench.runs.senders(_traffic(bench, "short behind 8 far"), 0)
    assert [(each.kind, each.host, each.connections) for each in found] == [
        *(("far", f"far-{number}", 2) for number in range(4)),
        ("probe", "near-0", 1),
    ]
    assert found[0].messages == ((0.0, 3_000_000),) * 2
    assert found[-1].messages == ((0.0, 16_000),) * 100


def test_all_schemes_carry_the_same_mixed_load(bench: Any) -> None:
    traffic = _traffic(bench, "mixed, 40 %")
    found = bench.runs.senders(traffic, 7)
    assert found == bench.runs.senders(traffic, 7)
    assert found != bench.runs.senders(traffic, 8)
    arrivals = bench.arrivals.mixed(7, load=40, seconds=traffic.seconds)
    for sender in found:
        own = [(each.at, each.bytes) for each in arrivals if each.host == sender.host]
        assert list(sender.messages) == own
    assert {each.kind: each.connections for each in found} == {"far": 6, "near": 4}


def test_bytes_between_two_samples_arrive_evenly(bench: Any) -> None:
    # The first host sends 1000 bytes a second, the other one 200 bytes from 0.1 to 0.2 s.
    at = [0.0, 0.1, 0.2, 0.25, 0.4]
    arrived = [(5, 0), (105, 0), (205, 200), (255, 200), (405, 200)]
    found = bench.fairness.in_steps(at, arrived)
    assert found == pytest.approx(np.array([(100, 0), (100, 200), (100, 0), (100, 0)]))


def test_a_last_interval_that_is_not_whole_does_not_count(bench: Any) -> None:
    assert len(bench.fairness.in_steps([0.0, 0.29], [(0,), (29,)])) == 2
    # 0.3 / 0.1 is less than 3.
    assert len(bench.fairness.in_steps([0.0, 0.3], [(0,), (30,)])) == 3


def test_a_sender_is_busy_where_its_messages_cover_the_interval(bench: Any) -> None:
    spans = [
        # Two messages that overlap, and a third one later.
        [(0.1, 0.25), (0.2, 0.4), (0.55, 0.75)],
        [(-1.0, 0.15), (0.15, 0.3)],
        [(0.2, 0.1)],
        [],
    ]
    found = bench.fairness.under_way(spans, 8)
    assert found.T.tolist() == [
        [0, 1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [0] * 8,
        [0] * 8,
    ]


def test_messages_at_the_same_time_count_each(bench: Any) -> None:
    spans = [[(0.0, 0.3), (0.1, 0.4), (0.15, 0.25)]]
    assert bench.fairness.under_way(spans, 5).T.tolist() == [[1, 2, 2, 1, 0]]


def test_fairness_is_that_of_the_busy_ones(bench: Any) -> None:
    taken = np.array([(10.0, 10.0, 90.0), (20.0, 0.0, 90.0), (10.0, 10.0, 9.0), (0.0, 0.0, 5.0)])
    messages = np.array([(1, 1, 0), (1, 1, 0), (0, 1, 0), (1, 1, 0)])
    found = bench.fairness.indices(taken, messages)
    # One busy sender has nobody to share with; where nothing arrives, nothing is shared.
    assert found == [(0.0, pytest.approx(1.0)), (pytest.approx(0.1), pytest.approx(0.5))]


def test_a_host_with_two_messages_under_way_may_have_twice_as_much(bench: Any) -> None:
    found = bench.fairness.indices(np.array([(20.0, 10.0)]), np.array([(2, 1)]))
    assert found == [(0.0, pytest.approx(1.0))]


@pytest.mark.parametrize(
    ("indices", "after"),
    [
        ([], None),
        ([(0.3, 0.95), (0.4, 0.99)], 0.0),
        ([(0.0, 0.5), (0.1, 0.97), (0.2, 0.949), (0.3, 0.96)], 0.3),
        ([(0.0, 0.99), (0.1, 0.6)], 0.2),
    ],
)
def test_shares_are_fair_after_the_last_unfair_interval(
    bench: Any, indices: list[tuple[float, float]], after: float | None
) -> None:
    found = bench.fairness.fair_after(indices)
    assert found == (None if after is None else pytest.approx(after))


def _found(bench: Any) -> Any:
    """Return a run of two seconds: twice the bytes from a far host as from a near one, probes."""
    sender = bench.runs.Sender
    far = sender(kind="far", host="far-0", connections=2, messages=((0.0, 4000), (0.5, 9000)))
    near = sender(kind="near", host="near-1", connections=1, messages=((0.0, 2000),))
    probe = sender(kind="probe", host="near-0", connections=1, messages=((0.0, 10),) * 2)
    samples = [
        bench.runs.Sample(
            at=0.05 * number,
            queued=1000 * number,
            arrived=(100 * number, 0, 50 * number),
            sent=10_000 + 450 * number,
            emulator_seconds=1 + 0.001 * number,
        )
        for number in range(41)
    ]
    return bench.runs.Found(
        spans=[
            (far, [(0, 0.0, 2.0)]),
            (near, [(0, 0.25, 2.0)]),
            (probe, [(0, 0.0, 0.02), (1, 0.02, 0.05)]),
        ],
        samples=samples,
        processor_seconds=0.5,
    )


def test_times_count_from_arrival_and_those_of_probes_from_sending(bench: Any) -> None:
    found = _found(bench)
    assert found.times("far", "near") == [2.0, 2.0]
    assert found.times("probe") == pytest.approx([0.02, 0.03])
    assert (found.payload, found.unfinished) == (4000 + 2000 + 20, 1)


def test_shares_are_those_of_hosts_with_something_to_send(bench: Any) -> None:
    found = bench.runs.shares(_found(bench), ["far-0", "near-0", "near-1"])
    # From a far way after the start on; 2 to 1, and fair when the far host has two messages.
    assert [round(start, 6) for start, _ in found] == [n / 10 for n in range(1, 19)]
    assert [round(index, 6) for _, index in found] == [0.9] * 5 + [1.0] * 13


def _record(bench: Any, traffic: str, scheme: str, number: int) -> dict[str, Any]:
    found = _found(bench)
    shares = bench.runs.shares(found, ["far-0", "near-0", "near-1"])
    return bench.runs.record(
        _scheme(bench, scheme), _traffic(bench, traffic), number, found, shares
    ) | {"void": [], "idle": 0.5}


def test_a_record_says_what_the_network_did(bench: Any) -> None:
    found = _record(bench, "4 far + 4 near", "uno", 0)
    assert found["jain_steps"] == pytest.approx((5 * 0.9 + 13) / 18)
    assert found["fair_after"] == pytest.approx(0.6)
    assert found["queue_p99"] == pytest.approx(39_600)
    # 39,600 bytes at 50 Mbit/s.
    assert found["queue_p99_millis"] == pytest.approx(6.336)
    assert found["wire_per_payload"] == pytest.approx(18_000 / 6020)
    assert found["processor_per_gb"] == pytest.approx(0.5 / 6.02e-6)
    assert found["emulator_per_gb"] == pytest.approx(0.04 / 6.02e-6)
    # The one that was given up counts.
    assert found["jain"] < 0.8
    mixed = _record(bench, "mixed, 80 %", "uno", 0)
    assert (mixed["jain"], mixed["near_per_far"]) == (None, None)


def test_tables_and_plot_show_all_columns(bench: Any, tmp_path: Path) -> None:
    records = [
        _record(bench, traffic.name, scheme.name, number)
        for traffic in bench.cells.TRAFFIC
        for scheme in bench.cells.SCHEMES
        for number in range(2)
    ]
    console = Console(width=170, file=io.StringIO(), record=True)
    bench.report.show(console, "Title", records)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 170
    for columns in (bench.report.TIMES, bench.report.NETWORK):
        assert any(all(name in line for name in columns) for line in lines)
    assert not any("…" in line for line in lines)
    bench.plots.draw(tmp_path / "lab.png", "lab", "Title", records, bench.report.COLUMNS)
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_near_messages_alone_is_drawn(bench: Any, tmp_path: Path) -> None:
    records = [_record(bench, "8 near", "uno", 0) | {"far": None}]
    bench.plots.draw(tmp_path / "lab.png", "lab", "Title", records, bench.report.COLUMNS)
    assert (tmp_path / "lab.png").exists()


def test_a_message_takes_the_first_free_connection_at_its_time(bench: Any) -> None:
    used: list[tuple[str, int]] = []
    is_begun = threading.Event()

    def slow(count: int, _: float) -> None:
        used.append(("slow", count))
        is_begun.wait(20)

    def fast(count: int, _: float) -> None:
        used.append(("fast", count))
        if count == 4:
            is_begun.set()

    messages = [(0.0, 1), (0.05, 2), (0.1, 3), (0.15, 4)]
    begin = time.monotonic() + 0.05
    found = bench.flow_peer.send_all([slow, fast], messages, begin, 5.0)
    assert [number for number, _, _ in found] == [0, 1, 2, 3]
    for (number, sent, ended), (at, _) in zip(found, messages, strict=True):
        assert at <= sent + 1e-6, number
        assert sent <= ended
    assert sorted(count for _, count in used) == [1, 2, 3, 4]
    assert [name for name, _ in used].count("slow") <= 1


def test_a_connection_that_gives_up_leaves_the_rest_to_others(bench: Any) -> None:
    is_broken = threading.Event()

    def broken(count: int, seconds: float) -> None:
        is_broken.set()
        raise TimeoutError(f"{count} bytes in {seconds} s")

    def sound(_: int, seconds: float) -> None:
        assert seconds == 5.0
        assert is_broken.wait(20)

    messages = [(0.0, 1), (0.0, 2), (0.0, 3)]
    found = bench.flow_peer.send_all([broken, sound], messages, time.monotonic(), 5.0)
    assert len(found) == 2
    assert bench.flow_peer.send_all([broken], messages, time.monotonic(), 5.0) == []


def test_no_message_starts_long_after_the_last_one_was_due(bench: Any) -> None:
    messages = [(0.0, 1), (0.0, 2), (0.1, 3)]
    sound = [lambda *_: None]
    begun = time.monotonic() - 100.0
    assert bench.flow_peer.send_all(sound, messages, begun, 50.0) == []
    found = bench.flow_peer.send_all(sound, messages, begun, 500.0)
    assert [number for number, _, _ in found] == [0, 1, 2]
