"""Two gateways with one volume: they share data and don't affect each other's queues."""

import asyncio
import contextlib
import datetime as dt
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from attached_hosts import host_of, new_secret
from sealane import _native
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.keys import KEY_EPOCHS_MAX
from sealane.crypto.lease import CounterRange
from sealane.crypto.queue import GroupClaim
from sealane.daemon.gateway.data_path import AttachedVolume, Gateway, GatewaySettings
from sealane.daemon.gateway.grants import QueueGrant, VolumeKey
from sealane.daemon.gateway.queue_opening import QueueOpening
from sealane.daemon.node.authorizations import Authorizations
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.target import data_path as target_module
from sealane.daemon.target import volume_subsystem as target_subsystem
from sealane.daemon.target.control import StorageService
from sealane.daemon.target.data_path import Target
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import broker_pb2, storage_pb2
from sealane.transport.nvme.initiator import HostController, NvmeStatusError, VolumeQueue
from trust.world import all_authorized

HOST = "nqn.2014-08.org.nvmexpress:uuid:0f0f0f0f-0000-4000-8000-000000000002"
SECTORS = 64
SECTOR = 4096
LEFT_WRITES = 32
COMPARE_FAILURE = 0x285
NODES = ("g1", "g2", "g3", "g4")


KEMS = {node: X25519KemKey.create() for node in ("s", *NODES)}


def subject(node: str) -> Subject:
    return Subject(
        node=node,
        role="target" if node == "s" else "gateway",
        tenant="acme",
        incarnation=bytes(16),
        kem_public_key=KEMS[node].public_key,
    )


@dataclass
class Rack:
    """A target, and the state shared by all gateways that attach its volume."""

    target: Target
    service: StorageService
    volume_id: uuid.UUID
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    attached: dict[str, AttachedVolume] = field(default_factory=dict)

    def opening(
        self,
        node: str,
        queue_id: int,
        epoch: int,
        milestone: bytes = b"",
        claim: GroupClaim | None = None,
    ) -> QueueOpening:
        return QueueOpening(
            volume_id=self.volume_id,
            target=subject("s"),
            gateway_node=node,
            kem=KEMS[node],
            queue_id=queue_id,
            association_epoch=epoch,
            milestone=milestone,
            claim=claim,
        )

    async def claim_queue(self, node: str, epoch: int, claim: GroupClaim) -> QueueGrant:
        """Open a queue for a fail-over group."""
        opening = self.opening(node, 1, epoch, claim=claim)
        return opening.grant(await self.service.open_queue(subject(node), opening.request))

    async def open_queue(
        self, node: str, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Open a queue, as the control channel does, without the network."""
        opening = self.opening(node, queue_id, association_epoch, milestone)
        return opening.grant(await self.service.open_queue(subject(node), opening.request))

    def key_of(self, key_epoch: int) -> bytearray:
        return bytearray(b ^ key_epoch for b in self.key)

    @contextlib.asynccontextmanager
    async def gateway(
        self, node: str, key_epochs: Sequence[int] = (1,), *, sectors: int = SECTORS
    ) -> AsyncIterator[AttachedVolume]:
        gateway = Gateway(traddr="127.0.0.1", trsvcid=0, settings=GatewaySettings(hold_seconds=5.0))
        await gateway.start()
        attached = await gateway.attach(
            VolumeKey(
                volume_id=self.volume_id,
                generation=1,
                sector_count=sectors,
                keys={epoch: self.key_of(epoch) for epoch in key_epochs},
            ),
            counters=[
                CounterRange(
                    broker_instance=1,
                    start_epoch=1 + NODES.index(node),
                    counter_start=1,
                    counter_end=1 << 36,
                )
            ],
            secret=new_secret(),
            host_nqn=HOST,
            open_queue=partial(self.open_queue, node),
        )
        self.attached[node] = attached
        try:
            yield attached
        finally:
            await gateway.stop()

    def host(self, node: str) -> HostController:
        attached = self.attached[node]
        return host_of(attached, HOST)

    @contextlib.asynccontextmanager
    async def queue(self, node: str) -> AsyncIterator[VolumeQueue]:
        async with self.host(node) as host:
            queue = await host.open_queue(1)
            try:
                yield queue
            finally:
                await queue.close()


@pytest.fixture
async def rack() -> AsyncIterator[Rack]:
    target = Target(traddr="127.0.0.1", trsvcid=0, store_kind="memory")
    await target.start()
    authority = CertificateAuthority.create(
        broker="b", now=dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
    )
    service = StorageService(
        target,
        node="s",
        store="memory",
        anchors=TrustAnchors(authority.certificate),
        kem=KEMS["s"],
        authorizations=all_authorized(target),
    )
    volume_id = uuid.uuid4()
    descriptor = broker_pb2.VolumeDescriptor(
        volume_id=str(volume_id), target_node="s", tenant="acme", sector_count=SECTORS
    ).SerializeToString()
    await service.create(
        subject("g1"),
        broker_pb2.SignedVolumeDescriptor(
            descriptor=descriptor, signature=authority.sign_descriptor(descriptor)
        ),
    )
    made = Rack(target=target, service=service, volume_id=volume_id)
    try:
        async with made.gateway("g1"), made.gateway("g2"):
            yield made
    finally:
        await target.stop()


def content(seed: int) -> bytes:
    return bytes([seed]) * SECTOR


async def read(queue: VolumeQueue, lba: int) -> bytes:
    into = bytearray(SECTOR)
    await queue.read(lba, into)
    return bytes(into)


async def test_each_reads_what_the_other_wrote_and_may_reconnect(rack: Rack) -> None:
    async with rack.queue("g1") as first:
        async with rack.queue("g2") as second:
            await first.write(0, content(1))
            assert await read(second, 0) == content(1)
            await second.write(0, content(2))
            assert await read(first, 0) == content(2)
        # g2 connects twice more: as a reconnecting host, and in a newer association.
        async with rack.queue("g2") as second:
            rack.attached["g2"].back_end.lose("told to")
            await second.write(1, content(3))
            assert await read(first, 1) == content(3)
            await first.write(1, content(4))
            assert await read(second, 1) == content(4)
        assert rack.attached["g1"].statistics()["associations_lost"] == 0
    assert rack.attached["g2"].statistics()["associations_lost"] == 1


async def test_newer_association_of_one_keeps_the_others_epoch(rack: Rack) -> None:
    await rack.open_queue("g1", 1, 5)
    await rack.open_queue("g2", 1, 1 << 62)
    epochs = [await rack.service.namespace(subject(n), str(rack.volume_id)) for n in NODES[:2]]
    assert [each.association_epoch for each in epochs] == [5, 1 << 62]
    await rack.open_queue("g1", 1, 6)
    with pytest.raises(VerificationError) as caught:
        await rack.open_queue("g2", 1, 6)
    assert caught.value.reason == "queue.association.stale"


async def test_a_gateway_cannot_fence_in_anothers_name(rack: Rack) -> None:
    async with rack.queue("g1") as queue:
        request = rack.opening("g1", 1, (1 << 63) + 1).request
        with pytest.raises(VerificationError) as caught:
            await rack.service.open_queue(subject("g2"), request)
        assert caught.value.reason == "queue.host_nqn"
        await queue.write(0, content(1))
    assert rack.attached["g1"].statistics()["associations_lost"] == 0


async def test_authorization_that_is_lost_during_the_fence_admits_no_queue(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fence may take longer than an authorization lasts, so it is checked again afterwards."""
    is_lost = False
    close_older, require = Target.close_older_queues, Authorizations.require

    async def fence(*args: Any) -> None:
        nonlocal is_lost
        await close_older(*args)
        is_lost = True

    async def ask(self: Authorizations, use: PeerIncarnation) -> None:
        if is_lost:
            raise UnavailableError("authorization.lost", "lost during the fence")
        await require(self, use)

    monkeypatch.setattr(Target, "close_older_queues", fence)
    monkeypatch.setattr(Authorizations, "require", ask)
    with pytest.raises(UnavailableError) as caught:
        await rack.open_queue("g3", 1, 5)
    assert caught.value.reason == "authorization.lost"
    assert is_lost
    assert not list(rack.target._volume(rack.volume_id).tickets)


async def test_gateways_of_a_volume_are_bounded_and_idle_ones_give_way(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_subsystem, "GATEWAYS_MAX", 2)
    async with rack.queue("g2") as queue:
        with monkeypatch.context() as expired:
            expired.setattr(target_module, "TICKET_SECONDS", 0.0)
            await rack.open_queue("g1", 1, 5)
            await rack.open_queue("g3", 1, 5)
        assert rack.target.newest_epoch(rack.volume_id, gateway_nqn("g1")) == 0
        await rack.open_queue("g1", 1, 5)
        with pytest.raises(UnavailableError) as caught:
            await rack.open_queue("g3", 1, 6)
        assert caught.value.reason == "queue.gateways"
        await queue.write(0, content(1))


async def test_racing_compare_and_writes_have_one_winner_each(rack: Rack) -> None:
    async def attempt(queue: VolumeQueue, old: bytes, new: bytes) -> bool:
        try:
            await queue.compare_and_write(3, old, new)
        except NvmeStatusError as error:
            if error.status & 0x7FF != COMPARE_FAILURE:
                raise
            return False
        return True

    async with rack.queue("g1") as first, rack.queue("g2") as second:
        old = content(0)
        for round_number in range(1, 101):
            ours, theirs = content(2 * round_number % 251), content((2 * round_number + 1) % 251)
            won = await asyncio.gather(attempt(first, old, ours), attempt(second, old, theirs))
            assert sorted(won) == [False, True]
            old = ours if won[0] else theirs
            assert await read(first, 3) == await read(second, 3) == old


async def test_writes_of_a_host_that_left_are_not_stored_after_it_is_back(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = rack.attached["g1"]
    reachable = asyncio.Event()
    open_queue = attached.back_end._open_queue

    async def wait_and_open(queue_id: int, epoch: int, milestone: bytes) -> QueueGrant:
        await reachable.wait()
        return await open_queue(queue_id, epoch, milestone)

    monkeypatch.setattr(attached.back_end, "_open_queue", wait_and_open)
    old = rack.host("g1")
    reachable.set()
    await old.connect()
    left = await old.connect_queue(1)
    reachable.clear()
    attached.back_end.lose("told to")
    capsules = b"".join(
        _native.encode_capsule_cmd(write_entry(command_id), content(1))
        for command_id in range(LEFT_WRITES)
    )
    with contextlib.closing(left):
        await asyncio.get_running_loop().sock_sendall(left.socket, capsules)
    assert old._admin is not None
    await old._admin.close()
    await old.close()
    new = rack.host("g1")
    await new.connect()
    reachable.set()
    async with rack.queue("g1") as queue:
        await queue.write(0, content(2))
        assert await read(queue, 0) == content(2)
    await new.close()
    assert rack.target.statistics(rack.volume_id)["sectors_stored"] == 1


def write_entry(command_id: int) -> bytes:
    """Return a write of one in-capsule block to LBA 0."""
    entry = bytearray(64)
    entry[0], entry[1] = 0x01, 0x40
    entry[2:4] = command_id.to_bytes(2, "little")
    entry[4] = 1
    entry[32:36] = SECTOR.to_bytes(4, "little")
    entry[39] = 0x01  # SGL: data block, offset
    return bytes(entry)


async def test_a_new_key_epoch_seals_at_once_and_old_sectors_stay_readable(rack: Rack) -> None:
    attached = rack.attached["g1"]
    async with rack.queue("g1") as queue:
        await queue.write(0, content(1))
        key = rack.key_of(2)
        attached.add_key(2, key)
        assert not any(key)
        await queue.write(1, content(2))
        assert [await read(queue, lba) for lba in (0, 1)] == [content(1), content(2)]
    # A gateway without the new epoch refuses it; one without the old epoch refuses that.
    for node, epochs, opens in (("g3", (1, 2), (True, True)), ("g4", (2,), (False, True))):
        async with rack.gateway(node, epochs), rack.queue(node) as queue:
            for lba, is_open in enumerate(opens):
                if is_open:
                    assert await read(queue, lba) == content(lba + 1)
                else:
                    with pytest.raises(NvmeStatusError):
                        await read(queue, lba)
                    events = rack.attached[node].take_events()
                    assert [e.reason for e in events if e.kind == "refused"] == ["sector.key_epoch"]
    async with rack.queue("g2") as queue:
        with pytest.raises(NvmeStatusError):
            await read(queue, 1)
        assert await read(queue, 0) == content(1)


async def test_a_key_is_added_once_and_only_within_the_epochs(rack: Rack) -> None:
    attached = rack.attached["g1"]
    attached.add_key(2, rack.key_of(2))
    for epoch in (0, 1, 2, 1 + KEY_EPOCHS_MAX):
        key = rack.key_of(7)
        with pytest.raises(ValueError, match="key epoch"):
            attached.add_key(epoch, key)
        assert not any(key)


async def test_replaced_counters_come_back_once(rack: Rack) -> None:
    attached = rack.attached["g1"]
    new = CounterRange(broker_instance=2, start_epoch=9, counter_start=256, counter_end=1 << 20)
    before = attached.replace_counters([new])
    assert sum(c.count for c in before) == (1 << 36) - 1
    assert attached.counters_remaining() == new.count
    async with rack.queue("g1") as queue:
        await queue.write(0, content(1))
    # The queue took all counters; it returned the rest when it ended.
    (left,) = attached.replace_counters()
    assert (left.arena, left.counter_start, left.counter_end) == ((2, 9), 512, 1 << 20)
    assert attached.replace_counters() == []


async def test_gateway_that_attaches_a_grown_volume_has_its_new_size_and_the_others_go_on(
    rack: Rack,
) -> None:
    larger = 4 * SECTORS
    async with rack.queue("g1") as first:
        await first.write(SECTORS - 1, content(1))
        await rack.target.resize_volume(rack.volume_id, sector_count=larger)
        async with rack.gateway("g3", sectors=larger), rack.queue("g3") as third:
            assert await read(third, SECTORS - 1) == content(1)
            assert await read(third, larger - 1) == bytes(SECTOR)
            await third.write(larger - 1, content(3))
            assert await read(third, larger - 1) == content(3)
            await third.write(0, content(3))
            assert await read(first, 0) == content(3)
            for lba, queue in ((SECTORS, first), (larger, third)):
                with pytest.raises(NvmeStatusError):
                    await queue.write(lba, content(4))


async def test_gateway_that_takes_a_volume_for_larger_than_its_target_is_refused(
    rack: Rack,
) -> None:
    async with rack.gateway("g4", sectors=2 * SECTORS), rack.queue("g4") as fourth:
        with pytest.raises(NvmeStatusError):
            await fourth.read(SECTORS, bytearray(SECTOR))


GROUP = bytes(32)


def take_over_of(term: int) -> GroupClaim:
    return GroupClaim(group=GROUP, term=term, is_take_over=True)


async def test_a_take_over_refuses_the_last_gateways_tickets_and_queues(rack: Rack) -> None:
    grant = await rack.claim_queue("g3", 5, take_over_of(0))
    host = HostController(
        traddr=grant.traddr,
        trsvcid=grant.trsvcid,
        subsystem_nqn=grant.subsystem_nqn,
        host_nqn=grant.host_nqn,
    )
    async with host:
        taken = await rack.claim_queue("g4", 5, take_over_of(1))
        assert taken.ticket
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, queue_depth=8, ticket=grant.ticket)
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        await rack.claim_queue("g3", 7, GroupClaim(group=GROUP, term=1))
    assert (await rack.claim_queue("g4", 7, GroupClaim(group=GROUP, term=2))).ticket


async def test_a_fenced_gateway_without_queues_learns_that_it_stands_by(rack: Rack) -> None:
    await rack.claim_queue("g3", 5, take_over_of(0))
    await rack.claim_queue("g4", 5, take_over_of(1))
    # The fence has ended its epoch, too. If it learnt only that, it would never stand by.
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        await rack.claim_queue("g3", 5, GroupClaim(group=GROUP, term=1))


async def test_a_gateway_of_a_later_term_learns_that_the_target_was_rolled_back(rack: Rack) -> None:
    await rack.claim_queue("g3", 5, take_over_of(0))
    fail_over = rack.service._fail_over[str(rack.volume_id)]
    older = fail_over.kept()
    await rack.claim_queue("g4", 5, take_over_of(1))
    fail_over.restore(older)
    with pytest.raises(VerificationError, match=r"volume\.rolled_back"):
        await rack.claim_queue("g4", 6, GroupClaim(group=GROUP, term=2))


async def test_a_take_over_while_a_queue_is_being_opened_leaves_no_ticket(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rack.claim_queue("g3", 5, take_over_of(0))
    close_older, is_first = rack.target.close_older_queues, True

    async def overtaken(volume_id: uuid.UUID, host_nqn: str, epoch: int) -> None:
        nonlocal is_first
        await close_older(volume_id, host_nqn, epoch)
        if is_first:
            is_first = False
            await rack.claim_queue("g4", 5, take_over_of(1))

    monkeypatch.setattr(rack.target, "close_older_queues", overtaken)
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        await rack.claim_queue("g3", 6, GroupClaim(group=GROUP, term=1))


async def test_a_gateway_with_writes_of_another_target_process_begins_no_term(rack: Rack) -> None:
    first = await rack.claim_queue("g3", 5, take_over_of(0))
    held = replace(take_over_of(1), incarnation=first.target_incarnation ^ 1)
    with pytest.raises(VerificationError, match=r"volume\.unflushed_lost"):
        await rack.claim_queue("g3", 6, held)
    await rack.claim_queue("g3", 6, replace(held, incarnation=first.target_incarnation))


async def test_a_gateway_without_an_authorization_fences_nobody(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rack.claim_queue("g3", 5, take_over_of(0))

    async def refuse(self: Authorizations, use: PeerIncarnation) -> None:
        raise UnavailableError("authorization.lost", f"{self} doesn't know {use}")

    with monkeypatch.context() as patched:
        patched.setattr(Authorizations, "require", refuse)
        with pytest.raises(UnavailableError):
            await rack.claim_queue("g4", 5, take_over_of(1))
    assert (await rack.claim_queue("g3", 5, GroupClaim(group=GROUP, term=1))).ticket


async def test_a_claim_that_was_changed_on_its_way_gives_no_secret(rack: Rack) -> None:
    opening = rack.opening("g3", 1, 5, claim=take_over_of(0))
    opening.request.claim.accept_loss = True
    with pytest.raises(VerificationError, match=r"secret\.sealed"):
        await rack.service.open_queue(subject("g3"), opening.request)


async def test_a_target_that_knows_no_claims_can_not_open_a_queue_with_one(rack: Rack) -> None:
    opening = rack.opening("g3", 1, 5, claim=take_over_of(0))
    opening.request.ClearField("claim")
    with pytest.raises(VerificationError, match=r"secret\.sealed"):
        await rack.service.open_queue(subject("g3"), opening.request)


@dataclass
class Catalogue:
    """Records what is kept of volumes."""

    kept: list[bytes] = field(default_factory=list)

    async def begin(self, _: uuid.UUID, content: bytes) -> None:
        self.kept.append(content)

    async def replace(self, _: uuid.UUID, content: bytes) -> None:
        self.kept.append(content)

    async def finish(self, _: uuid.UUID) -> None:
        """Do nothing."""

    async def settle(self) -> Sequence[uuid.UUID]:
        return ()


async def test_groups_are_kept_by_take_overs_and_never_by_a_gateways_descriptor() -> None:
    target = Target(traddr="127.0.0.1", trsvcid=0, store_kind="memory")
    await target.start()
    authority = CertificateAuthority.create(
        broker="b", now=dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
    )
    catalogue: Any = Catalogue()
    service = StorageService(
        target,
        node="s",
        store="memory",
        anchors=TrustAnchors(authority.certificate),
        kem=KEMS["s"],
        authorizations=all_authorized(target),
        catalogue=catalogue,
    )
    rack = Rack(target=target, service=service, volume_id=uuid.uuid4())
    descriptor = broker_pb2.VolumeDescriptor(
        volume_id=str(rack.volume_id), target_node="s", tenant="acme", sector_count=SECTORS
    ).SerializeToString()
    signed = broker_pb2.SignedVolumeDescriptor(
        descriptor=descriptor, signature=authority.sign_descriptor(descriptor)
    )
    forged = storage_pb2.FailOverGroups(
        groups=[storage_pb2.FailOverGroup(tenant="other", group=GROUP, host_nqn="x", term=9)]
    )
    try:
        await service.create(
            subject("g1"),
            broker_pb2.SignedVolumeDescriptor.FromString(
                signed.SerializeToString() + forged.SerializeToString()
            ),
        )
        assert not storage_pb2.FailOverGroups.FromString(catalogue.kept[-1]).groups
        await rack.claim_queue("g1", 5, take_over_of(0))
        (group,) = storage_pb2.FailOverGroups.FromString(catalogue.kept[-1]).groups
        assert (group.tenant, group.host_nqn, group.term) == ("acme", gateway_nqn("g1"), 1)
        read = broker_pb2.SignedVolumeDescriptor.FromString(catalogue.kept[-1])
        assert read.descriptor == descriptor
    finally:
        await target.stop()
