"""Leases of a gateway between attachments: kept, reused, returned, and never used twice."""

import asyncio
import uuid
from typing import cast

import pytest

from sealane.crypto.lease import LEASE_COUNTERS, Arena, CounterRange, Lease
from sealane.daemon.gateway import leases
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.leases import LeaseCache
from sealane.errors import LeaseError, UnavailableError
from sealane.protocol.v1 import broker_pb2

SELF = b"g" * 16


class ArenaBroker:
    """Answers the two calls of the cache from an arena."""

    def __init__(self) -> None:
        self.arena = Arena(broker_instance=1, start_epoch=1)
        self.granted: list[Lease] = []
        self.returned: list[int] = []
        self.failure: LeaseError | UnavailableError | None = None

    async def lease(self, descriptor: broker_pb2.VolumeDescriptor) -> Lease:
        self.granted.append(
            self.arena.grant(
                volume_id=uuid.UUID(descriptor.volume_id),
                incarnation=SELF,
                return_token=len(self.granted).to_bytes(16, "big"),
            )
        )
        return self.granted[-1]

    async def return_lease(self, volume_id: str, lease: Lease, touched: int) -> int:
        if self.failure is not None:
            raise self.failure
        count = self.arena.give_back(
            lease.lease_id,
            touched,
            volume_id=uuid.UUID(volume_id),
            incarnation=SELF,
            return_token=lease.return_token,
        )
        self.returned.append(count)
        return count


def descriptor(key_epoch: int = 1) -> broker_pb2.VolumeDescriptor:
    return broker_pb2.VolumeDescriptor(volume_id=str(uuid.uuid4()), key_epoch=key_epoch)


def tail(counters: CounterRange, used: int) -> CounterRange:
    return CounterRange(
        broker_instance=counters.broker_instance,
        start_epoch=counters.start_epoch,
        counter_start=counters.counter_start + used,
        counter_end=counters.counter_end,
    )


@pytest.fixture
def broker() -> ArenaBroker:
    return ArenaBroker()


@pytest.fixture
def cache(broker: ArenaBroker) -> LeaseCache:
    return LeaseCache(cast("BrokerClient", broker))


async def test_the_next_attach_goes_on_where_the_last_one_stopped(
    cache: LeaseCache, broker: ArenaBroker
) -> None:
    volume = descriptor()
    holder, counters = await cache.take(volume)
    left = [tail(counters[0], 256)]
    await cache.keep(volume, holder, left)
    assert await cache.take(volume) == (holder, left)
    # Both leases are in use: a third attach has to request one.
    _, fresh = await cache.take(volume)
    assert not any(c.overlaps(counters[0]) for c in fresh)
    assert len(broker.granted) == 2


async def test_another_key_epoch_does_not_use_what_is_kept(
    cache: LeaseCache, broker: ArenaBroker
) -> None:
    volume = descriptor()
    holder, counters = await cache.take(volume)
    await cache.keep(volume, holder, [*counters])
    volume.key_epoch = 2
    await cache.take(volume)
    assert len(broker.granted) == 2


async def test_a_lease_without_counters_is_not_used_again(
    cache: LeaseCache, broker: ArenaBroker
) -> None:
    volume = descriptor()
    holder, _ = await cache.take(volume)
    await cache.keep(volume, holder, [])
    await cache.take(volume)
    assert len(broker.granted) == 2


async def test_close_gives_back_what_was_never_touched(
    cache: LeaseCache, broker: ArenaBroker
) -> None:
    volume = descriptor()
    holder, counters = await cache.take(volume)
    await cache.keep(volume, holder, [tail(counters[0], 512)])
    await cache.close()
    await cache.close()
    assert broker.returned == [LEASE_COUNTERS - 512]


async def test_deleting_a_volume_gives_its_leases_back(
    cache: LeaseCache, broker: ArenaBroker
) -> None:
    kept, deleted = descriptor(), descriptor()
    for volume in (kept, deleted):
        holder, counters = await cache.take(volume)
        await cache.keep(volume, holder, [*counters])
    await cache.drop(deleted.volume_id)
    assert broker.returned == [LEASE_COUNTERS]


async def test_the_longest_kept_gives_way(
    cache: LeaseCache, broker: ArenaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "KEPT_MAX", 2)
    volumes = [descriptor() for _ in range(3)]
    for used, volume in enumerate(volumes):
        holder, counters = await cache.take(volume)
        await cache.keep(volume, holder, [tail(counters[0], 256 * (used + 1))])
    assert broker.returned == [LEASE_COUNTERS - 256]


@pytest.mark.parametrize(
    "failure",
    [
        UnavailableError("broker.unreachable", "the broker is gone"),
        LeaseError("lease.return.arena", "another start"),
    ],
)
async def test_what_nobody_takes_back_is_burned_and_forgotten(
    cache: LeaseCache, broker: ArenaBroker, failure: LeaseError | UnavailableError
) -> None:
    volume = descriptor()
    holder, counters = await cache.take(volume)
    await cache.keep(volume, holder, [*counters])
    broker.failure = failure
    await cache.close()
    broker.failure = None
    _, fresh = await cache.take(volume)
    assert not any(c.overlaps(counters[0]) for c in fresh)


async def _attach(
    cache: LeaseCache,
    volume: broker_pb2.VolumeDescriptor,
    expected: leases.Taken | None,
    failure: BaseException,
) -> None:
    async with cache.taken(volume) as taken:
        assert expected is None or taken == expected
        raise failure


async def test_an_attach_that_fails_leaves_its_lease_for_the_next_one(
    cache: LeaseCache, broker: ArenaBroker
) -> None:
    volume = descriptor()
    holder, counters = await cache.take(volume)
    left = [tail(counters[0], 256)]
    await cache.keep(volume, holder, left)
    for failure in (UnavailableError("key.away", "no key came"), asyncio.CancelledError()):
        with pytest.raises(type(failure)):
            await _attach(cache, volume, (holder, left), failure)
    async with cache.taken(volume) as taken:
        assert taken == (holder, left)
    # Once handed to the engine, it isn't in the cache.
    async with cache.taken(volume) as taken:
        assert taken != (holder, left)
    assert len(broker.granted) == 2


async def test_a_fresh_lease_of_an_attach_that_fails_is_kept_too(
    cache: LeaseCache, broker: ArenaBroker
) -> None:
    volume = descriptor()
    with pytest.raises(UnavailableError):
        await _attach(cache, volume, None, UnavailableError("key.away", "no key came"))
    await cache.close()
    assert broker.returned == [LEASE_COUNTERS]
