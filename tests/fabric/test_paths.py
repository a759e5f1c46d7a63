"""Sessions with several paths: each carries its share, and the others make up for losses."""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from fabrics import fabric, settings
from patience import PATIENCE_SECONDS
from sealane._native import Emulator, LinkSettings
from sealane.cli.session_stat import record, table
from sealane.client.session import Session
from sealane.daemon.config import PATHS_MAX
from sealane.daemon.fabric.establishment import Answer, Offer
from sealane.daemon.fabric.paths import bind_addresses
from sealane.daemon.fabric.statistics import path_statistics
from sealane.errors import Error
from sealane.protocol.v1 import sessions_pb2
from session_pairs import RATE, connected

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
LENGTH = 1 << 20


async def carry(sender: Session, receiver: Session, length: int = LENGTH) -> None:
    content = random.Random(length).randbytes(length)
    sender.region[:length] = content
    receiver.region[:length] = bytes(length)
    await asyncio.gather(
        receiver.receive(offset=0, length=length), sender.send(offset=0, length=length)
    )
    landed = hashlib.sha256(receiver.region[:length]).digest()
    assert landed == hashlib.sha256(content).digest()


@contextlib.asynccontextmanager
async def pair(make_fabric: MakeFabric, left: int, right: int) -> AsyncIterator[tuple[Any, Any]]:
    async with (
        make_fabric("fabric-a", paths=left) as near,
        make_fabric("fabric-b", paths=right) as far,
    ):
        yield near, far


def paths_of(made: Any, end: Session) -> list[Any]:
    return list(made.service.get(end.session.name).paths())


async def wait_paths(made: Any, end: Session, states: list[str]) -> list[Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found = paths_of(made, end)
            if [path.state for path in found] == states:
                return found
            await asyncio.sleep(0.01)


async def carry_by_all(made: Any, sender: Session, receiver: Session) -> None:
    """Send messages until every path has carried part of one; a slow host may skip a path."""

    def sent() -> list[int]:
        return [path.statistics["packets_sent"] for path in paths_of(made, sender)]

    async with asyncio.timeout(PATIENCE_SECONDS):
        parts: list[int] = []
        while min(parts, default=0) <= LENGTH / 1408 / len(sent()) / 4:
            before = sent()
            await carry(sender, receiver)
            parts = [now - then for now, then in zip(sent(), before, strict=True)]


def test_paths_take_the_addresses_in_turn() -> None:
    assert bind_addresses(["10.0.0.1"], 2) == ["10.0.0.1:0", "10.0.0.1:0"]
    assert bind_addresses(["10.0.0.1", "fd00::1"], 2) == ["10.0.0.1:0", "[fd00::1]:0"] * 2


@pytest.mark.parametrize(("left", "right", "agreed"), [(4, 4, 4), (3, 1, 1), (1, 3, 1), (2, 3, 2)])
async def test_a_session_has_as_many_paths_as_both_ends_allow(
    make_fabric: MakeFabric, left: int, right: int, agreed: int
) -> None:
    async with (
        pair(make_fabric, left, right) as (near, far),
        connected(near, far) as (sender, receiver),
    ):
        found = await wait_paths(near, sender, ["validated"] * agreed)
        back = await wait_paths(far, receiver, ["validated"] * agreed)
        await carry_by_all(near, sender, receiver)
        await wait_paths(near, sender, ["validated"] * agreed)

        assert [path.peer_address for path in found] == [path.local_address for path in back]
        assert [path.local_address for path in found] == [path.peer_address for path in back]
        assert len({path.local_address for path in found}) == agreed, "a port for each"
        shown = await near.sessions.GetSession(
            sessions_pb2.GetSessionRequest(name=sender.session.name)
        )
        assert list(shown.data_addresses) == [path.local_address for path in found]
        assert [path["state"] for path in record(shown, {})["paths"]] == ["validated"] * agreed
        lines = [text for name, text in table(shown, {}).items() if name.startswith("path ")]
        assert len(lines) == agreed
        assert f"{found[0].local_address} to {found[0].peer_address}, validated" in lines[0]
        session = near.service.get(sender.session.name)
        labels = path_statistics({"sessions/x": session})
        assert [number for _, number in labels] == [str(n) for n in range(agreed) if agreed > 1]


async def test_a_path_that_goes_dark_loses_nothing_of_a_message(make_fabric: MakeFabric) -> None:
    links: list[Emulator] = []

    def lay(addresses: list[str]) -> list[str]:
        link = LinkSettings(rate_bits_per_second=RATE, delay_nanos=1_000_000, buffer_bytes=1 << 24)
        links.extend(Emulator.relay([link], [link], seed=1, forward_to=to) for to in addresses)
        return [link.address or "" for link in links]

    try:
        async with (
            pair(make_fabric, 2, 2) as (near, far),
            connected(near, far, via=lay) as (sender, receiver),
        ):
            await wait_paths(near, sender, ["validated"] * 2)
            await wait_paths(far, receiver, ["validated"] * 2)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(carry(sender, receiver))
                while receiver.statistics()["units_received"] < 100:  # noqa: ASYNC110 - another process counts
                    await asyncio.sleep(0.001)
                links[0].stop()
            await carry(sender, receiver, 200_000)

            dark, light = await wait_paths(near, sender, ["silent", "validated"])
            assert sender.statistics()["path_silences"] >= 1
            assert light.statistics["packets_sent"] > dark.statistics["packets_sent"] > 50
            assert receiver.statistics()["receives_completed"] == 2
    finally:
        for link in links:
            link.stop()


@pytest.mark.parametrize("count", [0, 3, PATHS_MAX + 1])
async def test_a_responder_with_no_path_or_more_than_were_offered_is_refused(
    tmp_path: Any, count: int
) -> None:
    def change(answer: Answer) -> Answer:
        return replace(answer, data_addresses=("127.0.0.1:9",) * count)

    config = replace(settings(tmp_path, "a"), paths=2)
    async with (
        fabric(config, "fabric-a", change_answer=change) as near,
        fabric(settings(tmp_path, "b"), "fabric-b") as far,
    ):
        with pytest.raises(BaseExceptionGroup) as group:
            async with connected(near, far):
                raise AssertionError
        refused = group.value.subgroup(Error)
        assert refused is not None
        assert {error.reason for error in refused.exceptions if isinstance(error, Error)} == {
            "session.establish.malformed"
        }


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1:9",) * (PATHS_MAX + 1), ("far.away:1",)])
async def test_an_initiator_with_addresses_that_can_not_be_is_refused(
    tmp_path: Any, addresses: tuple[str, ...]
) -> None:
    def change(offer: Offer) -> Offer:
        return replace(offer, data_addresses=addresses)

    async with (
        fabric(settings(tmp_path, "a"), "fabric-a", change_offer=change) as near,
        fabric(settings(tmp_path, "b"), "fabric-b") as far,
    ):
        with pytest.raises(BaseExceptionGroup) as group:
            async with connected(near, far):
                raise AssertionError
        refused = group.value.subgroup(Error)
        assert refused is not None
        assert {error.reason for error in refused.exceptions if isinstance(error, Error)} == {
            "session.establish.malformed"
        }
