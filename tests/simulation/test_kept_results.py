"""Saved results of benchmarks, so that an interrupted run can be continued."""

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.kept")


def test_results_of_this_build_are_known_again_and_others_stay(kept: Any, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    kept.Records(path, made_by="older").put("a", {"mean": 1.0})
    records = kept.Records(path, made_by="this")
    assert records.get("a") is None
    for mean in (2.0, 3.0):
        records.put("a", {"mean": mean, "interval": (1, 4)})
    known = {"mean": 3.0, "interval": [1, 4]}
    for found in (records, kept.Records(path, made_by="this")):
        assert (found.get("a"), found.all()) == (known, [known])
    assert kept.Records(path, made_by="older").get("a") == {"mean": 1.0}


def test_line_of_a_killed_run_costs_only_itself(kept: Any, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    kept.Records(path, made_by="this").put("a", {"mean": 1.0})
    with path.open("a") as file:
        file.write(json.dumps({"made_by": "this", "key": "b", "record": {}})[:-3])
    kept.Records(path, made_by="this").put("c", {"mean": 2.0})
    found = kept.Records(path, made_by="this")
    assert [found.get(key) for key in "abc"] == [{"mean": 1.0}, None, {"mean": 2.0}]


def test_each_result_is_kept_as_it_comes_and_none_starts_after_the_budget(kept: Any) -> None:
    results: list[int] = []

    def measure(number: int) -> int:
        assert len(results) == number, "those before it are kept"
        return number

    calls = [partial(measure, number) for number in range(5)]
    kept.run_missing(calls, results.append, total=5, minutes=10, jobs=1)
    assert results == [0, 1, 2, 3, 4]
    kept.run_missing(calls, results.append, total=5, minutes=0, jobs=1)
    assert results == [0, 1, 2, 3, 4]
