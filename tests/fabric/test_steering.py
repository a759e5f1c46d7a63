"""The operator's words for congestion control, and the engine's."""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from sealane import _native
from sealane.client.grants import listen_session, listen_sessions
from sealane.daemon.fabric.steering import CONTROLLERS, Steering
from sealane.errors import UsageError
from sealane.protocol.v1 import sessions_pb2
from session_pairs import REGION, connected, opening

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


def test_a_job_may_choose_what_the_operator_allows() -> None:
    steering = Steering(congestion="uno", allowed=("dctcp", "gemini"), **NETWORK)
    assert steering.chosen("") is steering.chosen("uno") is steering
    assert steering.chosen("dctcp").congestion == "dctcp"
    for name in ("rate", "bbr", "x" * 1000):
        with pytest.raises(UsageError, match="allowed: uno, dctcp, gemini") as caught:
            steering.chosen(name)
        assert caught.value.reason == "session.congestion.not_allowed"
        assert len(str(caught.value)) < 200


async def congestion_of(fabric: Any, name: str = "data") -> list[tuple[str, int]]:
    """Return the controller and the window of each session of this name at a fabric."""
    page = await fabric.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
    found = [each for each in page.sessions if each.display_name == name]
    return [(each.congestion, each.statistics["window_bytes"]) for each in found]


async def test_each_end_chooses_the_controller_of_what_it_sends(
    make_fabric: Callable[..., contextlib.AbstractAsyncContextManager[Any]],
) -> None:
    steering = Steering(allowed=("uno", "dctcp"), **NETWORK)
    async with (
        make_fabric("fabric-a", steering=steering) as left,
        make_fabric("fabric-b", steering=steering) as right,
    ):
        async with connected(left, right, congestion=("uno", "rate")) as (sender, receiver):
            await asyncio.gather(
                sender.send(offset=0, length=20_000), receiver.receive(offset=0, length=20_000)
            )
            [(ours, window)], [(theirs, none)] = (
                await congestion_of(left),
                await congestion_of(right),
            )
            assert (ours, theirs, none) == ("uno", "rate", 0)
            assert window > 0
        async with connected(left, right, name="other"):
            [(chosen, _)] = await congestion_of(left, "other")
            assert chosen == "rate", "the fabric's"


async def test_a_choice_that_is_not_allowed_is_refused_with_one_line(fabrics: Any) -> None:
    left, right = fabrics
    refused = opening(left, right, congestion="uno")
    listening = listen_session(left.sessions, "data", region_bytes=REGION, congestion="uno")
    for session in (refused, listening):
        with pytest.raises(UsageError, match="'uno' is not allowed here; allowed: rate"):
            await session.__aenter__()
    async with listen_sessions(
        left.sessions, "data", region_bytes=REGION, congestion="uno"
    ) as listener:
        with pytest.raises(UsageError, match="'uno' is not allowed here; allowed: rate"):
            await listener.accept()
    assert await congestion_of(left) == []
