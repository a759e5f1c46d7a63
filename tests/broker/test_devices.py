"""Devices at the broker, on every store: permission to open, change and take over."""

import asyncio
import datetime as dt
import hashlib
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from brokers import MemoryAudit
from sealane.crypto.certificates import Subject
from sealane.crypto.hpke import Context, SignedSecret, open_signed
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.queue import GROUP_BYTES
from sealane.daemon.broker import device_books
from sealane.daemon.broker.device_books import DeviceBooks
from sealane.daemon.broker.devices import (
    DEVICES_PER_NODE_MAX,
    FENCE,
    FOUND_MAX,
    DeviceInit,
    Devices,
    Findings,
)
from sealane.daemon.broker.records import NodeRecord, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.device.anchors.anchor import CATALOGUE, Anchored, Change, volume_record
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.volume.jobs import REASON_MAX, REASONS_MAX
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import TakeOverCause
from sealane.protocol.v1 import devices_pb2

KEM = X25519KemKey.create()
S = Subject(
    node="s", role="target", tenant="", incarnation=b"1" * 16, kem_public_key=KEM.public_key
)
S_AGAIN = replace(S, incarnation=b"2" * 16)
OTHER = replace(S, node="o", incarnation=b"3" * 16)
D = uuid.UUID(int=13)
REQUEST = bytes(range(16))
BLOB = hashlib.sha256(b"list").digest()


@dataclass
class World:
    """The devices of a broker, its records and a clock."""

    registry: Registry
    init: DeviceInit = "first-come"
    now: dt.datetime = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
    audit: MemoryAudit = field(default_factory=MemoryAudit)
    covered: list[int] = field(default_factory=list)
    device_id: uuid.UUID = D

    async def _cover(self, revision: int) -> None:
        self.covered.append(revision)

    @property
    def devices(self) -> Devices:
        return Devices(
            self.registry,
            init=self.init,
            cover=self._cover,
            audit=self.audit,
            metrics=Metrics(),
            now=lambda: self.now,
        )

    @property
    def books(self) -> DeviceBooks:
        return DeviceBooks(self.registry, cover=self._cover, audit=self.audit, now=lambda: self.now)

    async def open(
        self,
        caller: Subject = S,
        device_id: uuid.UUID | None = None,
        *,
        anchor: str = "broker",
        found: Sequence[bytes] = (BLOB,),
    ) -> devices_pb2.DeviceState:
        opened = await self.devices.open(
            caller,
            device_id=device_id or self.device_id,
            anchor=anchor,
            found=found,
            request_id=REQUEST,
        )
        return devices_pb2.DeviceState.FromString(opened.state)

    async def advance(self, epoch: int, *changes: Change, caller: Subject = S) -> None:
        await self.devices.advance(
            caller, device_id=self.device_id, fencing_epoch=epoch, changes=changes
        )

    async def initialised(self, caller: Subject = S, *, anchor: str = "broker") -> int:
        """Open D for the first time, anchor its list, confirm; return the fencing epoch."""
        state = await self.open(caller, anchor=anchor)
        assert state.is_initial
        if anchor == "broker":
            await self.advance(state.fencing_epoch, change(0, 1), caller=caller)
        await self.devices.confirm(caller, device_id=D, fencing_epoch=state.fencing_epoch)
        return state.fencing_epoch

    async def volume(self, target_node: str = "s") -> VolumeRecord:
        made, _ = await self.registry.register(
            VolumeRecord(
                volume_id=uuid.uuid4(),
                tenant="t",
                display_name="",
                sector_count=1,
                target_node=target_node,
                generation=1,
                key_epoch=1,
                request_id=uuid.uuid4(),
            )
        )
        return made

    async def attest(self, caller: Subject) -> None:
        record = NodeRecord(node=caller.node, role="target", incarnation=caller.incarnation)
        await self.registry.commit((), self.registry.nodes.sealed(f"target/{caller.node}", record))

    async def state(self, device_id: uuid.UUID = D) -> str:
        return (await self.books.details(device_id))[0].state


def change(expected: int, number: int, blob: bytes = BLOB, name: str = CATALOGUE) -> Change:
    return Change(name=name, expected=expected, record=Anchored(number=number, blob=blob))


@pytest.fixture
def world(registry: Registry) -> World:
    return World(registry)


async def refused(family: type[Error], reason: str, call: Awaitable[object]) -> None:
    with pytest.raises(family) as caught:
        await call
    assert caught.value.reason == reason


async def test_secret_is_the_devices_own_and_opens_for_its_owner_only(world: World) -> None:
    async def secret(device_id: uuid.UUID, *, spoiled: bool = False) -> bytearray:
        opened = await world.devices.open(
            S, device_id=device_id, anchor="none", found=(), request_id=REQUEST
        )
        state = devices_pb2.DeviceState.FromString(opened.state)
        context = Context(
            purpose="device secret",
            recipient=S.spiffe_id,
            incarnation=S.incarnation,
            request_id=REQUEST,
            volume_id=str(device_id),
            key_epoch=state.fencing_epoch,
            beside=hashlib.sha256(opened.state + b"x" * spoiled).digest(),
        )
        return open_signed(
            SignedSecret(sealed=opened.secret.sealed, signature=opened.secret.signature),
            private_key=KEM,
            context=context,
            signer=world.registry.authority.certificate.public_key(),  # type: ignore[arg-type]
        )

    first = await secret(D)
    assert len(first) == 32
    assert await secret(D) == first
    assert await secret(uuid.UUID(int=14)) != first
    # The signature covers the state as well.
    await refused(VerificationError, "secret.signature", secret(D, spoiled=True))
    stored = await world.registry.devices.get(str(D))
    assert stored is not None
    assert bytes(first) not in stored.record.wrapped_secret


async def test_newest_opening_fences_those_before(world: World) -> None:
    first = await world.initialised()
    second = (await world.open(S_AGAIN)).fencing_epoch
    assert second > first
    await refused(VerificationError, "device.fenced", world.advance(first, change(1, 2)))
    # Nor under the newer epoch, which belongs to another process.
    await refused(VerificationError, "device.fenced", world.advance(second, change(1, 2)))
    for call in (world.devices.check, world.devices.confirm):
        await refused(VerificationError, "device.fenced", call(S, device_id=D, fencing_epoch=first))
    await world.advance(second, change(1, 2), caller=S_AGAIN)
    await world.devices.check(S_AGAIN, device_id=D, fencing_epoch=second)
    # A late close by the fenced process has no effect.
    await world.devices.close(S, device_id=D, fencing_epoch=first)
    await world.devices.check(S_AGAIN, device_id=D, fencing_epoch=second)
    await world.devices.close(S_AGAIN, device_id=D, fencing_epoch=second)
    await refused(
        VerificationError,
        "device.fenced",
        world.devices.check(S_AGAIN, device_id=D, fencing_epoch=second),
    )


async def test_device_of_another_node_is_refused(world: World) -> None:
    epoch = await world.initialised()
    await refused(VerificationError, "device.owner.refused", world.open(OTHER))
    await refused(
        VerificationError,
        "device.owner.refused",
        world.advance(epoch, change(1, 2), caller=replace(OTHER, incarnation=S.incarnation)),
    )


async def test_unknown_device_of_an_unopened_name_is_fenced(world: World) -> None:
    await refused(VerificationError, "device.fenced", world.advance(1, change(0, 1)))
    await world.devices.close(S, device_id=D, fencing_epoch=1)


async def test_known_device_without_a_matching_anchor_is_refused(world: World) -> None:
    epoch = await world.initialised()
    for found in ((), (b"x" * 32,)):
        await refused(VerificationError, "device.anchor.mismatch", world.open(found=found))
    for anchor in ("file", "tpm2", "none"):
        await refused(VerificationError, "device.anchor.mismatch", world.open(anchor=anchor))
    # A refused opening fences no process.
    await world.advance(epoch, change(1, 2, b"newer"))
    state = await world.open(found=(BLOB, b"newer"))
    assert not state.is_initial
    assert [(r.name, r.number, r.blob) for r in state.records] == [(CATALOGUE, 2, b"newer")]


async def test_device_that_was_never_confirmed_is_believed_again(world: World) -> None:
    state = await world.open()
    await world.advance(state.fencing_epoch, change(0, 1))
    assert await world.state() == "new"
    state = await world.open(S_AGAIN, found=())
    assert state.is_initial
    # The records of the previous opening are gone, and their numbers stay used.
    assert (len(state.records), state.floor) == (0, 1)
    again = world.advance(state.fencing_epoch, change(0, 1), caller=S_AGAIN)
    await refused(UsageError, "anchor.order", again)
    await world.advance(state.fencing_epoch, change(0, 2), caller=S_AGAIN)


async def test_numbers_of_records_that_are_gone_stay_taken(world: World) -> None:
    epoch = await world.initialised()
    mine, other = [volume_record((await world.volume()).volume_id) for _ in range(2)]
    await world.advance(epoch, change(0, 7, b"old", name=mine))
    gone = Change(name=mine, expected=7, record=None)
    for _ in range(2):
        await world.advance(epoch, gone)
    for name in (mine, other):
        for number in (1, 7):
            again = change(0, number, b"old", name=name)
            await refused(UsageError, "anchor.order", world.advance(epoch, again))
    # Existing records advance as before.
    await world.advance(epoch, change(1, 2, b"two"), change(0, 8, b"new", name=mine))
    state = await world.open(S_AGAIN, found=(b"two",))
    assert (state.floor, {r.name: r.number for r in state.records}) == (7, {CATALOGUE: 2, mine: 8})
    # Accepting the found state removes the records but frees no number.
    await world.books.believe_anew(D)
    state = await world.open(S_AGAIN, found=())
    assert (state.floor, len(state.records)) == (8, 0)
    await refused(
        UsageError,
        "anchor.order",
        world.advance(state.fencing_epoch, change(0, 8, b"new", name=mine), caller=S_AGAIN),
    )


async def test_confirmation_outlives_a_store_that_is_put_back(world: World) -> None:
    await world.initialised()
    stored = await world.registry.devices.get(str(D))
    assert stored is not None
    assert world.covered == [stored.revision]


async def test_anchor_changes_all_or_nothing_and_repeats_are_harmless(world: World) -> None:
    epoch = await world.initialised()
    volume = volume_record((await world.volume()).volume_id)
    both = [change(1, 2, b"two"), change(0, 5, b"v", name=volume)]
    for _ in range(2):
        await world.advance(epoch, *both)
    beside = change(5, 6, b"w", name=volume)
    for stale in (change(1, 3), change(0, 9), change(2, 3, name=volume)):
        changes = [stale] if stale.name == volume else [stale, beside]
        await refused(UsageError, "anchor.order", world.advance(epoch, *changes))
    state = await world.open(found=(b"two",))
    assert {r.name: (r.number, r.blob) for r in state.records} == {
        CATALOGUE: (2, b"two"),
        volume: (5, b"v"),
    }
    await world.advance(state.fencing_epoch, Change(name=volume, expected=5, record=None))
    assert [r.name for r in (await world.open(found=(b"two",))).records] == [CATALOGUE]


async def test_changes_that_race_are_all_made_once(world: World) -> None:
    epoch = await world.initialised()
    volumes = [volume_record((await world.volume()).volume_id) for _ in range(8)]
    await asyncio.gather(*(world.advance(epoch, change(0, 1, name=v)) for v in volumes))
    records = dict((await world.books.details(D))[1])
    assert records.keys() == {CATALOGUE, *volumes}


async def test_opening_between_the_check_of_a_change_and_its_commit_fences_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await world.initialised()
    commit = world.registry.commit

    async def late(*arguments: Any) -> int | None:
        monkeypatch.setattr(world.registry, "commit", commit)
        await world.open(S_AGAIN)
        return await commit(*arguments)

    monkeypatch.setattr(world.registry, "commit", late)
    await refused(VerificationError, "device.fenced", world.advance(epoch, change(1, 2)))


async def test_only_volumes_of_the_device_have_records(world: World) -> None:
    await world.attest(S)
    epoch = await world.initialised()
    elsewhere = volume_record((await world.volume("o")).volume_id)
    for name, reason, family in (
        (elsewhere, "device.volume.refused", VerificationError),
        (volume_record(uuid.uuid4()), "volume.not_found", UsageError),
    ):
        await refused(family, reason, world.advance(epoch, change(0, 1, name=name)))


async def test_record_of_a_volume_that_was_deleted_meanwhile_is_taken_and_can_go(
    world: World,
) -> None:
    epoch = await world.initialised()
    volume = await world.volume()
    await world.registry.unregister(volume.volume_id)
    name = volume_record(volume.volume_id)
    await world.advance(epoch, change(0, 1, name=name))
    await world.advance(epoch, Change(name=name, expected=1, record=None))
    assert [each for each, _ in (await world.books.details(D))[1]] == [CATALOGUE]


async def test_volumes_go_to_the_device_that_their_target_serves_now(world: World) -> None:
    assert (await world.volume()).device_id is None
    await world.attest(S)
    await world.initialised()
    assert (await world.volume()).device_id == D
    assert (await world.volume("o")).device_id is None
    # A process without open devices, as if its volumes were in memory.
    await world.attest(S_AGAIN)
    assert (await world.volume()).device_id is None


@pytest.mark.parametrize("how", ["device", "next"])
async def test_unknown_device_waits_for_an_operator(world: World, how: str) -> None:
    world.init = "authorized"
    await refused(VerificationError, "device.init.refused", world.open())
    [asking], _ = await world.books.entries(page_size=0, page_token="r:")
    assert (asking.device_id, asking.owner, asking.state) == (D, "s", "asking")
    if how == "device":
        await refused(UsageError, "device.not_found", world.books.authorize(uuid.UUID(int=1)))
        await world.books.authorize(D)
        await refused(VerificationError, "device.owner.refused", world.open(OTHER))
    else:
        await world.books.authorize_next("s")
        await refused(VerificationError, "device.init.refused", world.open(OTHER))
    assert (await world.open()).is_initial
    # One authorization admits one device.
    await refused(VerificationError, "device.init.refused", world.open(S, uuid.UUID(int=2)))
    assert [r["kind"] for r in world.audit.records] == ["device.init", "device.open"]


async def test_node_owns_a_bounded_number_of_devices(world: World) -> None:
    for number in range(DEVICES_PER_NODE_MAX):
        await world.open(S, uuid.UUID(int=number))
    await refused(UnavailableError, "device.limit", world.open(S, uuid.UUID(int=99)))
    await world.open(OTHER, D.__class__(int=99))
    await refused(
        UnavailableError, "device.limit", world.books.move(uuid.UUID(int=99), "s", unseen=True)
    )
    await world.books.forget(uuid.UUID(int=0))
    await world.open(S, uuid.UUID(int=98))


async def test_move_takes_volumes_along_and_waits_for_the_old_owner(world: World) -> None:
    await world.attest(S)
    epoch = await world.initialised()
    volume = await world.volume()
    await world.books.move(D, "o", unseen=True)
    assert await world.state() == "waiting"
    for call in (
        world.advance(epoch, change(1, 2)),
        world.devices.check(S, device_id=D, fencing_epoch=epoch),
        world.open(),
    ):
        await refused(VerificationError, "device.owner.refused", call)
    moved = (await world.registry.volume(volume.volume_id)).record
    assert (moved.target_node, moved.device_id) == ("o", D)
    assert (await world.volume()).device_id is None
    assert len(world.covered) == 2
    # Until the old owner must have stopped or reports that it has.
    world.now += FENCE - dt.timedelta(seconds=1)
    await refused(UnavailableError, "device.busy", world.open(OTHER))
    await world.books.move(D, "o", unseen=True)
    world.now += dt.timedelta(seconds=1)
    state = await world.open(OTHER)
    assert not state.is_initial
    assert state.fencing_epoch > epoch


async def test_moved_device_is_free_once_its_old_owner_says_so(world: World) -> None:
    epoch = await world.initialised()
    await world.books.move(D, "o", unseen=True)
    await world.devices.close(S_AGAIN, device_id=D, fencing_epoch=epoch)
    await refused(UnavailableError, "device.busy", world.open(OTHER))
    await world.devices.close(S, device_id=D, fencing_epoch=epoch)
    await world.open(OTHER)


async def test_wait_for_an_owner_is_not_shortened_by_a_second_move(world: World) -> None:
    await world.initialised()
    await world.books.move(D, "o", unseen=True)
    await world.books.move(D, "s", unseen=True)
    await refused(UnavailableError, "device.busy", world.open(S_AGAIN))


async def test_device_goes_to_a_node_that_has_attested(world: World) -> None:
    await world.initialised()
    await refused(UsageError, "node.not_found", world.books.move(D, "o"))
    assert (await world.books.details(D))[0].owner == "s"


async def test_opening_that_a_move_ended_stays_over_when_the_device_comes_back(
    world: World,
) -> None:
    epoch = await world.initialised()
    await world.books.move(D, "o", unseen=True)
    await world.books.move(D, "s", unseen=True)
    call = world.devices.check(S, device_id=D, fencing_epoch=epoch)
    await refused(VerificationError, "device.moved", call)


async def test_device_that_was_closed_moves_without_waiting(world: World) -> None:
    epoch = await world.initialised()
    await world.devices.close(S, device_id=D, fencing_epoch=epoch)
    assert await world.state() == "closed"
    await world.books.move(D, "o", unseen=True)
    await world.open(OTHER)
    assert await world.state() == "open"


async def test_anchor_of_a_machine_does_not_move_with_the_device(world: World) -> None:
    epoch = await world.initialised(anchor="file")
    await world.devices.close(S, device_id=D, fencing_epoch=epoch)
    assert not (await world.open(anchor="file")).is_initial
    await world.books.move(D, "o", unseen=True)
    world.now += FENCE
    assert (await world.open(OTHER, anchor="file")).is_initial


async def test_operator_may_have_a_device_believed_anew(world: World) -> None:
    epoch = await world.initialised()
    await world.books.believe_anew(D)
    await refused(VerificationError, "device.fenced", world.advance(epoch, change(1, 2)))
    state = await world.open(S_AGAIN, anchor="file", found=())
    assert state.is_initial
    assert not state.records


async def test_wait_for_an_owner_is_not_shortened_by_believing_anew(world: World) -> None:
    await world.initialised()
    await world.books.move(D, "o", unseen=True)
    await world.books.believe_anew(D)
    await refused(UnavailableError, "device.busy", world.open(OTHER))
    world.now += FENCE
    assert (await world.open(OTHER)).is_initial


async def test_forgetting_that_was_interrupted_can_be_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise UnavailableError("broker.store.timeout", "no answer")

    await world.attest(S)
    epoch = await world.initialised()
    await world.advance(epoch, change(1, 2))
    with monkeypatch.context() as broken:
        broken.setattr(device_books, "drop_anchor", fail)
        await refused(UnavailableError, "broker.store.timeout", world.books.forget(D))
    assert await world.registry.anchors.page(limit=1) != ([], False)
    await world.books.forget(D)
    assert await world.registry.anchors.page(limit=1) == ([], False)
    await refused(UsageError, "device.not_found", world.books.forget(D))


async def test_forgotten_device_is_refused_and_its_secret_gone(world: World) -> None:
    await world.attest(S)
    epoch = await world.initialised()
    volume = await world.volume()
    await refused(UsageError, "device.volumes.state", world.books.forget(D))
    await world.registry.unregister(volume.volume_id)
    await world.books.forget(D)
    await refused(VerificationError, "device.forgotten", world.open())
    await refused(VerificationError, "device.forgotten", world.advance(epoch, change(1, 2)))
    stored = await world.registry.devices.get(str(D))
    assert stored is not None
    assert stored.record.wrapped_secret == b""
    assert await world.registry.anchors.page(limit=1) == ([], False)
    for call in (
        world.books.details(D),
        world.books.move(D, "o", unseen=True),
        world.books.believe_anew(D),
    ):
        await refused(UsageError, "device.not_found", call)


@pytest.mark.parametrize("node", ["", "S", "-", "a" * 64])
async def test_what_cannot_be_a_node_gets_no_device(world: World, node: str) -> None:
    await world.initialised()
    for call in (world.books.move(D, node, unseen=True), world.books.authorize_next(node)):
        await refused(UsageError, "node.malformed", call)


async def test_requests_are_bounded(world: World) -> None:
    await refused(UsageError, "device.request", world.open(anchor="Broker"))
    await refused(UsageError, "device.request", world.open(found=[b""] * (FOUND_MAX + 1)))


async def test_books_are_paged_with_those_who_ask_behind(world: World) -> None:
    for number in range(3):
        await world.open(S, uuid.UUID(int=number))
    await world.books.authorize_next("n")
    found, token = [], ""
    while True:
        page, token = await world.books.entries(page_size=2, page_token=token)
        assert len(page) <= 2
        found += [(each.owner, each.state) for each in page]
        if not token:
            break
    assert found == [("s", "new")] * 3 + [("n", "authorized")]


async def test_no_record_of_the_audit_log_has_a_secret(world: World) -> None:
    epoch = await world.initialised()
    await world.devices.close(S, device_id=D, fencing_epoch=epoch)
    await world.books.move(D, "o", unseen=True)
    await world.open(OTHER)
    await world.books.believe_anew(D)
    stored = await world.registry.devices.get(str(D))
    assert stored is not None
    secret = world.registry.device_secret(stored.record)
    kinds = [record["kind"] for record in world.audit.records]
    assert kinds == ["device.open", "device.move", "device.open", "device.init"]
    text = repr(world.audit.records)
    for form in (repr(bytes(secret)), secret.hex(), repr(stored.record.wrapped_secret)):
        assert form[2:-1] not in text


async def test_a_take_over_is_recorded_of_who_serves_the_device(world: World) -> None:
    taken = TakeOver(
        tenant="acme",
        group=bytes(GROUP_BYTES),
        host_nqn="nqn.h",
        fenced="nqn.g",
        term=7,
        cause=TakeOverCause.OPERATOR,
        accepts_loss=True,
    )

    def report(epoch: int, **changed: object) -> Awaitable[None]:
        return world.devices.record_take_over(
            S,
            device_id=D,
            fencing_epoch=epoch,
            volume_id=D,
            take_over=replace(taken, **changed),  # type: ignore[arg-type]
        )

    epoch = await world.initialised()
    await report(epoch)
    record = world.audit.records[-1]
    assert (record["kind"], record["subject"]) == ("device.take_over", S.spiffe_id)
    assert (record["gateway"], record["fenced"], record["term"]) == ("nqn.h", "nqn.g", 7)
    assert (record["tenant"], record["cause"], record["accepts_loss"]) == ("acme", "operator", True)
    await refused(UsageError, "device.request", report(epoch, group=b"short"))
    await refused(UsageError, "device.request", report(epoch, host_nqn="n" * 224))
    await refused(UsageError, "device.request", report(epoch, fenced="n" * 224))
    await refused(UsageError, "device.request", report(epoch, tenant="a\nb"))
    await world.open(S_AGAIN)
    before = len(world.audit.records)
    await refused(VerificationError, "device.fenced", report(epoch))
    assert len(world.audit.records) == before


async def test_what_a_job_found_is_recorded_of_who_serves_the_device(world: World) -> None:
    def findings(*reasons: str) -> Findings:
        return Findings(volume_id=D, job="scrub", found=3, repaired=1, reasons=reasons)

    def report(epoch: int, *reasons: str) -> Awaitable[None]:
        return world.devices.record_findings(
            S, device_id=D, fencing_epoch=epoch, findings=findings(*reasons)
        )

    epoch = await world.initialised()
    await report(epoch, "sector.stale", "store.damaged")
    record = world.audit.records[-1]
    assert (record["kind"], record["subject"]) == ("device.findings", S.spiffe_id)
    assert (record["found"], record["repaired"]) == (3, 1)
    assert record["reasons"] == ["sector.stale", "store.damaged"]
    many = [str(number) for number in range(REASONS_MAX + 1)]
    await refused(UsageError, "device.request", report(epoch, *many))
    await refused(UsageError, "device.request", report(epoch, "r" * (REASON_MAX + 1)))
    await world.open(S_AGAIN)
    before = len(world.audit.records)
    await refused(VerificationError, "device.fenced", report(epoch, "sector.stale"))
    assert len(world.audit.records) == before
