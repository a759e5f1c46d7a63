import dataclasses
import math
import re

import numpy as np
import pytest

from reference import bursts as reference_bursts
from sealane.errors import UsageError
from sealane.planning.model import (
    NACK_FACTOR,
    RTO_FACTOR,
    ErasureCoded,
    Loss,
    Path,
    Scheme,
    SelectiveRepeat,
    block_losses,
    block_success,
    completion,
    ideal,
    paper,
    sample,
    sample_losses,
    wire_units,
)
from sealane.planning.model.tail import Tail

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Slowdown against lossless, mean / p99.9 (SDR-RDMA, recomputed): 400 Gbit/s, 25 ms, units of 4 KiB,
# timeout 3 RTT and 1 RTT, the paper's MDS(32, 8) and XOR(32, 8) with beta = 1.
GOLDEN = """
128 KiB 1e-4 1.01/4.00 1.00/2.00 1.00/1.00 1.00/1.00
128 KiB 1e-3 1.09/4.00 1.03/2.00 1.00/1.00 1.00/1.00
128 KiB 1e-2 1.83/7.00 1.28/3.00 1.00/1.00 1.02/6.00
1 MiB 1e-5 1.01/4.00 1.00/2.00 1.00/1.00 1.00/1.00
1 MiB 1e-3 1.68/4.00 1.23/2.00 1.00/1.00 1.00/1.00
1 MiB 1e-2 3.84/6.99 1.95/3.00 1.00/1.00 1.17/6.00
8 MiB 1e-5 1.06/3.98 1.02/1.99 1.00/1.00 1.00/1.00
8 MiB 1e-4 1.55/3.98 1.18/1.99 1.00/1.00 1.00/1.00
8 MiB 1e-3 3.60/6.96 1.86/2.98 1.00/1.00 1.01/2.99
8 MiB 1e-2 4.54/9.94 2.18/3.98 1.00/1.00 2.17/8.95
128 MiB 1e-6 1.09/3.71 1.03/1.90 1.02/1.02 1.02/1.02
128 MiB 1e-5 1.75/3.71 1.24/1.90 1.02/1.02 1.02/1.02
128 MiB 1e-4 3.58/3.71 1.84/1.90 1.02/1.02 1.03/1.02
128 MiB 1e-3 3.79/6.42 1.93/2.80 1.02/1.02 1.17/5.54
128 MiB 1e-2 6.38/9.12 2.78/3.71 1.02/1.02 5.30/8.25
1 GiB 1e-6 1.32/2.61 1.07/1.54 1.12/1.12 1.12/1.12
1 GiB 1e-5 2.37/2.61 1.37/1.54 1.12/1.12 1.12/1.12
1 GiB 1e-4 2.60/4.07 1.52/1.89 1.12/1.12 1.12/2.19
1 GiB 1e-3 2.93/4.23 1.61/2.07 1.12/1.12 1.66/3.81
1 GiB 1e-2 4.54/7.27 2.13/3.08 1.12/1.12 4.12/7.04
8 GiB 1e-6 1.13/1.38 1.02/1.13 1.22/1.22 1.22/1.22
8 GiB 1e-5 1.34/1.38 1.09/1.13 1.22/1.22 1.22/1.22
8 GiB 1e-4 1.38/1.73 1.12/1.21 1.22/1.22 1.23/1.47
8 GiB 1e-3 1.51/1.76 1.14/1.25 1.22/1.22 1.53/1.85
8 GiB 1e-2 1.90/2.42 1.27/1.38 1.22/1.22 2.16/2.62
"""


def long_path(loss: float, burst_packets: float = 1.0, rate: float = 400e9) -> Path:
    return Path(
        rate_bits_per_second=rate,
        round_trip_seconds=0.025,
        loss=Loss(rate=loss, burst_packets=burst_packets),
        unit_bytes=4096,
    )


@pytest.mark.parametrize("line", GOLDEN.strip().splitlines())
def test_golden_table_is_reproduced(line: str) -> None:
    number, unit, loss, *expected = line.split()
    size = int(number) * {"KiB": KIB, "MiB": MIB, "GiB": GIB}[unit]
    path = long_path(float(loss))
    fastest = ideal(path, size)

    found = [
        (completion(path, size, SelectiveRepeat(RTO_FACTOR)), 3.0),
        (completion(path, size, SelectiveRepeat(NACK_FACTOR)), 1.0),
        (paper.erasure_coded(path, size, k=32, m=8), 3.0),
        (paper.erasure_coded(path, size, k=32, m=8, xor=True), 3.0),
    ]

    for (distribution, factor), figures in zip(found, expected, strict=True):
        mean, tail = (float(figure) for figure in figures.split("/"))
        quantum = factor * 0.025 / fastest
        assert distribution.mean / fastest == pytest.approx(mean, rel=0.02)
        assert distribution.quantile(0.999) / fastest == pytest.approx(tail, abs=quantum + 0.02)


@pytest.mark.parametrize(
    ("k", "m", "mds", "xor"),
    [
        (32, 1, (1.4e-4, 1.2e-3), (1.4e-4, 1.2e-3)),
        (32, 2, (1.2e-3, 5.0e-3), (1.9e-4, 1.6e-3)),
        (32, 4, (8.0e-3, 2.0e-2), (2.6e-4, 2.2e-3)),
        (32, 8, (3.6e-2, 6.3e-2), (3.5e-4, 2.9e-3)),
        (32, 16, (1.1e-1, 1.6e-1), (4.5e-4, 3.8e-3)),
        (64, 8, (2.1e-2, 3.7e-2), (2.6e-4, 2.2e-3)),
        (8, 2, (2.8e-3, 1.1e-2), (3.5e-4, 2.9e-3)),
    ],
)
def test_fallback_thresholds_of_128_mib(
    k: int, m: int, mds: tuple[float, float], xor: tuple[float, float]
) -> None:
    blocks = 32768 // k
    for is_xor, losses in ((False, mds), (True, xor)):
        for probability, loss in zip((0.01, 0.5), losses, strict=True):
            below = paper.fallback_probability(loss * 0.9, blocks, k, m, xor=is_xor)
            above = paper.fallback_probability(loss * 1.1, blocks, k, m, xor=is_xor)
            assert below < probability < above


SCHEMES: list[Scheme] = [
    SelectiveRepeat(),
    SelectiveRepeat(RTO_FACTOR),
    ErasureCoded(32, 8),
    ErasureCoded(32, 2, timeout_factor=RTO_FACTOR),
    ErasureCoded(32, 4, depth=4),
    ErasureCoded(4, 1, depth=8),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("size", "loss", "rate"),
    [(100, 1e-1, 400e9), (130 * KIB, 1e-2, 400e9), (MIB, 1e-1, 400e9), (MIB, 1e-2, 200e6)],
)
def test_independent_losses_agree_with_monte_carlo(
    scheme: Scheme, size: int, loss: float, rate: float
) -> None:
    path = long_path(loss, rate=rate)
    drawn = sample(path, size, scheme, 6000, np.random.default_rng(3))

    predicted = completion(path, size, scheme)

    error = 4 * drawn.std() / np.sqrt(len(drawn))
    assert abs(drawn.mean() - predicted.mean) < error + 0.004 * predicted.mean
    for probability in (0.55, 0.87, 0.98):
        low, high = np.quantile(drawn, [probability - 0.01, min(1.0, probability + 0.01)])
        assert low - 0.02 * high <= predicted.quantile(probability) <= high * 1.02


@pytest.mark.parametrize(
    "scheme", [SelectiveRepeat(), SelectiveRepeat(RTO_FACTOR), ErasureCoded(32, 2)]
)
def test_many_samples_agree_within_a_hundredth_and_one_time_out_in_the_tail(scheme: Scheme) -> None:
    path = long_path(1e-2)
    drawn = sample(path, 128 * KIB, scheme, 200_000, np.random.default_rng(9))

    predicted = completion(path, 128 * KIB, scheme)

    assert drawn.mean() == pytest.approx(predicted.mean, rel=0.01)
    time_out = scheme.timeout_factor * path.round_trip_seconds
    assert abs(np.quantile(drawn, 0.999) - predicted.quantile(0.999)) < 1.01 * time_out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("burst", "loss"), [(4.0, 1e-3), (16.0, 1e-3), (4.0, 1e-2), (16.0, 1e-2)])
def test_bursts_agree_with_monte_carlo(scheme: Scheme, burst: float, loss: float) -> None:
    path = long_path(loss, burst)
    drawn = sample(path, MIB, scheme, 6000, np.random.default_rng(7))

    predicted = completion(path, MIB, scheme)

    error = 4 * drawn.std() / np.sqrt(len(drawn))
    assert abs(drawn.mean() - predicted.mean) < error + 0.1 * predicted.mean


def test_a_time_out_below_the_injection_time_gives_a_lower_bound() -> None:
    path = long_path(1e-3)
    size = 4 * GIB

    assert ideal(path, size) > 0.025
    assert completion(path, size, SelectiveRepeat()).mean > ideal(path, size)


@pytest.mark.parametrize("scheme", [SelectiveRepeat(), ErasureCoded(32, 8)])
def test_a_message_of_a_million_round_trips_is_not_walked_round_by_round(scheme: Scheme) -> None:
    path = Path(
        rate_bits_per_second=20e6,
        round_trip_seconds=0.025,
        loss=Loss(rate=1e-2),
        unit_bytes=1408,
    )

    found = completion(path, 64 << 30, scheme)

    assert len(found.times) < 100_000
    # All data, but only the parity of the last blocks.
    assert 0 < found.mean - path.units(64 << 30) * path.unit_seconds < 0.5


@pytest.mark.parametrize(("burst", "depth"), [(1.0, 1), (4.0, 1), (16.0, 4), (8.0, 16)])
def test_losses_of_a_block_agree_with_monte_carlo(burst: float, depth: int) -> None:
    loss = Loss(rate=0.05, burst_packets=burst)
    k, m, count = 12, 4, 40_000
    lost = sample_losses(loss, depth * (k + m), count, np.random.default_rng(5))[:, ::depth]

    exact = block_losses(loss, k, m, depth)

    found = np.bincount(lost.sum(axis=1), minlength=k + m + 1) / count
    assert exact.lost.sum() == pytest.approx(1)
    assert np.abs(found - exact.lost).max() < 4 * np.sqrt(0.25 / count)
    enough = [(~lost[:, : k + x]).sum(axis=1) >= k for x in range(m + 1)]
    for x, is_enough in enumerate(enough):
        assert is_enough.mean() == pytest.approx(exact.enough[x], abs=0.01)


def test_losses_come_in_runs_of_the_mean_length() -> None:
    loss = Loss(rate=0.02, burst_packets=6.0)
    lost = sample_losses(loss, 500, 4000, np.random.default_rng(2))

    begins = (lost[:, 1:] & ~lost[:, :-1]).sum() + lost[:, 0].sum()

    assert lost.mean() == pytest.approx(0.02, rel=0.1)
    assert lost.sum() / begins == pytest.approx(6.0, rel=0.1)
    assert lost.any(axis=1).mean() == pytest.approx(loss.any_of(500), abs=0.03)


def test_interleaving_helps_against_bursts_and_costs_little_without() -> None:
    bursty, steady = long_path(1e-2, 8.0), long_path(1e-2)

    plain, deep = (completion(bursty, 8 * MIB, ErasureCoded(32, 8, depth)) for depth in (1, 16))
    assert deep.quantile(0.999) < 0.5 * plain.quantile(0.999)
    plain, deep = (completion(steady, 8 * MIB, ErasureCoded(32, 8, depth)) for depth in (1, 16))
    assert deep.mean == pytest.approx(plain.mean, rel=0.01)


def test_xor_of_groups_is_a_code_of_one_parity_interleaved() -> None:
    path = long_path(1e-3)
    blocks = 256 // 4

    success = block_success(path.loss, 4, 1) ** blocks

    assert 1 - success == pytest.approx(paper.fallback_probability(1e-3, 8, 32, 8, xor=True))
    tail = completion(path, MIB, ErasureCoded(4, 1, depth=8)).quantile(success - 1e-6)
    assert tail == pytest.approx(ideal(path, MIB), rel=0.01)


def test_without_loss_every_scheme_is_deterministic() -> None:
    path = long_path(0.0)

    for scheme in SCHEMES:
        times = sample(path, MIB, scheme, 5, np.random.default_rng(1))
        assert completion(path, MIB, scheme).times.tolist() == pytest.approx([times[0]])
        assert len(set(times)) == 1
        assert completion(path, MIB, scheme).mean == ideal(path, MIB)


def test_parity_counts_on_the_wire() -> None:
    path = long_path(0.0)

    assert wire_units(path, 33 * 4096, SelectiveRepeat()) == 33
    assert wire_units(path, 33 * 4096, ErasureCoded(32, 8)) == 33 + 16


def test_overhead_counts_as_wire_time() -> None:
    bare = long_path(0.0)
    dressed = Path(
        rate_bits_per_second=400e9,
        round_trip_seconds=0.025,
        loss=Loss(rate=0.0),
        unit_bytes=4096,
        overhead_bytes=4096,
    )

    assert dressed.unit_seconds == 2 * bare.unit_seconds


def test_block_success_of_small_codes_by_hand() -> None:
    assert block_success(Loss(rate=0.1), 1, 1) == pytest.approx(1 - 0.01)
    assert block_success(Loss(rate=0.5), 2, 1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rate", "burst", "reason"),
    [
        (-0.1, 1.0, "model.loss.range"),
        (1.0, 1.0, "model.loss.range"),
        (float("nan"), 1.0, "model.loss.range"),
        (0.1, 0.5, "model.burst.range"),
        (0.1, float("inf"), "model.burst.range"),
    ],
)
def test_impossible_losses_are_refused(rate: float, burst: float, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        long_path(rate, burst)


@pytest.mark.parametrize(
    "change",
    [
        {"rate_bits_per_second": 0},
        {"round_trip_seconds": -1.0},
        {"unit_bytes": 0},
        {"overhead_bytes": -1},
    ],
)
def test_impossible_paths_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=re.escape("model.path.range")):
        dataclasses.replace(long_path(0.0), **change)  # type: ignore[arg-type]


def test_a_last_group_of_fewer_blocks_is_interleaved_less() -> None:
    # Parity of a block follows that of its neighbour 24 packets later in all three.
    path = long_path(1e-2, burst_packets=1.5)

    def enough(blocks: int, depth: int) -> float:
        return Tail(path, 8 * blocks, 8, 2, depth, step=1.0).completion(100)[0]

    assert enough(72, 48) == pytest.approx(enough(48, 48) * enough(24, 24), rel=1e-9)


@pytest.mark.parametrize(("k", "m", "depth"), [(0, 1, 1), (1, 0, 1), (200, 56, 1), (4, 2, 0)])
def test_impossible_codes_are_refused(k: int, m: int, depth: int) -> None:
    with pytest.raises(UsageError, match=re.escape("model.code.range")):
        ErasureCoded(k, m, depth)


@pytest.mark.parametrize(("paths", "gap"), [(1, 0), (1, 40), (2, 0), (2, 40), (3, 10)])
@pytest.mark.parametrize("burst", [8.0, 60.0])
def test_losses_of_a_block_in_time_are_those_of_the_reference(
    burst: float, paths: int, gap: int
) -> None:
    loss, k, m = Loss(rate=2e-2, burst_packets=burst, is_timed=True), 40, 40
    found = block_losses(loss, k, m, gap=gap, paths=paths)
    times = [float(unit) for unit in range(k)] + [float(k + gap + unit) for unit in range(m)]
    # The time in which the chain's memory of one step decays as it does.
    mean_burst = -1 / ((1 - loss.rate) * math.log(1 - loss.begin - loss.end))
    lost = reference_bursts.lost_units(
        times, paths=paths, mean_burst=mean_burst, rate=loss.rate, runs=20_000, seed=3
    )
    for most in (0, 4, 20, 40, 60):
        share = sum(1 for number in lost if number <= most) / len(lost)
        assert found.lost[: most + 1].sum() == pytest.approx(share, abs=0.012), most
    assert found.success == pytest.approx(float(found.lost[: m + 1].sum()))
