"""Volumes that are detached or deleted leave nothing in the control planes of any role."""

import gc
from collections import Counter

from sealane.daemon.gateway.volumes import Via
from volume_control import HOST, World, create

WARM_UP = 5
ROUNDS = 40
# Of the broker: leases that can be returned or asked for again, up to a fixed number, and the
# records of its store, where a deleted volume's id stays. The last attachment has one, too.
BOUNDED = {
    "sealane.daemon.broker.store.state.Known",
    "sealane.daemon.broker.leases._Grant",
    "sealane.daemon.broker.leases.SignedLease",
    "sealane.crypto.hpke.SignedSecret",
    "sealane.crypto.lease.CounterRange",
    "sealane.crypto.lease.Lease",
    "sealane.crypto.lease._Held",
}


def ours() -> Counter[str]:
    """Return how many objects of our own classes there are, by class."""
    gc.collect()
    classes = (type(each) for each in gc.get_objects())
    return Counter(
        f"{each.__module__}.{each.__qualname__}"
        for each in classes
        if str(each.__module__).startswith("sealane.")
    )


async def test_attached_and_deleted_volumes_leave_no_objects(world: World) -> None:
    kept = await create(world)

    async def rounds(count: int) -> Counter[str]:
        for _ in range(count):
            await world.volumes.attach(kept, host_nqn=HOST, via=Via())
            await world.volumes.detach(kept)
            await world.volumes.delete(await create(world))
            world.gateway.attached.clear()
        return ours()

    before = await rounds(WARM_UP)
    grown = await rounds(ROUNDS) - before
    left = {name: count for name, count in grown.items() if count >= ROUNDS // 4}
    assert left.keys() <= BOUNDED, left
