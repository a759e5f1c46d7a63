"""The demo's results for an all-reduce, and for an accelerator card."""

from dataclasses import replace

import pytest

from sealane.cli.demo.results import AllReduceRun, CardRun, DemoResults, VolumeProof

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


CARD = CardRun(
    product="x",
    written_bytes=1,
    sectors_by_card=2,
    sectors_by_card_before=1,
    sectors_by_processor=1,
    losses=1,
    reason="accelerator.unavailable",
    sha256_written="cc",
    sha256_read="cc",
)


def results(run: AllReduceRun | None, card: CardRun | None = None) -> DemoResults:
    return DemoResults(
        source_name="x",
        link={},
        seed=1,
        volume=PROOF,
        attacks=(),
        sessions=(),
        all_reduce=run,
        card=card,
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"sha256_read": "cd"},
        {"sectors_by_card_before": 0},
        {"sectors_by_processor": 0},
        {"losses": 0},
    ],
)
def test_a_card_that_did_nothing_or_lost_something_fails_the_demo(wrong: dict[str, object]) -> None:
    assert results(None, CARD).holds
    assert not results(None, replace(CARD, **wrong)).holds  # type: ignore[arg-type]
