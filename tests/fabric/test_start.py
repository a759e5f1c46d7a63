"""What a session hands its worker when it begins."""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from sealane.daemon.fabric.session import Identity, Session, Start
from sealane.transport.establish import SessionKeys


class FakeEndpoint:
    """Keeps what it is started with."""

    local_addresses: ClassVar = ["127.0.0.1:1"]

    def __init__(self, number: int) -> None:
        self._number = number
        self.started: dict[str, Any] = {}

    def fileno(self) -> int:
        return self._number

    def start(self, **arguments: Any) -> None:
        self.started = arguments


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    number = os.eventfd(0)
    yield FakeEndpoint(number)
    os.close(number)


async def test_operator_settings_reach_the_worker_in_its_units(endpoint: FakeEndpoint) -> None:
    identity = Identity(name="sessions/a", display_name="", is_initiator=True, unit_bytes=1408)
    session = Session(
        identity,
        endpoint,  # type: ignore[arg-type]
        job=None,  # type: ignore[arg-type]
        on_closed=lambda _: None,
    )

    session.begin(
        identity,
        Start(
            keys=SessionKeys(send=bytearray(32), receive=bytearray(32)),
            peer_addresses=("127.0.0.1:2",),
            connection_id_local=bytes(8),
            connection_id_peer=bytes(8),
            idle_timeout_seconds=1.5,
            reordering_micros=3000,
            is_initiator=True,
        ),
    )

    assert endpoint.started["idle_timeout_ns"] == 1_500_000_000
    assert endpoint.started["reordering_ns"] == 3_000_000
