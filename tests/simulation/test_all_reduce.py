"""Ring all-reduces of the evaluation in virtual time: who waits for whom, times, ideal times."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    names = ("cells", "figures", "networks", "report", "traffic")
    return SimpleNamespace(
        **{name: importlib.import_module(f"benchmarks.uno.{name}") for name in names}
    )


def _rings(bench: Any, **more: Any) -> Any:
    return bench.traffic.Rings(**{"rings": 2, "workers": 4, "size": 400_000, "rounds": 2, **more})


def test_half_of_the_workers_are_in_each_data_centre_and_each_follows_the_one_before_it(
    bench: Any,
) -> None:
    rings = _rings(bench, rings=8, workers=16)
    flows, chains = bench.traffic.all_reduce(3, rings)
    senders = [flow[0] for flow in flows]
    assert len(set(senders)) == len(senders) == 128
    assert sum(sender < bench.traffic.HOSTS for sender in senders) == 64
    assert sum(map(bench.traffic.is_far, flows)) == 2 * 8
    for (sender, _, start, size), (follows, chunk) in zip(flows, chains, strict=True):
        assert flows[follows][1] == sender
        assert chunk % bench.traffic.PACKET_BYTES == 0
        assert chunk * 16 >= rings.size
        assert (start, size) == (0, 2 * 30 * chunk)


def _result(rings: Any, chunks: list[list[int]]) -> dict[str, Any]:
    return {"chunks": chunks, "packet_nanos": 10, "near_way_nanos": 100, "far_way_nanos": 1000}


def test_a_collective_ends_when_its_last_worker_has_all_and_the_next_one_begins_then(
    bench: Any,
) -> None:
    # Two workers send two chunks for each of two all-reduces.
    rings = _rings(bench, rings=1, workers=2, size=2 * 4096)
    ends = [[1_000_000, 3_000_000, 5_000_000, 6_000_000], [1_000_000, 4_000_000, 5_000_000]]
    found, _ = bench.cells._collectives(_result(rings, ends), rings, np.array([True, True]))
    # The second one has not ended.
    assert found.tolist() == [4.0]
    ends[1].append(9_000_000)
    found, _ = bench.cells._collectives(_result(rings, ends), rings, np.array([True, True]))
    assert found.tolist() == [4.0, 5.0]


def test_the_ideal_time_is_that_of_the_slowest_way_round(bench: Any) -> None:
    far = np.array([False, True, False, True])
    rings = _rings(bench, rings=1, workers=4, size=4 * 3 * 4096, rounds=1)
    assert (rings.steps, rings.chunk_bytes) == (6, 3 * 4096)
    # Of six hops in turn three are far. A chunk takes two packets more than its last one's way.
    ideal = bench.cells._ideal(_result(rings, []), rings, far)
    assert ideal == 6 * 20 + 3 * 100 + 3 * 1000


def test_an_all_reduce_takes_more_than_its_ideal_time_and_is_shown_beside_it(bench: Any) -> None:
    rings = _rings(bench)
    effort = replace(bench.figures.QUICK, rings=rings)
    (cell,) = (
        cell
        for cell in bench.figures._all_reduces(effort)
        if cell.scheme.name == bench.networks.UNO.name
    )
    record = bench.cells.measure(cell)
    assert (record["all"]["count"], record["unfinished"]) == (4, 0)
    assert record["far"] is None
    # Three far ways at least.
    assert 2.7 < record["ideal"] < record["all"]["mean"] <= record["all"]["p99"]
    columns = [column.header for column in bench.report.table("", [record]).columns]
    assert {"collective p99, ms", "ideal, ms"} <= set(columns)
