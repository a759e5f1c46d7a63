"""Channels of a process to its peers: bounded in number, and one for each peer."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import pytest
from cryptography import x509

from sealane.crypto.anchors import TrustAnchors
from sealane.daemon.node import channels
from sealane.daemon.node.call_proofs import CallProofs
from sealane.daemon.node.channels import Channels, Own


class Channel:
    """A connected channel that takes a moment to close."""

    def __init__(self) -> None:
        self.closed = 0
        self.state = grpc.ChannelConnectivity.READY

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: ARG002
        return self.state

    async def wait_for_state_change(self, _: grpc.ChannelConnectivity) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed += 1
        await asyncio.sleep(0.001)


class Proofs:
    def interceptors(self, server: str) -> None: ...

    def close(self) -> None: ...


async def anybody(node: str, role: str) -> Sequence[x509.Certificate]:
    return ()


SILENT = "silent"
"""An address that never completes a connection."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Channel]]:
    made: list[tuple[str, Channel]] = []

    def open_channel(address: str, *_: object, **__: object) -> Channel:
        channel = Channel()
        if address == SILENT:
            channel.state = grpc.ChannelConnectivity.CONNECTING
        made.append((address, channel))
        return channel

    monkeypatch.setattr(channels, "open_channel", open_channel)
    monkeypatch.setattr(channels, "PEERS_MAX", 4)
    return made


def new_channels() -> Channels:
    leaf = cast("x509.Certificate", object())
    own = Own(leaf=leaf, certificate_pem=b"certificate", key_pem=b"key")

    class Anchors:
        pem = b"anchor"

    return Channels(
        lambda: own,
        anchors=cast("TrustAnchors", Anchors()),
        find_peer=anybody,
        proofs=cast("CallProofs", Proofs()),
    )


async def use(made: Channels, address: str) -> Any:
    async with made.use(address, "node", "target") as connection:
        await asyncio.sleep(0)
        return connection.channel


async def test_peers_beyond_the_bound_take_the_place_of_those_that_nobody_uses(
    opened: list[tuple[str, Channel]],
) -> None:
    made = new_channels()
    for number in range(4):
        await use(made, f"a{number}")
    async with made.use("a0", "node", "target"):
        await use(made, "b")
        assert made.count == 2, "that which is in use, and the new one"
    assert [channel.closed for _, channel in opened] == [0, 1, 1, 1, 0]


async def test_callers_that_come_while_others_are_closed_share_one_channel(
    opened: list[tuple[str, Channel]],
) -> None:
    made = new_channels()
    for number in range(4):
        await use(made, f"a{number}")
    addresses = ["b", "b", "c", "b", "a1"]
    used = await asyncio.gather(*(use(made, address) for address in addresses))
    assert used[0] is used[1] is used[3]
    assert [address for address, _ in opened[4:]].count("b") == 1
    assert made.count == len({*addresses})


async def test_a_caller_that_stops_waiting_for_a_connection_leaves_no_channel(
    opened: list[tuple[str, Channel]],
) -> None:
    made = new_channels()
    for number in range(1, 4):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await use(made, SILENT)
        assert (len(opened), made.count) == (number, 0)
    assert [channel.closed for _, channel in opened] == [1, 1, 1]
