"""The session machine in virtual time against the completion-time model, with bursty losses."""

import numpy as np
import pytest

from sealane import _native
from sealane.planning.model import (
    NACK_FACTOR,
    RTO_FACTOR,
    ErasureCoded,
    Loss,
    Path,
    Scheme,
    SelectiveRepeat,
    completion,
)
from sealane.planning.packet import PACKET_OVERHEAD_BYTES
from sealane.planning.planner import rank

MIB = 1 << 20
PARTS = 1_000_000_000
RATE = 100_000_000_000
ROUND_TRIP = 0.025


def path_of(loss: Loss) -> Path:
    return Path(
        rate_bits_per_second=RATE,
        round_trip_seconds=ROUND_TRIP,
        loss=loss,
        unit_bytes=4096,
        overhead_bytes=PACKET_OVERHEAD_BYTES,
    )


def simulated(loss: Loss, size: int, scheme: Scheme, count: int) -> np.ndarray:
    """Return completion times in seconds."""
    link = {"rate_bits_per_second": RATE, "delay_nanos": 12_500_000, "buffer_bytes": 64 << 20}
    chain = _native.LinkSettings(
        **link,
        gilbert_elliott=(round(loss.begin * PARTS), round(loss.end * PARTS), PARTS, 0),
    )
    code = isinstance(scheme, ErasureCoded)
    result = _native.simulate(
        count=count,
        message_bytes=size,
        seed=11,
        erasure_code=(scheme.k, scheme.m) if code else None,
        interleaving=scheme.depth if code else 1,
        detection="reports" if scheme.timeout_factor == NACK_FACTOR else "timeout",
        forward=chain,
        backward=_native.LinkSettings(**link),
    )
    assert result["violations"] == []
    times = np.asarray(result["completion_nanos"]) / 1e9
    assert times.min() > 0
    return times


@pytest.mark.parametrize("loss", [Loss(rate=1e-3), Loss(rate=1e-2, burst_packets=8.0)])
@pytest.mark.parametrize(
    "scheme",
    [
        SelectiveRepeat(),
        SelectiveRepeat(RTO_FACTOR),
        ErasureCoded(32, 2),
        ErasureCoded(32, 8, depth=8),
        ErasureCoded(8, 1, depth=4),
    ],
)
def test_the_stack_takes_what_the_model_says(loss: Loss, scheme: Scheme) -> None:
    times = simulated(loss, 2 * MIB, scheme, 500)

    predicted = completion(path_of(loss), 2 * MIB, scheme)

    error = 4 * times.std() / np.sqrt(len(times))
    share = 0.05 if loss.is_independent else 0.10
    assert abs(times.mean() - predicted.mean) < error + share * predicted.mean


@pytest.mark.parametrize("loss", [Loss(rate=1e-5), Loss(rate=1e-2, burst_packets=8.0)])
def test_what_is_chosen_is_faster_than_what_is_not(loss: Loss) -> None:
    ranked = rank(path_of(loss), 8 * MIB)
    best = ranked[0].scheme
    others = [SelectiveRepeat(), ErasureCoded(32, 8)]

    fastest = simulated(loss, 8 * MIB, best, 100).mean()

    for other in others:
        assert fastest <= 1.05 * simulated(loss, 8 * MIB, other, 100).mean()
