"""The model of an all-reduce around a ring."""

import numpy as np
import pytest

from sealane.errors import UsageError
from sealane.planning.model import (
    Loss,
    Path,
    SelectiveRepeat,
    all_reduce,
    all_reduce_ideal,
    completion,
)


def path(loss: float = 0.0) -> Path:
    return Path(
        rate_bits_per_second=1e9, round_trip_seconds=0.02, loss=Loss(rate=loss), unit_bytes=1250
    )


def draw(sites: int, pieces: int = 1, depth: int = 16, loss: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(1)
    options = {"pieces": pieces, "depth": depth, "count": 3000, "random": random}
    return all_reduce(path(loss), 1_250_000 * sites, sites, SelectiveRepeat(), **options)


# A segment of 1000 units takes 10 ms to send, and 10 ms to travel.
@pytest.mark.parametrize(
    ("sites", "pieces", "depth", "milliseconds"),
    [
        (2, 1, 16, 2 * 20),
        (2, 1, 1, 30 + 20),
        (4, 1, 16, 6 * 20),
        (4, 1, 1, 5 * 30 + 20),
        # A piece of 1 ms is back after 11 ms; the nine others have been sent after 10 ms.
        (4, 10, 64, 5 * 11 + 10 + 10),
    ],
)
def test_without_loss_steps_add_up(
    sites: int, pieces: int, depth: int, milliseconds: float
) -> None:
    times = draw(sites, pieces, depth)
    assert np.allclose(times, milliseconds / 1e3)
    if depth > 1:
        found = all_reduce_ideal(path(), 1_250_000 * sites, sites, pieces=pieces)
        assert found == pytest.approx(milliseconds / 1e3)


def test_two_sites_take_the_later_of_two_chains() -> None:
    """A site's second message waits for the other's first: a mean maximum, computed by hand."""
    message = completion(path(1e-4), 1_250_000, SelectiveRepeat())
    random = np.random.default_rng(2)
    steps = random.choice(
        message.times, (2, 2, 100_000), p=np.diff(message.cumulative, prepend=0.0)
    )
    steps -= 0.01
    expected = np.maximum(steps[0, 0] + steps[1, 1], steps[0, 1] + steps[1, 0]).mean()
    assert draw(2, loss=1e-4).mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("sites", "pieces", "depth"), [(1, 1, 1), (65, 1, 1), (2, 0, 1), (2, 1, 0)]
)
def test_rings_that_cannot_be_are_refused(sites: int, pieces: int, depth: int) -> None:
    with pytest.raises(UsageError) as refused:
        draw(sites, pieces, depth)
    assert refused.value.reason == "model.ring.range"
