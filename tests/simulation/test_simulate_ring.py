"""An all-reduce of session machines in virtual time: result and duration."""

from typing import Any

import numpy as np
import pytest

from sealane import _native
from sealane.client.collectives import schedule
from sealane.planning.model import (
    ErasureCoded,
    Loss,
    Path,
    SelectiveRepeat,
    all_reduce,
)
from sealane.planning.packet import PACKET_OVERHEAD_BYTES

LOSSY = _native.LinkSettings(
    rate_bits_per_second=200_000_000,
    delay_nanos=12_500_000,
    buffer_bytes=1 << 22,
    loss_parts_per_billion=10_000_000,
)


def sites_of(size: int, length: int, itemsize: int, piece: int = 1000) -> list[Any]:
    plans = (schedule.all_reduce(rank, size, length, piece) for rank in range(size))
    return [plan.in_bytes(itemsize) for plan in plans]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("erasure_code", [None, (8, 2)])
def test_all_sites_get_the_sum(size: int, erasure_code: tuple[int, int] | None) -> None:
    random = np.random.default_rng(size)
    arrays = [random.normal(size=20_003).astype(np.float32) for _ in range(size)]

    result = _native.simulate_ring(
        sites=sites_of(size, 20_003, 4),
        arrays=[array.tobytes() for array in arrays],
        erasure_code=erasure_code,
        link=LOSSY,
    )

    assert [session["violations"] for session in result["sessions"]] == [[]] * size
    assert sum(session["forward"]["lost_packets"] for session in result["sessions"]) > 0
    found = [np.frombuffer(array, np.float32) for array in result["arrays"]]
    assert np.allclose(found[0], np.sum(arrays, axis=0), rtol=1e-5, atol=1e-5)
    assert all(np.array_equal(one, found[0]) for one in found)
    assert result["completion_nanos"][0] > 2 * (size - 1) * 12_500_000


def test_bfloat16_is_added_in_single_precision_at_each_hop() -> None:
    random = np.random.default_rng(3)
    values = [random.integers(-100, 100, 5000).astype(np.float32) for _ in range(3)]
    bits = [(one.view(np.uint32) >> 16).astype(np.uint16) for one in values]

    result = _native.simulate_ring(
        sites=sites_of(3, 5000, 2),
        arrays=[one.tobytes() for one in bits],
        dtype="bfloat16",
        link=LOSSY,
    )

    found = [np.frombuffer(array, np.uint16) for array in result["arrays"]]
    sums = (found[0].astype(np.uint32) << 16).view(np.float32)
    # Integers up to 256 are exact, those up to 300 rounded to a multiple of 2.
    assert np.abs(sums - np.sum(values, axis=0)).max() <= 1
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sites": sites_of(2, 10, 4)[:1]}, "1 sites: 2 to 64"),
        ({"repeats": 0}, "2 messages, 0 times"),
        ({"arrays": [bytes(40)]}, "site 1 has no array"),
        ({"dtype": "int8"}, "int8"),
        ({"detection": "guess"}, "guess"),
    ],
)
def test_rings_that_cannot_be_are_refused(change: dict[str, object], words: str) -> None:
    arguments = {"sites": sites_of(2, 10, 4), "arrays": None} | change
    with pytest.raises(ValueError, match=words):
        _native.simulate_ring(**arguments)


@pytest.mark.parametrize("sites", [2, 4])
@pytest.mark.parametrize(("pieces", "depth"), [(1, 1), (1, 16), (8, 64)])
@pytest.mark.parametrize("scheme", [SelectiveRepeat(), ErasureCoded(32, 8)])
def test_rings_take_what_the_model_says(
    sites: int, pieces: int, depth: int, scheme: SelectiveRepeat | ErasureCoded
) -> None:
    array_bytes, rate, repeats = sites << 19, 400_000_000_000, 40
    path = Path(
        rate_bits_per_second=rate,
        round_trip_seconds=0.025,
        loss=Loss(rate=1e-3),
        unit_bytes=4096,
        overhead_bytes=PACKET_OVERHEAD_BYTES,
    )

    result = _native.simulate_ring(
        sites=sites_of(sites, array_bytes, 1, array_bytes // sites // pieces),
        repeats=repeats,
        seed=4,
        depth=depth,
        slots=64,
        erasure_code=(scheme.k, scheme.m) if isinstance(scheme, ErasureCoded) else None,
        link=_native.LinkSettings(
            rate_bits_per_second=rate,
            delay_nanos=12_500_000,
            buffer_bytes=1 << 26,
            loss_parts_per_billion=1_000_000,
        ),
    )

    assert [session["violations"] for session in result["sessions"]] == [[]] * sites
    times = np.asarray(result["completion_nanos"]) / 1e9
    random = np.random.default_rng(5)
    options = {"pieces": pieces, "depth": depth, "count": 2000, "random": random}
    expected = all_reduce(path, array_bytes, sites, scheme, **options)
    chance = 4 * times.std() / np.sqrt(repeats)
    assert abs(times.mean() - expected.mean()) < chance + 0.05 * expected.mean()
