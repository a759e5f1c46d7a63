import numpy as np
import pytest

from sealane.errors import UsageError
from sealane.transport.model import (
    Path,
    block_success,
    expect_erasure_coded,
    expect_selective_repeat,
    ideal,
    sample_erasure_coded,
    sample_selective_repeat,
)

MIB = 1 << 20

# Slowdown against lossless of reference §5.2: 400 Gbit/s, 25 ms, units of 4 KiB, RTO = 3 RTT.
GOLDEN = [
    # size, loss, selective repeat mean, MDS(32,8) mean
    (128 << 10, 1e-4, 1.01, 1.00),
    (128 << 10, 1e-2, 1.83, 1.00),
    (MIB, 1e-3, 1.68, 1.00),
    (MIB, 1e-2, 3.84, 1.00),
    (8 * MIB, 1e-5, 1.06, 1.00),
    (8 * MIB, 1e-4, 1.55, 1.00),
    (8 * MIB, 1e-3, 3.60, 1.00),
    (8 * MIB, 1e-2, 4.54, 1.00),
    (128 * MIB, 1e-6, 1.09, 1.02),
    (128 * MIB, 1e-5, 1.75, 1.02),
    (128 * MIB, 1e-4, 3.58, 1.02),
    (128 * MIB, 1e-2, 6.38, 1.02),
    (1024 * MIB, 1e-5, 2.37, 1.12),
]


def path(loss: float) -> Path:
    return Path(rate_bits_per_second=400e9, round_trip_seconds=0.025, loss=loss, unit_bytes=4096)


@pytest.mark.parametrize(("size", "loss", "slowdown", "_"), GOLDEN)
def test_selective_repeat_mean_matches_the_golden_table(
    size: int, loss: float, slowdown: float, _: float
) -> None:
    expected = expect_selective_repeat(path(loss), size) / ideal(path(loss), size)

    assert expected == pytest.approx(slowdown, rel=0.02)


@pytest.mark.parametrize(("size", "loss", "_", "slowdown"), GOLDEN)
def test_erasure_coded_mean_matches_the_golden_table(
    size: int, loss: float, _: float, slowdown: float
) -> None:
    expected = expect_erasure_coded(path(loss), size, k=32, m=8) / ideal(path(loss), size)

    assert expected == pytest.approx(slowdown, rel=0.02)


@pytest.mark.parametrize("loss", [1e-4, 1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("size", [100, 128 << 10, 8 * MIB])
def test_samples_agree_with_the_expectation(size: int, loss: float) -> None:
    random = np.random.default_rng(3)
    link = path(loss)

    samples = sample_selective_repeat(link, size, 20_000, random)
    mean, expected = samples.mean(), expect_selective_repeat(link, size)

    error = 4 * samples.std() / np.sqrt(len(samples))
    assert abs(mean - expected) < error + 0.005 * expected


@pytest.mark.parametrize("loss", [1e-3, 6e-2, 2e-1])
def test_coded_samples_agree_with_the_expectation(loss: float) -> None:
    random = np.random.default_rng(4)
    link = path(loss)

    samples = sample_erasure_coded(link, 8 * MIB, k=32, m=8, count=20_000, random=random)
    expected = expect_erasure_coded(link, 8 * MIB, k=32, m=8)

    error = 4 * samples.std() / np.sqrt(len(samples))
    assert abs(samples.mean() - expected) < error + 0.01 * expected


def test_without_loss_every_scheme_is_deterministic() -> None:
    link = path(0.0)

    assert expect_selective_repeat(link, MIB) == ideal(link, MIB)
    assert expect_erasure_coded(link, MIB, k=32, m=8) == pytest.approx(
        (256 + 64) * link.unit_seconds + 0.025
    )
    assert set(sample_selective_repeat(link, MIB, 10, np.random.default_rng(1))) == {
        ideal(link, MIB)
    }


def test_overhead_counts_as_wire_time() -> None:
    bare = path(0.0)
    dressed = Path(
        rate_bits_per_second=400e9,
        round_trip_seconds=0.025,
        loss=0.0,
        unit_bytes=4096,
        overhead_bytes=4096,
    )

    assert dressed.unit_seconds == 2 * bare.unit_seconds


def test_block_success_of_small_codes_by_hand() -> None:
    assert block_success(0.1, 1, 1) == pytest.approx(1 - 0.01)
    assert block_success(0.5, 2, 1) == pytest.approx(0.5)


@pytest.mark.parametrize("loss", [-0.1, 1.0])
def test_impossible_loss_is_refused(loss: float) -> None:
    with pytest.raises(UsageError):
        path(loss)
