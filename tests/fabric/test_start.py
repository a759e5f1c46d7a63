"""The settings that a session passes to its worker at the start."""

import errno
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from sealane import _native
from sealane._native import Permit
from sealane.daemon.fabric.session import Identity, Session, Start
from sealane.daemon.fabric.steering import Steering
from sealane.errors import UnavailableError
from sealane.transport.establish import SessionKeys


class FakeEndpoint:
    """Records its start arguments."""

    local_addresses: ClassVar = ["127.0.0.1:1"]
    pinned_bytes = 0
    unit_bytes = 1408

    def __init__(self, number: int) -> None:
        self._number = number
        self.started: dict[str, Any] = {}
        self.error: OSError | None = None

    def fileno(self) -> int:
        return self._number

    def start(self, **arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        self.started = arguments

    def statistics(self) -> dict[str, int]:
        return {}

    def paths(self) -> list[dict[str, Any]]:
        return []

    def close(self, reason: str = "") -> None:  # noqa: ARG002 - the endpoint's signature
        self.error = None

    def state(self) -> tuple[str, str]:
        # Without a worker, nobody would report the reason of its end.
        return "establishing", ""


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    number = os.eventfd(0)
    yield FakeEndpoint(number)
    os.close(number)


IDENTITY = Identity(name="sessions/a", display_name="", is_initiator=True, unit_bytes=1408)


def session_over(endpoint: FakeEndpoint) -> Session:
    return Session(
        IDENTITY,
        endpoint,  # type: ignore[arg-type]
        job=None,  # type: ignore[arg-type]
        admission=None,  # type: ignore[arg-type]
        steering=Steering(),
        on_closed=lambda _: None,
    )


def start() -> Start:
    return Start(
        version=5,
        keys=SessionKeys(send=bytearray(b"k" * 32), receive=bytearray(b"k" * 32)),
        units=(1408,),
        peer_addresses=("127.0.0.1:2",),
        connection_id_local=bytes(8),
        connection_id_peer=bytes(8),
        idle_timeout_seconds=1.5,
        reordering_micros=3000,
        path_threads=2,
        is_initiator=True,
        permit=Permit(),
    )


async def test_worker_that_can_not_start_ends_the_session_and_its_keys(
    endpoint: FakeEndpoint,
) -> None:
    endpoint.error = OSError(errno.EAGAIN, "no more threads")
    session, wanted = session_over(endpoint), start()

    with pytest.raises(UnavailableError) as refused:
        session.begin(IDENTITY, wanted)

    assert refused.value.reason == "session.endpoint.resources"
    assert session.close_reason == "session.endpoint.resources"
    assert wanted.keys == SessionKeys(send=bytearray(32), receive=bytearray(32))


async def test_operator_settings_reach_the_worker_in_its_units(endpoint: FakeEndpoint) -> None:
    session_over(endpoint).begin(IDENTITY, start())

    assert endpoint.started["idle_timeout_ns"] == 1_500_000_000
    assert endpoint.started["reordering_ns"] == 3_000_000
    assert endpoint.started["path_threads"] == 2
    assert endpoint.started["version"] == 5
    assert isinstance(endpoint.started["steering"], _native.Steering)
    assert isinstance(endpoint.started["permit"], Permit)
