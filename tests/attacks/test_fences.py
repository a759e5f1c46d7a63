"""Unknown outcomes: a lost command is retried only after a fence (secure-queue.md §3).

The adversary also controls the control channel's network. That channel uses mutual TLS, so he can
only cut it. While it is cut, nothing may be acknowledged and no old write may take effect.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from attacks.pdus import DATASET, READ, WRITE, Kind, Pdu, Way
from attacks.proxy import Proxy
from attacks.raw_host import RawQueue
from attacks.rules import Drop, Hold, is_command, is_response
from attacks.world import SECTOR, Attacked, Cluster, attacked, attempt, pattern
from sealane.errors import Error
from trust.relay import Relay

LBA = 4
WRITE_IF = 0x81


@pytest.fixture
async def control(mortal_cluster: Cluster) -> AsyncIterator[Relay]:
    async with Relay(mortal_cluster.target.addresses["target_control"]).running() as wire:
        await asyncio.to_thread(mortal_cluster.gateway, "g2", control_address=wire.address)
        yield wire
        mortal_cluster.kill_gateway("g2")


@pytest.fixture
async def fenced(mortal_cluster: Cluster, control: Relay) -> AsyncIterator[Attacked]:
    async with (
        Proxy(mortal_cluster.data_address).listening() as proxy,
        attacked(mortal_cluster, gateway="g2", proxy=proxy) as made,
    ):
        yield made
        control.mend()


@pytest.mark.slow
async def test_nothing_is_acknowledged_while_the_fence_cannot_be_reached(
    fenced: Attacked, control: Relay
) -> None:
    """Both paths are cut during a write: the gateway must not invent an outcome."""
    hold = Hold(match=is_command(WRITE))
    async with fenced.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        fenced.proxy.add(hold)
        pending = asyncio.ensure_future(attempt(queue.write(LBA, pattern(LBA, 2))))
        await fenced.proxy.until(lambda: hold.made)
        control.cut()
        fenced.proxy.is_lingering = True
        for link in fenced.proxy.links:
            link.writers[Way.TO_GATEWAY].transport.abort()
        # The host either gets an error or no answer until the fence succeeds.
        refused = asyncio.ensure_future(control.was_refused.wait())
        await asyncio.wait([refused, pending], return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        assert not pending.done() or not (await pending).is_success
        control.mend()
        outcome = await pending
        for pdu in hold.take():
            with contextlib.suppress(OSError):
                await fenced.proxy.inject(pdu)
    with contextlib.suppress(Error):
        async with fenced.queue() as queue:
            found = await queue.read(LBA)
            allowed = [pattern(LBA, 2)]
            if not outcome.is_success:
                allowed.append(pattern(LBA, 1))
            assert found in allowed
            await queue.write(LBA, pattern(LBA, 3))
            assert await queue.read(LBA) == pattern(LBA, 3)


LOSSES = {"completion": is_response(WRITE), "command": is_command(WRITE)}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
async def test_write_whose_answer_is_lost_is_sent_again_only_if_it_was_not_made_and_as_it_was(
    fenced: Attacked, loss: str
) -> None:
    """After the fence the target reports the outcome; a retry must not reuse an IV for new data."""
    sealed: list[bytes] = []

    def note(pdu: Pdu) -> list[Pdu]:
        if is_command(WRITE)(pdu) and pdu.data:
            sealed.append(bytes(pdu.data))
        return [pdu]

    lost = Drop(match=LOSSES[loss])
    async with fenced.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        fenced.proxy.rules += [note, lost]
        pending = asyncio.ensure_future(attempt(queue.write(LBA, pattern(LBA, 2))))
        await fenced.proxy.until(lambda: lost.made)
        fenced.proxy.cut(*fenced.proxy.io_links())
        assert (await pending).is_success
    # A stored write isn't sent again; one that never arrived is, once.
    assert len(sealed) == (1 if loss == "completion" else 2)
    by_iv: dict[bytes, set[bytes]] = {}
    for block in sealed:
        by_iv.setdefault(block[4112:4124], set()).add(block[:4112])
    assert all(len(ciphertexts) == 1 for ciphertexts in by_iv.values())
    assert await fenced.contents(LBA) == pattern(LBA, 2)


CHANGES: dict[str, Callable[[RawQueue], Awaitable[None]]] = {
    "write": lambda queue: queue.write(LBA, pattern(LBA, 2)),
    "durable write": lambda queue: queue.write(LBA, pattern(LBA, 2), is_forced=True),
    "write in two commands": lambda queue: queue.write(LBA, pattern(LBA, 2) + bytes(SECTOR) * 31),
    "deallocate": lambda queue: queue.deallocate(LBA, 1),
    "write zeroes": lambda queue: queue.write_zeroes(LBA, 1),
    "compare and write": lambda queue: queue.compare_and_write(
        LBA, pattern(LBA, 1), pattern(LBA, 2)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
async def test_change_whose_completion_was_dropped_does_not_happen_over_another_gateways(
    cluster: Cluster, world: Attacked, change: str
) -> None:
    """A completion is lost without a restart; another gateway uses the block before the retry."""
    changed = pattern(LBA, 2) if "write" in change and "zeroes" not in change else bytes(SECTOR)
    lost = Drop(match=is_response(WRITE, DATASET, WRITE_IF))
    async with (
        attacked(cluster, gateway="g2", volume=world.volume) as other,
        world.queue() as ours,
        other.queue() as theirs,
    ):
        await ours.write(LBA, pattern(LBA, 1))
        world.proxy.add(lost)
        pending = asyncio.ensure_future(attempt(CHANGES[change](ours)))
        await world.proxy.until(lambda: lost.made)
        assert await theirs.read(LBA) == changed
        await theirs.compare_and_write(LBA, changed, pattern(LBA, 3))
        await theirs.flush()
        world.proxy.cut(*world.proxy.io_links())
        assert (await pending).is_success
        assert await theirs.read(LBA) == pattern(LBA, 3)
        assert await ours.read(LBA) == pattern(LBA, 3)


@pytest.mark.slow
async def test_change_that_was_dropped_on_its_way_happens_once_behind_the_fence(
    cluster: Cluster, world: Attacked
) -> None:
    """A command that never arrived is sent again and answered."""
    lost = Drop(match=is_command(WRITE))
    async with (
        attacked(cluster, gateway="g2", volume=world.volume) as other,
        world.queue() as ours,
        other.queue() as theirs,
    ):
        await ours.write(LBA, pattern(LBA, 1))
        world.proxy.add(lost)
        pending = asyncio.ensure_future(attempt(ours.write(LBA, pattern(LBA, 2))))
        await world.proxy.until(lambda: lost.made)
        await theirs.compare_and_write(LBA, pattern(LBA, 1), pattern(LBA, 3))
        world.proxy.cut(*world.proxy.io_links())
        assert (await pending).is_success
        assert await theirs.read(LBA) == pattern(LBA, 2)


@pytest.mark.slow
async def test_read_that_was_lost_is_asked_anew_and_never_answered_old(fenced: Attacked) -> None:
    """The answer to the first attempt is withheld and replayed after the reconnect."""
    kept: list[Pdu] = []

    def keep(pdu: Pdu) -> list[Pdu]:
        is_answer = pdu.kind in (Kind.C2H_DATA, Kind.RESPONSE) and pdu.entry[:1] == bytes([READ])
        if is_answer and len(kept) < 2:
            kept.append(pdu)
            return []
        return [pdu]

    async with fenced.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        fenced.proxy.rules.append(keep)
        pending = queue.start_read(LBA)
        await fenced.proxy.until(lambda: len(kept) == 2)
        (old,) = fenced.proxy.io_links()
        fenced.proxy.cut(old)
        outcome = await attempt(pending)
        if outcome.is_success:
            assert pending.result() == pattern(LBA, 1)
    async with fenced.queue() as queue:
        await queue.write(LBA, pattern(LBA, 2))
        (link,) = fenced.proxy.io_links()
        for pdu in kept:
            with contextlib.suppress(OSError):
                await fenced.proxy.inject(pdu.sent(link.number))
        outcome = await attempt(again := queue.start_read(LBA))
        if outcome.is_success:
            assert again.result() == pattern(LBA, 2)
    assert await fenced.contents(LBA) == pattern(LBA, 2)
