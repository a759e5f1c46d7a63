"""Retries of paths, and the choice of a path for a queue."""

import pytest

from sealane.errors import UsageError
from sealane.protocol.nvme.constants import AnaState
from sealane.transport.nvme.connection_manager import PATHS_MAX, ConnectionManager
from sealane.transport.nvme.handshake import Address
from sealane.transport.nvme.paths import Backoff, PathState, PathView, ReconnectPolicy, ordered


def backoff(*, jitter: float = 0.0, give_up_seconds: float | None = None) -> Backoff:
    policy = ReconnectPolicy(first_seconds=1.0, most_seconds=8.0, give_up_seconds=give_up_seconds)
    return Backoff(policy, lambda: jitter)


def live(**ana: AnaState) -> PathView:
    states = {int(name[1:]): state for name, state in ana.items()}
    return PathView(state=PathState.LIVE, ana=states)


def test_delays_are_a_quarter_of_the_time_since_the_loss() -> None:
    one = backoff()
    times = (100.0, 102.0, 104.0, 108.0, 120.0, 132.0, 1e9)
    assert [one.failed(now) for now in times] == [1, 1, 1, 2, 5, 8, 8]


def test_jitter_takes_up_to_a_quarter_off() -> None:
    assert backoff(jitter=1.0).failed(0.0) == 0.75


def test_success_begins_anew() -> None:
    one = backoff(give_up_seconds=10.0)
    one.failed(0.0)
    assert one.failed(8.0) == 2
    one.succeeded()
    assert one.failed(20.0) == 1
    assert one.failed(28.0) == 2


def test_a_path_lost_too_long_is_given_up() -> None:
    one = backoff(give_up_seconds=10.0)
    assert one.failed(100.0) == 1
    assert one.failed(109.9) is not None
    assert one.failed(110.0) is None


@pytest.mark.parametrize("delays", [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_impossible_delays_are_refused(delays: tuple[float, float]) -> None:
    with pytest.raises(UsageError):
        ReconnectPolicy(first_seconds=delays[0], most_seconds=delays[1])


def test_queues_take_turns_among_equals() -> None:
    paths = [live(), live(), live()]
    assert [ordered(paths, nsid=1, queue_id=queue)[0] for queue in range(4)] == [0, 1, 2, 0]
    assert ordered(paths, nsid=1, queue_id=2) == [2, 0, 1]


def test_optimized_paths_come_first() -> None:
    paths = [
        live(n1=AnaState.NON_OPTIMIZED),
        live(n1=AnaState.OPTIMIZED, n2=AnaState.NON_OPTIMIZED),
        live(n1=AnaState.OPTIMIZED),
    ]
    assert ordered(paths, nsid=1, queue_id=1) == [2, 1, 0]


@pytest.mark.parametrize(
    "state", [AnaState.INACCESSIBLE, AnaState.PERSISTENT_LOSS, AnaState.CHANGE]
)
def test_unusable_states_are_left_out(state: AnaState) -> None:
    assert ordered([live(n1=state)], nsid=1, queue_id=1) == []


def test_a_namespace_that_is_not_reported_is_not_there() -> None:
    assert ordered([live(n1=AnaState.OPTIMIZED)], nsid=2, queue_id=1) == []


@pytest.mark.parametrize("state", [PathState.CONNECTING, PathState.WAITING, PathState.GONE])
def test_only_live_paths_are_taken(state: PathState) -> None:
    assert ordered([PathView(state=state, ana={})], nsid=1, queue_id=1) == []


@pytest.mark.parametrize("count", [0, PATHS_MAX + 1])
def test_paths_are_bounded(count: int) -> None:
    addresses = [Address("127.0.0.1", 1 + index) for index in range(count)]
    with pytest.raises(UsageError):
        ConnectionManager(
            addresses,
            subsystem_nqn="nqn.2026-11.dev.sealane:x",
            host_nqn="nqn.2026-11.dev.sealane:host",
            queue_count=1,
            events=lambda _: None,
        )


def test_an_address_counts_once() -> None:
    with pytest.raises(UsageError, match="each address once"):
        ConnectionManager(
            [Address("127.0.0.1", 1)] * 2,
            subsystem_nqn="nqn.2026-11.dev.sealane:x",
            host_nqn="nqn.2026-11.dev.sealane:host",
            queue_count=1,
            events=lambda _: None,
        )
