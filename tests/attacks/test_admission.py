"""Access to volumes: tickets used for other queues, hosts or volumes; other tenants; floods."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from attacks.pdus import Pdu
from attacks.proxy import Proxy
from attacks.raw_host import say
from attacks.rules import Gather, Rewrite, is_io_connect
from attacks.world import HOST, Attacked, Cluster, attacked, attempt, pattern
from sealane.client import connect
from sealane.errors import Error, UsageError

LBA = 4
SUBSYSTEM, HOST_NAME, TICKET = slice(256, 512), slice(512, 768), slice(768, 784)


async def denied_or_right(world: Attacked, version: int) -> None:
    """Check that the queue doesn't open, or that acknowledged writes can be read."""
    try:
        async with world.queue() as queue:
            outcome = await attempt(queue.write(LBA, pattern(LBA, version)))
            if outcome.is_success:
                assert await queue.read(LBA) == pattern(LBA, version)
    except Error:
        pass  # Denied.


def put(field: slice, content: bytes) -> Callable[[Pdu], object]:
    return lambda pdu: pdu.data.__setitem__(field, content.ljust(field.stop - field.start, b"\0"))


def other_queue_id(pdu: Pdu) -> None:
    pdu.header[50:52] = (7).to_bytes(2, "little")


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (put(TICKET, bytes(range(16))), ("queue.ticket",)),
        (put(TICKET, bytes(16)), ("queue.ticket",)),
        (other_queue_id, ("queue.ticket",)),
        (put(HOST_NAME, HOST.encode()), ("queue.ticket", "connect.host", "connect.parameter")),
    ],
)
async def test_ticket_for_something_else_opens_nothing(
    world: Attacked, change: Callable[[Pdu], object], reasons: tuple[str, ...]
) -> None:
    rule = Rewrite(match=is_io_connect, change=change)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
    world.proxy.add(rule)
    await denied_or_right(world, 2)
    await world.refusal(*reasons, origin="s")
    assert rule.made == 1
    assert await world.contents(LBA) in (pattern(LBA, 1), pattern(LBA, 2))


async def test_36_ticket_of_one_volume_opens_no_queue_of_another(
    cluster: Cluster, world: Attacked
) -> None:
    """The adversary can choose the subsystem name in Connect, but not the ticket."""
    async with (
        attacked(cluster, gateway="g3", proxy=world.proxy) as other,
        other.queue() as queue,
    ):
        await queue.write(LBA, pattern(LBA, 1))
        (link,) = world.proxy.io_links()
        connect_there = next(pdu for pdu in link.history if is_io_connect(pdu))
        name = bytes(connect_there.data[SUBSYSTEM])
        rule = Rewrite(match=is_io_connect, change=put(SUBSYSTEM, name))
        world.proxy.add(rule)
        await denied_or_right(world, 9)
        await other.refusal("queue.ticket", "connect.host", "connect.parameter", origin="s")
        assert rule.made == 1
        assert await queue.read(LBA) == pattern(LBA, 1)


async def test_tickets_of_two_queues_exchanged_open_none(world: Attacked) -> None:
    def exchange(pdus: list[Pdu]) -> list[Pdu]:
        first, second = pdus
        first.data[TICKET], second.data[TICKET] = second.data[TICKET], first.data[TICKET]
        return pdus

    async with attacked(world.cluster, proxy=world.proxy) as other:
        rule = Gather(match=is_io_connect, make=exchange)
        world.proxy.add(rule)
        await asyncio.gather(denied_or_right(world, 1), denied_or_right(other, 1))
        await world.refusal("queue.ticket", "connect.parameter", origin="s")
        await other.refusal("queue.ticket", "connect.parameter", origin="s")
    assert rule.made == 1


async def test_36_gateway_of_another_tenant_cannot_name_the_volume(
    cluster: Cluster, world: Attacked
) -> None:
    async with connect(cluster.gateway("g3").socket) as stranger:
        for call in (
            stranger.volumes.get(world.volume.name),
            stranger.volumes.attach(world.volume.name, host_nqn=HOST),
            stranger.volumes.delete(world.volume.name),
        ):
            with pytest.raises(UsageError) as caught:
                await call
            assert caught.value.reason == "volume.not_found"
        assert world.volume.name not in [volume.name for volume in await stranger.volumes.list()]


@pytest.mark.slow
async def test_flood_of_silent_connections_leaves_running_queues_alone(world: Attacked) -> None:
    """Connections beyond the limit are closed at once; running queues aren't affected."""
    idle: list[asyncio.StreamWriter] = []
    closed_at_once = 0
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        try:
            for number in range(400):
                reader, writer = await asyncio.open_connection(*world.proxy.target)
                idle.append(writer)
                if number >= 300:
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        async with asyncio.timeout(1):
                            closed_at_once += await reader.read(1) == b""
                if closed_at_once >= 3:
                    break
            assert closed_at_once >= 3
            await queue.write(LBA, pattern(LBA, 2))
            assert await queue.read(LBA) == pattern(LBA, 2)
        finally:
            for writer in idle:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


@pytest.mark.parametrize("prefix", [b"", b"\x00", b"\x00\x00\x80\x00\x80\x00\x00", b"\xff" * 200])
async def test_truncated_and_senseless_handshakes_end_alone(world: Attacked, prefix: bytes) -> None:
    async with world.queue() as queue:
        await say(world.proxy.target, prefix, ends=True)
        await queue.write(LBA, pattern(LBA, 1))
        assert await queue.read(LBA) == pattern(LBA, 1)


@pytest.mark.slow
async def test_30_two_gateways_of_one_volume_never_read_old_data(cluster: Cluster) -> None:
    """Two hosts of a user: a host that is served sees the other's acknowledged writes."""
    async with (
        Proxy(cluster.data_address).listening() as proxy,
        attacked(cluster, proxy=proxy) as first,
    ):
        async with first.queue() as queue:
            await queue.write(LBA, pattern(LBA, 1))
        async with attacked(cluster, gateway="g2", proxy=proxy, volume=first.volume) as second:
            async with second.queue() as queue:
                assert await queue.read(LBA) == pattern(LBA, 1)
                await queue.write(LBA, pattern(LBA, 2))
            with contextlib.suppress(Error):
                async with first.queue() as queue:
                    pending = queue.start_read(LBA)
                    if (await attempt(pending)).is_success:
                        assert pending.result() == pattern(LBA, 2)
            assert await second.contents(LBA) == pattern(LBA, 2)
