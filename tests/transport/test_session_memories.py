"""Memories of a session that finds its unit."""

import contextlib
import os
import secrets
import time

import pytest

from patience import PATIENCE_SECONDS
from sealane._native import SessionEndpoint, SharedRegion

UNITS = [4032, 1408]


def start(endpoint: SessionEndpoint, peer: str, own_id: int, keys: tuple[bytes, bytes]) -> None:
    send_key, receive_key = map(bytearray, keys)
    endpoint.start(
        peer_addresses=[peer],
        units=UNITS,
        connection_id_local=own_id,
        connection_id_peer=3 - own_id,
        send_key=send_key,
        receive_key=receive_key,
        rate_bits_per_second=100_000_000,
        idle_timeout_ns=30 * 10**9,
        initiator=own_id == 1,
        version=6,
    )


def wait_settled(endpoint: SessionEndpoint) -> tuple[str, str]:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while (state := endpoint.state())[0] == "establishing" and time.monotonic() < give_up:
        time.sleep(0.001)
    return state


@pytest.mark.parametrize("takes_early", [False, True])
def test_a_job_keeps_the_memories_that_it_has(*, takes_early: bool) -> None:
    with contextlib.ExitStack() as stack:
        left, right = [
            stack.enter_context(
                contextlib.closing(SessionEndpoint(["127.0.0.1:0"], SharedRegion(1 << 20)))
            )
            for _ in range(2)
        ]
        forward, backward = secrets.token_bytes(32), secrets.token_bytes(32)
        start(left, right.local_addresses[0], 1, (forward, backward))
        if takes_early:
            for descriptor in left.take_job_fds():
                stack.callback(os.close, descriptor)
        start(right, left.local_addresses[0], 2, (backward, forward))
        expected = ("closed", "session.endpoint.resources") if takes_early else ("established", "")
        assert wait_settled(left) == expected
