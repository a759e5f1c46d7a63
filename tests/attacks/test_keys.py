"""Reference test 25, and the engine's own record of IVs and plaintexts.

Target and gateway run in this process, because operators can't configure these bounds.
"""

import asyncio
import contextlib
import hashlib
import secrets
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from attached_hosts import new_secret
from attacks.ledger import Iv, Ledger
from attacks.pdus import WRITE, Kind
from attacks.proxy import Link, Proxy
from attacks.raw_host import RawQueue
from attacks.rules import Drop, Hold, Rule, is_command, is_response
from attacks.world import HOST, attempt, pattern
from sealane.crypto.lease import CounterRange
from sealane.daemon.gateway.data_path import AttachedVolume, Gateway, GatewaySettings
from sealane.daemon.gateway.grants import QueueGrant, VolumeKey
from sealane.daemon.target.data_path import Target

GATEWAY = "nqn.2026-11.dev.sealane:gateway:g1"
LBA = 4
RECORD_BYTES = 56


@dataclass
class Inner:
    """Target and gateway with a proxy between them; the control channel is a function call."""

    attached: AttachedVolume
    proxy: Proxy
    ledger: Ledger
    volume_id: uuid.UUID

    @contextlib.asynccontextmanager
    async def queues(self, count: int = 1) -> AsyncIterator[list[RawQueue]]:
        export = self.attached.export
        async with RawQueue.association(
            export, host_nqn=HOST, secret=str(self.attached.secret), count=count
        ) as queues:
            yield queues


@contextlib.asynccontextmanager
async def inner(settings: GatewaySettings) -> AsyncIterator[Inner]:
    target = Target(traddr="127.0.0.1", trsvcid=0, store_kind="memory")
    gateway = Gateway(traddr="127.0.0.1", trsvcid=0, settings=settings)
    await target.start()
    await gateway.start()
    volume_id = uuid.uuid4()
    await target.create_volume(volume_id, sector_count=1024)
    async with Proxy(target.address).listening() as proxy:
        ledger = Ledger()
        proxy.rules.append(ledger)

        async def open_queue(
            queue_id: int, association_epoch: int, milestone: bytes = b""
        ) -> QueueGrant:
            await target.close_older_queues(volume_id, GATEWAY, association_epoch)
            secret, ticket = secrets.token_bytes(32), secrets.token_bytes(16)
            target.admit_queue(
                ticket,
                volume_id=volume_id,
                host_nqn=GATEWAY,
                queue_id=queue_id,
                secret=bytearray(secret),
                association_epoch=association_epoch,
                incarnation=7,
                gateway=None,
                permit=None,
            )
            traddr, trsvcid = proxy.address
            return QueueGrant(
                ticket=ticket,
                secret=bytearray(secret),
                association_epoch=association_epoch,
                target_incarnation=7,
                traddr=traddr,
                trsvcid=trsvcid,
                subsystem_nqn=target.subsystem_nqn(volume_id),
                host_nqn=GATEWAY,
            )

        attached = await gateway.attach(
            VolumeKey(
                volume_id=volume_id,
                generation=1,
                sector_count=1024,
                keys={1: bytearray(secrets.token_bytes(32))},
            ),
            counters=[
                CounterRange(
                    broker_instance=1, start_epoch=1, counter_start=256, counter_end=1 << 36
                )
            ],
            secret=new_secret(),
            host_nqn=HOST,
            open_queue=open_queue,
        )
        try:
            yield Inner(attached, proxy, ledger, volume_id)
        finally:
            await gateway.stop()
            await target.stop()


def commands_on(link: Link) -> int:
    """Return the commands of an I/O queue, without its Connect."""
    return sum(1 for pdu in link.history if pdu.kind == Kind.COMMAND) - 1


async def test_25_keys_are_replaced_before_the_numbers_end_and_nothing_is_lost() -> None:
    """Eight writers on two queues go through several generations of keys."""
    bound, turns = 256, 120
    async with (
        inner(GatewaySettings(commands_per_key_max=bound)) as world,
        world.queues(2) as queues,
    ):

        async def work(worker: int) -> None:
            queue, lba = queues[worker % 2], LBA + worker
            for version in range(turns):
                await queue.write(lba, pattern(lba, version))
                assert await queue.read(lba) == pattern(lba, version)

        await asyncio.gather(*(work(worker) for worker in range(8)))
        links = world.proxy.io_links(open_only=False)
        for worker in range(8):
            found = await queues[0].read(LBA + worker)
            assert found == pattern(LBA + worker, turns - 1)
        statistics = world.attached.statistics()
    assert len(links) > 2 * (8 * turns * 2 // 2 // bound)
    assert max(commands_on(link) for link in links) <= bound
    assert len({link.ticket for link in links}) == len(links)
    assert world.ledger.repeats == world.ledger.overlaps == []
    assert (statistics["refusals"], statistics["commands_timed_out"]) == (0, 0)
    assert statistics["associations_lost"] == 0


def records(path: Path) -> list[tuple[int, Iv, bytes, int]]:
    """Return key epoch, IV, plaintext hash and LBA of every seal recorded by the engine."""
    content = path.read_bytes()
    assert len(content) % RECORD_BYTES == 0
    found = []
    for at in range(0, len(content), RECORD_BYTES):
        record = content[at : at + RECORD_BYTES]
        epoch = int.from_bytes(record[:4], "little")
        lba = int.from_bytes(record[48:], "little")
        found.append((epoch, Iv.of(record[4:16]), record[16:48], lba))
    return found


def has_acted(rule: Rule) -> Callable[[], bool]:
    return lambda: rule.made > 0


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["command", "completion", "connection"])
async def test_time_out_and_retry_meet_no_iv_with_two_plaintexts(
    tmp_path: Path, loses: str
) -> None:
    """The host changes its buffer before the retry; the retry sends the data sealed first."""
    settings = GatewaySettings(command_timeout_seconds=0.3, nonce_ledgers=tmp_path)
    async with inner(settings) as world, world.queues() as (queue,):
        await queue.write(LBA, pattern(LBA, 0))
        for version in range(1, 6):
            rule = {
                "command": Drop(match=is_command(WRITE)),
                "completion": Drop(match=is_response(WRITE)),
                "connection": Hold(match=is_command(WRITE)),
            }[loses]
            world.proxy.rules.append(rule)
            buffer = bytearray(pattern(LBA, version))
            pending = asyncio.ensure_future(attempt(queue.write(LBA, buffer)))
            await world.proxy.until(has_acted(rule))
            buffer[:] = bytes(len(buffer))
            if loses == "connection":
                world.proxy.cut(*world.proxy.io_links())
            assert (await pending).is_success
            world.proxy.rules.remove(rule)
            assert await queue.read(LBA) == pattern(LBA, version)
    noted = records(tmp_path / str(world.volume_id))
    assert len({iv for _, iv, _, _ in noted}) == len(noted) >= 6
    plaintexts = {hashlib.sha256(pattern(LBA, version)).digest() for version in range(6)}
    assert {plain for _, _, plain, _ in noted} == plaintexts
    # The engine recorded everything on the wire, where no IV has two ciphertexts.
    assert set(world.ledger.uses) <= {iv for _, iv, _, _ in noted}
    assert world.ledger.repeats == []
