"""A thief returns a lease that its holder still uses: no IV is used twice.

The holder is a gateway engine inside the test, attested at the real broker, so that the thief can
get its TLS key. Broker, target and the volume's next gateway are daemons. The ledger reads every
sealed sector sent to the target.
"""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from attached_hosts import host_of, new_secret
from attacks.ledger import Ledger
from attacks.proxy import Proxy
from attacks.world import HOST, TENANTS, Attacked, Cluster, attacked, pattern
from permits import own_authorized
from sealane.crypto.lease import Lease
from sealane.daemon.gateway.back_ends import Via, VolumeBackEnds
from sealane.daemon.gateway.data_path import Gateway, GatewaySettings
from sealane.daemon.gateway.filling import volume_key
from sealane.daemon.gateway.supply import released_keys
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.third_party import ThirdPartyStores
from sealane.errors import VerificationError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import broker_pb2
from sealane.transport.nvme.volume_queue import VolumeQueue
from trust.insider import Insider, insider
from trust.thieves import LeafThief, outcome

SECTORS = 32
RETURN = "/sealane.v1.Broker/ReturnLease"


@contextlib.asynccontextmanager
async def holder(world: Attacked, victim: Insider) -> AsyncIterator[tuple[Lease, VolumeQueue]]:
    """Attach the volume at the victim's gateway, through the proxy."""
    address = world.cluster.target.addresses["target_control"]
    back_ends = VolumeBackEnds(
        Targets({"s": address}, identity=victim.identity),
        identity=victim.identity,
        broker=victim.broker,
        devices=victim.devices,
        third_parties=ThirdPartyStores(
            [], host_nqn=gateway_nqn("g1"), directory=Path("/unused"), authorized=own_authorized
        ),
    )
    descriptor = await victim.broker.descriptor(world.volume.name.removeprefix("volumes/"))
    traddr, trsvcid = world.proxy.address
    back_end = await back_ends.open(descriptor, via=Via(traddr=traddr, trsvcid=trsvcid))
    lease = await victim.broker.lease(descriptor)
    gateway = Gateway(traddr="127.0.0.1", trsvcid=0, settings=GatewaySettings())
    await gateway.start()
    try:
        async with released_keys(victim.broker, descriptor) as keys:
            attached = await gateway.attach(
                volume_key(descriptor, keys),
                counters=[lease.counters],
                secret=new_secret(),
                host_nqn=HOST,
                open_queue=back_end.open_queue,
                epoch_floor=back_end.epoch_floor,
            )
        async with host_of(attached, HOST) as host:
            await host.request_queues(1)
            yield lease, await host.open_queue(1)
    finally:
        await gateway.stop()
        await back_end.close()


def returning(volume_id: str, lease: Lease, token: bytes) -> broker_pb2.ReturnLeaseRequest:
    """Return a request that claims that nothing of a lease was used."""
    return broker_pb2.ReturnLeaseRequest(
        volume_id=volume_id,
        broker_instance=lease.arena[0],
        start_epoch=lease.arena[1],
        lease_id=lease.lease_id,
        touched=lease.counters.counter_start,
        return_token=token,
    )


def audited(cluster: Cluster) -> list[tuple[str, str, str]]:
    """Return kind, outcome and reason of every record in the broker's audit log."""
    text = (cluster.site.root / "broker" / "audit.jsonl").read_text()
    records: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    return [(r["kind"], r["outcome"], r["reason"]) for r in records]


@pytest.mark.slow
async def test_a_stolen_leaf_returns_no_lease_and_nothing_is_granted_twice(
    mortal_cluster: Cluster,
) -> None:
    assert TENANTS["g1"] == TENANTS["g2"]
    ledger = Ledger()
    broker = (mortal_cluster.broker.addresses["broker"], "broker", "broker")
    async with (
        Proxy(mortal_cluster.data_address).listening() as proxy,
        insider(mortal_cluster.site, mortal_cluster.broker, node="g1") as victim,
        attacked(mortal_cluster, gateway="g2", proxy=proxy) as world,
        holder(world, victim) as (lease, queue),
    ):
        proxy.rules.append(ledger)
        volume = world.volume
        volume_id = str(uuid.UUID(volume.name.removeprefix("volumes/")))
        for lba in range(SECTORS):
            await queue.write(lba, pattern(lba, 1))
        assert ledger.sectors_seen == SECTORS
        # The adversary of the threat model: leaf, TLS key and attestation result. It also knows the
        # lease's numbers, but not the sealed contents of the grant.
        async with LeafThief(victim).channel(*broker) as channel:
            request = returning(volume_id, lease, bytes(16)).SerializeToString()
            assert await outcome(channel, RETURN, request) == "call.proof.missing"
        # An adversary that has the call key as well.
        forged = Lease(lease_id=lease.lease_id, counters=lease.counters, return_token=bytes(16))
        with pytest.raises(VerificationError) as caught:
            await victim.broker.return_lease(volume_id, forged, lease.counters.counter_start)
        assert caught.value.reason == "lease.return.holder"
        told = audited(mortal_cluster)
        assert ("call", "refused", "call.proof.missing") in told
        assert ("lease.return", "refused", "lease.return.holder") in told
        assert not [kind for kind, done, _ in told if (kind, done) == ("lease.return", "done")]
        # An adversary that knows everything, or a lying holder: only the records change.
        returned = await victim.broker.return_lease(volume_id, lease, lease.counters.counter_start)
        assert returned == lease.count
        for lba in range(SECTORS):
            await queue.write(lba, pattern(lba, 2))
        # The leases of g2 end with it.
        mortal_cluster.kill_gateway("g2")
    # The volume's next gateway, on the same sectors.
    async with (
        Proxy(mortal_cluster.data_address).listening() as proxy,
        attacked(mortal_cluster, gateway="g2", proxy=proxy, volume=volume) as world,
    ):
        proxy.rules.append(ledger)
        async with world.queue() as theirs:
            await theirs.write(0, pattern(0, 3, SECTORS))
            assert await theirs.read(0, SECTORS) == pattern(0, 3, SECTORS)
    assert ledger.sectors_seen == 3 * SECTORS
    assert ledger.repeats == []
    assert ledger.overlaps == []
