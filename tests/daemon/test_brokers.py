"""Several brokers at a node: choice, order, and the final error."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from control_plane import Site, daemon, short_directory
from sealane.client import connect
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.brokers import Brokers
from sealane.daemon.node.identity import Identity
from sealane.errors import LeaseError, UnavailableError, UsageError, VerificationError

ENROLMENT = {
    "broker_node": "b1",
    "broker_address": "h:1",
    "attestation_address": "h:2",
    "trust_anchor": "/t",
    "evidence": "software",
    "key_file": "/k",
    "other_brokers": [
        {"node": f"b{i}", "address": f"h:{i}", "attestation_address": "h:9"} for i in (2, 3)
    ],
}


class Reachable:
    """An identity with channels to the running brokers."""

    certificate = "first"

    def __init__(self, *up: str) -> None:
        self.up = {*up}
        self.asked: list[str] = []
        self.renews = True

    async def wait_replaced(self, leaf: str, *, seconds: float) -> bool:
        assert leaf == "first"
        assert seconds > 0
        return self.renews

    @contextlib.asynccontextmanager
    async def channel(self, address: str, node: str, role: str) -> AsyncIterator[str]:
        assert role == "broker"
        self.asked.append(node)
        if node not in self.up:
            raise UnavailableError("peer.unreachable", f"{node} at {address}")
        yield node


def brokers(identity: Reachable) -> Brokers:
    return Brokers(EnrolmentConfig.model_validate(ENROLMENT), cast("Identity", identity))


async def answer(channel: grpc.aio.Channel) -> Any:
    return channel


async def test_the_next_is_asked_when_one_does_not_answer_and_stays_preferred() -> None:
    identity = Reachable("b2", "b3")
    several = brokers(identity)
    assert await several.call(answer) == "b2"
    assert await several.call(answer) == "b2"
    assert identity.asked == ["b1", "b2", "b2"]
    identity.up = {"b1"}
    assert await several.call(answer) == "b1"
    assert identity.asked[3:] == ["b2", "b3", "b1"]


async def test_when_none_answers_all_say_why() -> None:
    identity = Reachable()
    with pytest.raises(UnavailableError) as caught:
        await brokers(identity).call(answer)
    assert all(f"b{i} at h:{i}" in str(caught.value) for i in (1, 2, 3))
    assert caught.value.reason == "peer.unreachable"
    assert identity.asked == ["b1", "b2", "b3"]


async def test_grant_whose_answer_is_lost_is_asked_of_the_next_broker() -> None:
    granted: list[str] = []

    async def grant(channel: grpc.aio.Channel) -> str:
        granted.append(str(channel))
        if len(granted) == 1:
            raise UnavailableError("peer.unreachable", "the answer got lost")
        return granted[-1]

    assert await brokers(Reachable("b1", "b2", "b3")).call(grant) == "b2"
    assert granted == ["b1", "b2"]


async def test_exhausted_arena_sends_to_the_next_broker_and_a_refusal_does_not() -> None:
    async def exhausted(channel: grpc.aio.Channel) -> str:
        if str(channel) == "b1":
            raise LeaseError("lease.arena.exhausted", "restart the broker")
        return str(channel)

    async def refused(channel: grpc.aio.Channel) -> str:
        raise UsageError("volume.not_found", str(channel))

    identity = Reachable("b1", "b2", "b3")
    assert await brokers(identity).call(exhausted) == "b2"
    identity.asked.clear()
    with pytest.raises(UsageError):
        await brokers(identity).call(refused)
    assert len(identity.asked) == 1


async def test_a_call_that_a_new_policy_refuses_is_made_again_after_attesting() -> None:
    refusals = ["attestation.policy.changed"]

    async def refused_once(channel: grpc.aio.Channel) -> str:
        if refusals:
            raise VerificationError(refusals.pop(), "attest again")
        return str(channel)

    identity = Reachable("b1")
    assert await brokers(identity).call(refused_once) == "b1"
    for renews, reasons in (
        (True, ["node.revoked"]),
        (False, ["attestation.policy.changed"]),
        (True, ["attestation.policy.changed"] * 2),
    ):
        identity.renews, refusals[:] = renews, reasons
        with pytest.raises(VerificationError) as caught:
            await brokers(identity).call(refused_once)
        assert caught.value.reason == reasons[0]


async def test_node_enrols_with_and_calls_whichever_broker_is_there() -> None:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"g": ["gateway"]})
        broker = stack.enter_context(daemon(site.broker_config()))
        there = site.enrolment("g", broker)
        gone = there.replace('broker_address = "', 'broker_node = "gone"\nbroker_address = "')
        for address in (broker.addresses["broker"], broker.addresses["attestation"]):
            gone = gone.replace(address, "127.0.0.1:1")
        other = (
            '[[enrolment.other_brokers]]\nnode = "broker"\n'
            f'address = "{broker.addresses["broker"]}"\n'
            f'attestation_address = "{broker.addresses["attestation"]}"\n'
        )
        config = site.write_config(
            "g",
            gone
            + other
            + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\ntarget_address = "h:1"\n',
        )
        gateway = stack.enter_context(daemon(config))
        async with connect(gateway.socket) as client:
            assert await client.volumes.list() == []
