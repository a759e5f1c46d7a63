"""The model of a session's threads beside what follows from its costs alone."""

import importlib
from pathlib import Path
from typing import Any, Final

import pytest

COSTS: Final = {"sender_own": 500, "sender_path": 800, "receiver_path": 600, "receiver_own": 400}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.sessions.workers.model")


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_with_a_core_each_the_slowest_stage_decides(model: Any, workers: int) -> None:
    found = model.packets_per_second(
        model.Costs(**COSTS), workers=workers, batch_packets=16, cores=18
    )
    slowest = max(COSTS["sender_own"], COSTS["sender_path"] / workers)
    assert found == pytest.approx(1e9 / slowest, rel=0.02)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_with_one_core_its_time_is_shared_among_all_stages(model: Any, workers: int) -> None:
    found = model.packets_per_second(
        model.Costs(**COSTS), workers=workers, batch_packets=16, cores=1
    )
    assert found == pytest.approx(1e9 / sum(COSTS.values()), rel=0.02)


def test_what_a_byte_costs_the_own_thread_moves_to_the_path_threads(model: Any) -> None:
    lines = {
        "sender_own": model.Line.through({1000: 300.0, 2000: 400.0}),
        "receiver_own": model.Line.through({1000: 300.0, 2000: 500.0}),
    }
    assert lines["sender_own"] == model.Line(fixed=200, per_byte=0.1)
    moved = model.landing_in_workers(model.Costs(**COSTS), unit_bytes=1000, copies=lines)
    assert moved == model.Costs(
        sender_own=400, sender_path=900, receiver_path=800, receiver_own=200
    )
