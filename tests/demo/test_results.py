"""The demo's results for an all-reduce."""

from dataclasses import replace

import pytest

from sealane.cli.demo.results import AllReduceRun, DemoResults, VolumeProof

RUN = AllReduceRun(
    sites=2,
    array_bytes=4 << 20,
    seconds=(0.2, 0.4),
    model_seconds=tuple([0.25] * 1000),
    ideal_seconds=0.2,
    sha256_expected="aa",
    sha256_found=("aa",),
)
PROOF = VolumeProof(
    input_bytes=1,
    write_seconds=1.0,
    read_seconds=1.0,
    sectors_written=1,
    counters_used=1,
    counters_leased=1,
    sha256_written="bb",
    sha256_read="bb",
    pieces_sampled=0,
    pieces_found_in_input=0,
    pieces_found_in_store=0,
)


def results(run: AllReduceRun | None) -> DemoResults:
    return DemoResults(
        source_name="x",
        link={},
        seed=1,
        volume=PROOF,
        attacks=(),
        sessions=(),
        all_reduce=run,
    )


def test_figures_stand_beside_the_models() -> None:
    record = results(RUN).as_json()["all_reduce"]
    assert record["measured"]["mean"] == pytest.approx(0.3)
    assert record["model"]["mean"] == pytest.approx(0.25)
    assert "model_seconds" not in record
    assert results(None).as_json()["all_reduce"] is None


@pytest.mark.parametrize("found", [("ab",), ("aa", "ab"), ()])
def test_site_without_the_sum_fails_the_demo(found: tuple[str, ...]) -> None:
    assert results(RUN).holds
    assert not results(replace(RUN, sha256_found=found)).holds
