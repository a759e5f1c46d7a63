"""Which devices a node is attested with when the verifier refuses some, and how often it asks."""

# ruff: noqa: ARG002 - arguments are those of what they stand for

import types
from typing import cast

import grpc
import pytest

from sealane.daemon.config import BrokerAddresses
from sealane.daemon.node import enrolment
from sealane.daemon.node.enrolment import Enrolment
from sealane.daemon.node.identity import Keys

CARDS = {"card0", "card1", "card2"}


class Verifier:
    """A verifier that refuses devices, and devices that may be silent in a round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *refused: str) -> None:
        self.refused = {*refused}
        self.silent: dict[int, str] = {}
        self.rounds: list[set[str]] = []
        self.adopted: list[set[str]] = []
        self.issued = 0
        self.node = Enrolment.__new__(Enrolment)
        self.node._refused = set()
        self.node._silent = set()
        self.node._sources = [types.SimpleNamespace(label=label) for label in CARDS]  # type: ignore[misc]
        monkeypatch.setattr(self.node, "_attest", self._attest)
        monkeypatch.setattr(self.node, "_adopt", self.adopted.append)
        monkeypatch.setattr(enrolment, "_is_refusal", lambda *_: True)

    async def _attest(
        self, keys: Keys, broker: BrokerAddresses, asked: set[str], answered: set[str]
    ) -> set[str]:
        used = asked - {self.silent.get(len(self.rounds), "")}
        self.rounds.append(used)
        answered |= used
        if used & self.refused:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.PERMISSION_DENIED, grpc.aio.Metadata(), grpc.aio.Metadata()
            )
        self.issued += 1
        return used

    async def attest(self) -> set[str]:
        """Attest once; return the devices with which the node is attested."""
        self.rounds.clear()
        self.adopted.clear()
        self.issued = 0
        keys, broker = cast("Keys", None), cast("BrokerAddresses", None)
        await self.node._attest_with_devices(keys, broker)
        (devices,) = self.adopted
        return devices


async def test_a_refused_device_that_is_silent_in_its_round_does_not_take_others_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier = Verifier(monkeypatch, "card0")
    verifier.silent = {1: "card0"}
    assert await verifier.attest() == {"card1", "card2"}


async def test_of_several_rounds_one_is_adopted_and_renewals_get_one_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier = Verifier(monkeypatch, "card2")
    assert await verifier.attest() == {"card0", "card1"}
    assert await verifier.attest() == {"card0", "card1"}
    assert verifier.rounds == [CARDS, {"card0", "card1"}]
    assert verifier.issued == 1


async def test_a_device_that_the_policy_accepts_again_is_used_at_the_next_attestation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier = Verifier(monkeypatch, "card1", "card2")
    assert await verifier.attest() == {"card0"}
    verifier.refused = {"card1"}
    assert await verifier.attest() == {"card0", "card2"}
    verifier.refused = set()
    assert await verifier.attest() == CARDS
    assert verifier.issued == 1
    assert await verifier.attest() == CARDS
    assert verifier.rounds == [CARDS]


async def test_a_device_that_is_refused_from_now_on_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier = Verifier(monkeypatch, "card0")
    assert await verifier.attest() == {"card1", "card2"}
    verifier.refused.add("card1")
    assert await verifier.attest() == {"card2"}
    verifier.refused.add("card2")
    assert await verifier.attest() == set()
