"""Sessions whose peer may not act any more, as the engine keeps it: nobody closes them here."""

import pytest

from permits import permitted
from sealane._native import Permit
from sealane.daemon.clock import monotonic_ns
from transport.test_session_endpoint import End, pair, transfer

SIZE = 100_000


def _send(left: End, right: End) -> None:
    memoryview(left.ring.region)[:SIZE] = b"x" * SIZE
    right.ring.post_receive(offset=SIZE, length=SIZE, user_data=7)
    left.ring.post_send(offset=0, length=SIZE, user_data=7)


def _landed(right: End) -> bytes:
    return bytes(memoryview(right.ring.region)[SIZE : 2 * SIZE])


@pytest.mark.parametrize("side", [0, 1], ids=["sender", "receiver"])
def test_nothing_passes_once_the_permit_has_ended(side: int) -> None:
    permit = permitted()
    with pair(permits=(None, permit) if side else (permit, None)) as ends:
        left, right = ends
        transfer(left, right, sizes=[SIZE])
        before = _landed(right)
        permit.take_back("node.revoked")
        _send(left, right)
        assert ends[side].wait_state("closed") == "session.peer.revoked"
        assert ends[1 - side].wait_state("closed") == "session.peer_closed.revoked"
        assert _landed(right) == before


def test_a_session_ends_when_nobody_extends_its_permit() -> None:
    permit = permitted()
    with pair(permits=(permit, None)) as (left, right):
        transfer(left, right, sizes=[SIZE])
        before = _landed(right)
        permit.take_back("")
        permit.extend(monotonic_ns())
        _send(left, right)
        assert left.wait_state("closed") == "session.trust.ended"
        assert _landed(right) == before


def test_a_session_whose_permit_never_held_is_never_established() -> None:
    with pair(permits=(Permit(), None), establish=False) as (left, _):
        assert left.wait_state("closed") == "session.trust.ended"
