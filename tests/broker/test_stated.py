"""What nodes state of themselves: bounds, and the sign of the skew."""

import datetime as dt

import pytest

from sealane.daemon.broker.stated import Stated, stated_in
from sealane.errors import UsageError
from sealane.protocol.v1.attestation_pb2 import AttestRequest

NOW = dt.datetime(2026, 11, 28, 12, tzinfo=dt.UTC)


def request(*, version: str = "1.2.3", ahead: dt.timedelta | None = None) -> AttestRequest:
    made = AttestRequest(version=version)
    if ahead is not None:
        made.send_time.FromDatetime(NOW + ahead)
    return made


@pytest.mark.parametrize("milliseconds", [0, 1500, -250])
def test_skew_is_how_far_the_node_is_ahead(milliseconds: int) -> None:
    made = request(ahead=dt.timedelta(milliseconds=milliseconds))
    assert stated_in(made, now=NOW) == Stated(version="1.2.3", clock_skew_ms=milliseconds)


def test_a_node_need_not_state_anything() -> None:
    assert stated_in(AttestRequest(), now=NOW) == Stated()


@pytest.mark.parametrize("version", ["x" * 65, "1\n2", "\x1b[2J", "1.2.3\u202e"])
def test_a_version_is_short_and_printable(version: str) -> None:
    assert stated_in(request(version="x" * 64), now=NOW).version == "x" * 64
    with pytest.raises(UsageError) as caught:
        stated_in(request(version=version), now=NOW)
    assert caught.value.reason == "attestation.stated.malformed"


@pytest.mark.parametrize("seconds", [1 << 40, -(1 << 40), (1 << 63) - 1])
def test_a_time_is_one_of_the_calendar(seconds: int) -> None:
    made = request()
    made.send_time.seconds = seconds
    with pytest.raises(UsageError) as caught:
        stated_in(made, now=NOW)
    assert caught.value.reason == "attestation.stated.malformed"


@pytest.mark.parametrize(
    "addresses",
    [
        {f"n{number}": "a:1" for number in range(9)},
        {"n" * 33: "a:1"},
        {"n": "a" * 129},
        {"n": "\x1b[2J"},
        {"n\n": "a:1"},
    ],
)
def test_addresses_are_few_short_and_printable(addresses: dict[str, str]) -> None:
    most = {f"{number}".ljust(32, "n"): "a" * 128 for number in range(8)}
    assert stated_in(AttestRequest(addresses=most), now=NOW).addresses == most
    with pytest.raises(UsageError) as caught:
        stated_in(AttestRequest(addresses=addresses), now=NOW)
    assert caught.value.reason == "attestation.stated.malformed"
