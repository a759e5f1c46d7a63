"""Measurements of paths outlive the sessions that made them, for a while."""

import pytest

from sealane.daemon.fabric.known_paths import (
    AGE_SECONDS,
    PACKETS_MIN,
    PATHS_MAX,
    PathKey,
    PathLoss,
    PathLosses,
    PathWindow,
    PathWindows,
)

LOSS = PathLoss(rate=1e-2, burst_packets=3.0)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> int:
        return round(self.seconds * 1e9)


def key(number: int) -> PathKey:
    return PathKey.of(f"spiffe://sealane/fabric/{number}", ["10.0.0.1:7000"])


def test_a_measurement_is_known_until_it_is_too_old() -> None:
    clock = Clock()
    known = PathLosses(clock)
    known.note(key(1), LOSS, PACKETS_MIN)
    assert known.get(key(1)) == LOSS
    assert known.get(key(2)) is None
    clock.seconds = AGE_SECONDS
    assert known.get(key(1)) == LOSS
    clock.seconds += 1
    assert known.get(key(1)) is None
    known.note(key(1), LOSS, PACKETS_MIN)
    assert known.get(key(1)) == LOSS


def test_few_packets_measure_nothing() -> None:
    known = PathLosses()
    known.note(key(1), LOSS, PACKETS_MIN - 1)
    assert known.get(key(1)) is None


def test_the_paths_noted_last_are_kept() -> None:
    known = PathLosses()
    for number in range(PATHS_MAX + 1):
        known.note(key(number), LOSS, PACKETS_MIN)
        known.note(key(0), LOSS, PACKETS_MIN)
    assert known.get(key(1)) is None
    assert all(known.get(key(number)) for number in (0, 2, PATHS_MAX))


@pytest.mark.parametrize(
    ("addresses", "is_same"),
    [
        (["10.0.0.1:9", "[fd00::1]:9"], True),
        (["[fd00:0::1]:8", "10.0.0.1:7", "10.0.0.1:6"], True),
        (["10.0.0.1:9"], False),
        (["10.0.0.2:9", "[fd00::1]:9"], False),
    ],
)
def test_a_path_is_a_peer_and_its_hosts(addresses: list[str], is_same: bool) -> None:
    path = PathKey.of("p", ["10.0.0.1:1", "[fd00::1]:2"])
    assert (PathKey.of("p", addresses) == path) is is_same
    assert PathKey.of("q", ["10.0.0.1:1", "[fd00::1]:2"]) != path


FILLED = {"window_bytes": 1000, "wire_bytes_sent": 1000, "is_fallen_back": 0}


def test_a_window_is_known_to_the_next_session_alone_with_its_age() -> None:
    clock = Clock()
    known = PathWindows(clock)
    known.note(key(1), "uno", FILLED)
    clock.seconds = 7
    assert known.take(key(2), "uno") is None
    assert known.take(key(1), "uno") == PathWindow(window_bytes=1000, age_nanos=7 * 10**9)
    assert known.take(key(1), "uno") is None


def test_a_window_is_the_controllers_that_found_it() -> None:
    known = PathWindows()
    known.note(key(1), "uno", FILLED)
    assert known.take(key(1), None) is None
    assert known.take(key(1), "dctcp") is None
    assert known.take(key(1), "uno") is not None
    # A session at the operator's rate has no window, and leaves the others' to them.
    known.note(key(1), "uno", FILLED)
    known.note(key(1), None, FILLED | {"window_bytes": 0})
    assert known.take(key(1), None) is None
    assert known.take(key(1), "uno") is not None


def test_a_window_that_is_too_old_is_forgotten() -> None:
    clock = Clock()
    known = PathWindows(clock)
    known.note(key(1), "uno", FILLED)
    clock.seconds = AGE_SECONDS + 1
    assert known.take(key(1), "uno") is None


@pytest.mark.parametrize(
    "unproven",
    [
        {"window_bytes": 0},
        {"window_bytes": 1001},
        {"is_fallen_back": 1},
    ],
    ids=lambda unproven: next(iter(unproven)),
)
def test_a_window_that_was_never_filled_or_that_no_mark_bounded_is_not_kept(
    unproven: dict[str, int],
) -> None:
    known = PathWindows()
    known.note(key(1), "uno", FILLED | unproven)
    assert known.take(key(1), "uno") is None
