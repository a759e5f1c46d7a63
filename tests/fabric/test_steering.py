"""The operator's words for congestion control, and the engine's."""

from itertools import product

import pytest

from sealane import _native
from sealane.daemon.fabric.steering import CONTROLLERS, Steering

NETWORK: dict[str, int] = {
    "line_bits_per_second": 10**10,
    "near_rtt_micros": 100,
    "far_rtt_micros": 25_000,
}


@pytest.mark.parametrize(
    ("congestion", "marking"),
    list(product(["rate", "uno", "gemini"], ["queue", "phantom", "none"])),
)
def test_every_choice_is_known_to_the_engine(congestion: str, marking: str) -> None:
    steering = Steering(congestion=congestion, marking=marking, **NETWORK)
    assert isinstance(steering.for_engine(), _native.Steering)
    assert ((congestion, marking) in CONTROLLERS) == (congestion != "rate")


def test_a_path_without_marks_gets_a_controller_by_delay() -> None:
    assert CONTROLLERS["uno", "none"] == CONTROLLERS["gemini", "none"] == "delay"


@pytest.mark.parametrize(
    "wrong",
    [
        {"congestion": "cubic"},
        {"line_bits_per_second": 0},
        {"near_rtt_nanos": 0},
        {"far_rtt_nanos": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_the_engine_refuses_a_network_that_no_controller_can_work_in(
    wrong: dict[str, object],
) -> None:
    right = {
        "congestion": "uno",
        "line_bits_per_second": 10**9,
        "near_rtt_nanos": 100_000,
        "far_rtt_nanos": 10**7,
    }
    _native.Steering(**right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"controller"):
        _native.Steering(**right | wrong)  # type: ignore[arg-type]
