"""Reference tests 22 and 24 across connections: replays, late writes, splices between queues."""

import asyncio
import contextlib

import pytest

from attacks.pdus import READ, WRITE, Pdu, Way
from attacks.proxy import Link, Proxy
from attacks.raw_host import say
from attacks.rules import (
    Drop,
    Gather,
    Hold,
    Match,
    Record,
    Replace,
    Rewrite,
    goes,
    is_command,
    is_io_connect,
    is_read_data,
    is_response,
)
from attacks.world import Attacked, Cluster, attacked, attempt, pattern
from sealane.errors import Error

LBA = 4

FOREIGN_COMPLETION = ("completion.mac", "pdu.malformed")
"""Reasons for the completion of another queue: the second if its command id isn't outstanding."""


def sever_gateway_side(proxy: Proxy) -> list[Link]:
    """Close every connection on the gateway's side; those on the target's side stay open."""
    proxy.is_lingering = True
    links = [link for link in proxy.links if link.is_open]
    for link in links:
        link.writers[Way.TO_GATEWAY].transport.abort()
    return links


async def release(proxy: Proxy, pdus: list[Pdu]) -> None:
    """Send the withheld PDUs if a connection is left."""
    for pdu in pdus:
        with contextlib.suppress(OSError):
            await proxy.inject(pdu)


async def test_22_write_released_after_reconnect_changes_nothing(world: Attacked) -> None:
    """A write is withheld on the old connection and released after a newer one is acknowledged."""
    hold = Hold(match=is_command(WRITE))
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(hold)
        late = asyncio.ensure_future(attempt(queue.write(LBA, pattern(LBA, 2))))
        await world.proxy.until(lambda: hold.made)
        sever_gateway_side(world.proxy)
        await late
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 3))
        await release(world.proxy, hold.take())
        assert await queue.read(LBA) == pattern(LBA, 3)
    assert await world.contents(LBA) == pattern(LBA, 3)


async def test_22_reconnected_queue_that_replays_the_old_connection_is_refused(
    world: Attacked,
) -> None:
    """All commands of the old connection are replayed first on the new one."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        await queue.write(LBA, pattern(LBA, 2))
        (old,) = world.proxy.io_links()
    replayed = [pdu for pdu in old.history if is_command(WRITE)(pdu)]
    assert len(replayed) == 2

    def replay(pdu: Pdu) -> list[Pdu]:
        return [*(old_pdu.sent(pdu.link) for old_pdu in replayed), pdu]

    rule = Replace(match=is_command(READ, WRITE), make=replay)
    async with world.queue() as queue:
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 3)))
        await world.refusal("command.mac", origin="s")
    assert rule.made == 1
    allowed = [pattern(LBA, 3)] if outcome.is_success else [pattern(LBA, 2), pattern(LBA, 3)]
    assert await world.contents(LBA) in allowed


@pytest.mark.slow
async def test_22_replayed_connect_with_its_spent_ticket_is_refused(world: Attacked) -> None:
    """The adversary replays the whole connection, starting with ICReq, on its own connection."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        (old,) = world.proxy.io_links()
        sent = [pdu for pdu in old.history if pdu.way is Way.TO_TARGET]
        await say(world.proxy.target, b"".join(pdu.encode() for pdu in sent))
        refused = await world.refusal("queue.ticket", "connect.queue.in_use", origin="s")
        assert refused.lba == 0
        await queue.write(LBA, pattern(LBA, 2))
    assert await world.contents(LBA) == pattern(LBA, 2)


async def test_stolen_ticket_that_is_used_first_opens_nothing(world: Attacked) -> None:
    """A thief who uses the ticket first gets a connection but has no key to send commands on it."""
    admitted: list[bytes] = []

    hold = Hold(match=is_io_connect)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        (old,) = world.proxy.io_links()
    writes = [pdu for pdu in old.history if is_command(WRITE)(pdu)]
    world.proxy.add(hold)

    async def steal() -> None:
        await world.proxy.until(lambda: hold.held)
        (connect,) = hold.held
        thief = [world.proxy.links[connect.link].history[0], connect, *writes]
        said = b"".join(pdu.encode() for pdu in thief)
        if heard := await say(world.proxy.target, said):
            admitted.append(heard)
        await release(world.proxy, hold.take())

    async def use() -> bool:
        try:
            async with world.queue() as queue:
                return (await attempt(queue.write(LBA, pattern(LBA, 2)))).is_success
        except Error:  # The front end couldn't open the queue.
            return False

    thief = asyncio.ensure_future(steal())
    is_written = await use()
    await thief
    # The thief's Connect was answered, but its first command was refused.
    await world.refusal("command.mac", "queue.ticket", "connect.parameter", origin="s")
    assert hold.made == 1
    assert admitted
    allowed = [pattern(LBA, 2)] if is_written else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed


async def test_24_completions_of_two_queues_exchanged_are_not_believed(world: Attacked) -> None:
    """Same command id, sequence number and opcode, but another queue."""

    def exchange(pdus: list[Pdu]) -> list[Pdu]:
        first, second = pdus
        first.link, second.link = second.link, first.link
        first.answered_id, second.answered_id = second.answered_id, first.answered_id
        return pdus

    rule = Gather(match=is_response(WRITE), make=exchange)
    async with world.queues(2) as queues:
        world.proxy.add(rule)
        outcomes = await asyncio.gather(
            *(
                attempt(queue.write(lba, pattern(lba, 1)))
                for lba, queue in enumerate(queues, start=LBA)
            )
        )
        await world.refusal(*FOREIGN_COMPLETION, origin="g1")
    assert rule.made == 1
    for lba, outcome in enumerate(outcomes, start=LBA):
        allowed = [pattern(lba, 1)]
        if not outcome.is_success:
            allowed.append(bytes(4096))
        assert await world.contents(lba) in allowed


@pytest.mark.parametrize("what", ["writes", "reads", "completions"])
@pytest.mark.parametrize("other_gateway", ["g1", "g3"])
async def test_24_pdus_of_two_volumes_exchanged_are_refused(
    cluster: Cluster, world: Attacked, what: str, other_gateway: str
) -> None:
    """PDUs spliced across volumes: of one gateway, and of two gateways of two tenants."""
    cases: dict[str, tuple[Match, tuple[str, ...], str]] = {
        "writes": (is_command(WRITE), ("command.mac",), "s"),
        "reads": (is_command(READ), ("command.mac",), "s"),
        "completions": (is_response(WRITE), FOREIGN_COMPLETION, "g1"),
    }
    match, reasons, origin = cases[what]
    async with attacked(cluster, gateway=other_gateway, proxy=world.proxy) as other:
        async with world.queue() as here, other.queue() as there:
            for queue in (here, there):
                await queue.write(LBA, pattern(LBA, 1))

            def exchange(pdus: list[Pdu]) -> list[Pdu]:
                first, second = pdus
                if first.link != second.link:
                    first.link, second.link = second.link, first.link
                return pdus

            rule = Gather(match=match, make=exchange)
            world.proxy.add(rule)
            read = what == "reads"
            commands = [
                attempt(queue.read(LBA) if read else queue.write(LBA, pattern(LBA, 2)))
                for queue in (here, there)
            ]
            outcomes = await asyncio.gather(*commands)
            gateway = origin.replace("g1", other_gateway)
            await world.refusal(*reasons, origin=origin)
            await other.refusal(*reasons, origin=gateway)
        assert rule.made == 1
        for one, outcome in zip((world, other), outcomes, strict=True):
            allowed = [pattern(LBA, 2)]
            if read or not outcome.is_success:
                allowed.append(pattern(LBA, 1))
            assert await one.contents(LBA) in allowed


async def test_24_write_reflected_as_the_answer_of_a_read_is_not_believed(
    world: Attacked,
) -> None:
    """The gateway's own sealed sector and MAC are reflected to it."""
    sealed = Record(match=is_command(WRITE))
    async with world.queue() as queue:
        world.proxy.add(sealed)
        await queue.write(LBA, pattern(LBA, 1))

        def reflect(pdu: Pdu) -> None:
            pdu.data[:] = sealed.copies[0].data

        rule = Rewrite(match=is_read_data, change=reflect)
        world.proxy.add(rule)
        outcome = await attempt(queue.read(LBA))
        refused = await world.refusal("sector.mac", origin="g1")
    assert rule.made == 1
    assert refused.lba == LBA
    assert not outcome.is_success or await world.contents(LBA) == pattern(LBA, 1)


async def test_24_commands_reflected_to_the_gateway_are_refused(world: Attacked) -> None:
    """Command capsules are never valid towards a host."""
    rule = Replace(match=is_command(WRITE), make=lambda pdu: [pdu.sent(way=Way.TO_GATEWAY)])
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2)))
        await world.refusal("pdu.malformed", origin="g1")
    assert rule.made == 1
    allowed = [pattern(LBA, 2)] if outcome.is_success else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed


async def test_everything_swallowed_is_never_acknowledged(world: Attacked) -> None:
    """An adversary can deny service but can't cause a false success."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        (link,) = world.proxy.io_links()
        rule = Drop(match=goes(Way.TO_TARGET), times=1 << 30)
        world.proxy.add(rule)
        pending = asyncio.ensure_future(attempt(queue.write(LBA, pattern(LBA, 2))))
        await world.proxy.until(lambda: rule.made)
        assert not pending.done()
        world.proxy.rules.clear()
        world.proxy.cut(link)
        outcome = await pending
    allowed = [pattern(LBA, 2)] if outcome.is_success else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed
