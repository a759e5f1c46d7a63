"""What `sealaned --check` says of targets that don't answer."""

import socket
import threading
import time
from typing import Any, cast

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.config import GatewayConfig
from sealane.daemon.gateway import check


class Config:
    def __init__(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses


def lines(addresses: dict[str, str]) -> list[str]:
    config = cast("GatewayConfig", cast("Any", Config(addresses)))
    return [*check.unreachable(config, own_node="own")]


def test_a_name_that_is_not_resolved_in_time_delays_no_other_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "_CONNECT_SECONDS", 0.2)
    go_on = threading.Event()

    class Connection:
        def close(self) -> None: ...

    def create_connection(address: tuple[str, int], *, timeout: float) -> Connection:
        if address[0] == "slow":
            # Like a resolver without an answer: no timeout ends it.
            go_on.wait()
        if address[0] == "refused":
            raise ConnectionRefusedError(111, "Connection refused")
        return Connection()

    monkeypatch.setattr(socket, "create_connection", create_connection)
    addresses = {name: f"{name}:1" for name in ("slow", "refused", "good", "own")}
    timer = threading.Timer(PATIENCE_SECONDS, go_on.set)
    timer.start()
    began = time.monotonic()
    try:
        said = lines(addresses)
        took = time.monotonic() - began
    finally:
        timer.cancel()
        go_on.set()
    assert took < PATIENCE_SECONDS / 2
    assert said == [
        "target slow at slow:1: no answer within 0.2 s; its volumes wait until it answers",
        "target refused at refused:1: Connection refused; its volumes wait until it answers",
    ]
