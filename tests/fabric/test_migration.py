"""Sessions whose peer is suddenly at another address: a NAT forgets its bindings."""

import asyncio
import contextlib
import hashlib
import itertools
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.client.session import Session
from session_pairs import connected

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
LENGTH = 1 << 20


class Nat:
    """A NAT in front of one client that sends to `far`; `inside` is where the client sends to."""

    def __init__(self, far: str) -> None:
        host, _, port = far.rpartition(":")
        self._far = (host, int(port))
        self._client: tuple[str, int] | None = None
        self.on_leaving = self.leave
        self._inside = self._open(self._arrived)
        self._outside = self._open(self._return)
        self.inside = address_of(self._inside)

    def _open(self, arrived: Callable[[bytes, tuple[str, int]], None]) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        made.bind(("127.0.0.1", 0))

        def read() -> None:
            arrived(*made.recvfrom(65536))

        asyncio.get_running_loop().add_reader(made, read)
        return made

    @property
    def outside(self) -> str:
        """The address that the peer outside sees."""
        return address_of(self._outside)

    def rebind(self) -> None:
        """Use another port outside; what comes to the earlier one is lost."""
        earlier, self._outside = self._outside, self._open(self._return)
        close(earlier)

    def stop(self) -> None:
        close(self._inside)
        close(self._outside)

    def _arrived(self, data: bytes, client: tuple[str, int]) -> None:
        self.on_leaving(data, client)

    def leave(self, data: bytes, client: tuple[str, int]) -> None:
        self._client = client
        self._outside.sendto(data, self._far)

    def _return(self, data: bytes, _: tuple[str, int]) -> None:
        if self._client is not None:
            self._inside.sendto(data, self._client)


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()
    return f"{host}:{port}"


def close(bound: socket.socket) -> None:
    asyncio.get_running_loop().remove_reader(bound)
    bound.close()


@contextlib.asynccontextmanager
async def behind_nat(
    make_fabric: MakeFabric,
) -> AsyncIterator[tuple[Nat, tuple[Any, Session], tuple[Any, Session]]]:
    """An initiator behind a NAT, and its peer outside."""
    nats: list[Nat] = []

    def lay(addresses: list[str]) -> list[str]:
        nats.extend(Nat(address) for address in addresses)
        return [nat.inside for nat in nats]

    try:
        async with (
            make_fabric("fabric-a", paths=1) as near,
            make_fabric("fabric-b", paths=1) as far,
            connected(near, far, via=lay) as (inside, outside),
        ):
            yield nats[0], (near, inside), (far, outside)
    finally:
        for nat in nats:
            nat.stop()


async def carry(sender: Session, receiver: Session) -> None:
    content = random.Random(LENGTH).randbytes(LENGTH)
    sender.region[:LENGTH] = content
    receiver.region[:LENGTH] = bytes(LENGTH)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(
            receiver.receive(offset=0, length=LENGTH), sender.send(offset=0, length=LENGTH)
        )
    landed = hashlib.sha256(receiver.region[:LENGTH]).digest()
    assert landed == hashlib.sha256(content).digest()


def peer_address(made: Any, end: Session) -> str:
    (path,) = made.service.get(end.session.name).paths()
    return str(path.peer_address)


async def wait_address(made: Any, end: Session, address: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while peer_address(made, end) != address:  # noqa: ASYNC110 - another thread moves it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_sent_by_inside", [True, False])
async def test_a_message_survives_a_nat_that_is_rebound_in_the_midst_of_it(
    make_fabric: MakeFabric, is_sent_by_inside: bool
) -> None:
    async with behind_nat(make_fabric) as (nat, (_, inside), (far, outside)):
        assert peer_address(far, outside) == nat.outside
        ends = (inside, outside) if is_sent_by_inside else (outside, inside)
        for _ in range(2):
            arrived = ends[1].statistics()["units_received"]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(carry(*ends))
                while ends[1].statistics()["units_received"] < arrived + 100:  # noqa: ASYNC110 - another thread counts
                    await asyncio.sleep(0.001)
                nat.rebind()
            await wait_address(far, outside, nat.outside)
        assert outside.statistics()["path_moves"] == 2
        assert inside.statistics()["path_moves"] == 0, "its peer has not moved"


async def test_a_session_stays_where_its_peer_is_although_copies_come_from_elsewhere(
    make_fabric: MakeFabric,
) -> None:
    async with behind_nat(make_fabric) as (nat, (_, inside), (far, outside)):
        copies = Nat(far.service.get(outside.session.name).paths()[0].local_address)
        copied = itertools.cycle([True, False])

        def overtaken(data: bytes, client: tuple[str, int]) -> None:
            if next(copied):
                copies.leave(data, client)
            nat.leave(data, client)

        nat.on_leaving = overtaken
        for _ in range(5):
            await carry(inside, outside)
            await carry(outside, inside)
        assert peer_address(far, outside) == nat.outside
        assert outside.statistics()["path_moves"] == 0
        assert outside.statistics()["replayed"] > 100, "the originals came after their copies"
        copies.stop()
