"""A gateway's place in a fail-over group: what it refuses, and what it drops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from sealane.crypto.queue import GroupClaim
from sealane.daemon.gateway import back_ends
from sealane.daemon.gateway.attachments import AttachmentFiles, SealedAttachment
from sealane.daemon.gateway.back_end import AssociationEpochs, BackEnd, QueueName
from sealane.daemon.gateway.back_ends import Via, VolumeBackEnds
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.grants import QueueGrant
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.unflushed import Unflushed
from sealane.daemon.gateway.volumes import VolumeService
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2, storage_pb2

OWN = "nqn.g"


def member(*, serves: str = "nqn.h", term: int = 3) -> GroupMember:
    made = GroupMember(volume_id=uuid4(), host_nqn="nqn.host")
    made.observe(term=term, serving_nqn=serves, own_nqn=OWN)
    return made


def ends(made: VolumeBackEnds, descriptor: broker_pb2.VolumeDescriptor) -> Any:
    return made.open(descriptor, via=Via(), member=member())


def test_it_claims_the_next_term_and_then_its_own() -> None:
    made = member()
    assert (made.state, made.claim().is_take_over, made.claim().term) == ("standby", True, 3)
    made.serve(made.claim(), incarnation=7)
    assert (made.state, made.claim().is_take_over, made.claim().term) == ("active", False, 4)
    made.stand_by()
    assert made.state == "standby"


def test_each_tenant_has_groups_of_its_own() -> None:
    volume_id = uuid4()
    one, same = (GroupMember(volume_id=volume_id, host_nqn="nqn.host") for _ in range(2))
    other = GroupMember(volume_id=volume_id, host_nqn="nqn.other")
    assert one.group_of("acme") == same.group_of("acme")
    assert one.group_of("acme") not in {one.group_of("umbrella"), other.group_of("acme")}


def test_what_it_acknowledged_last_counts_unless_another_gateway_served_since() -> None:
    own, other = member(serves=OWN), member(serves="nqn.h")
    for each in (own, other):
        each.holder = 9
    assert (own.claim().incarnation, other.claim().incarnation) == (9, 0)


async def test_a_third_party_has_no_fail_over() -> None:
    none = cast("Any", None)
    made = VolumeBackEnds(none, identity=none, broker=none, devices=none, third_parties=none)
    with pytest.raises(UsageError, match=r"volume\.fail_over\.place"):
        await ends(made, broker_pb2.VolumeDescriptor(third_party="x"))


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_target_that_can_not_fence_is_refused(
    monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    class Stub:
        def __init__(self, channel: object) -> None:
            """Take the channel, and don't use it."""

        async def GetNamespace(  # noqa: N802 - the method's name
            self, *_: object, **__: object
        ) -> storage_pb2.Namespace:
            return storage_pb2.Namespace(fail_over=is_known)

    @contextlib.asynccontextmanager
    async def channel(self: object, node: str) -> AsyncIterator[None]:
        yield None

    monkeypatch.setattr(back_ends.storage_pb2_grpc, "StorageStub", Stub)
    monkeypatch.setattr(Targets, "channel", channel)
    none = cast("Any", None)
    made = VolumeBackEnds(
        Targets({}, identity=none), identity=none, broker=none, devices=none, third_parties=none
    )
    refused = (
        contextlib.nullcontext()
        if is_known
        else pytest.raises(UsageError, match=r"volume\.fail_over\.target")
    )
    with refused:
        await ends(made, broker_pb2.VolumeDescriptor(volume_id=str(uuid4())))


class Native:
    """An engine's volume that records what is lost."""

    milestone = b""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def lose_association(self, detail: str) -> None:
        self.lost.append(detail)


class Bench:
    """A back end whose target answers every queue with an error."""

    def __init__(self, made: GroupMember) -> None:
        self.claims: list[GroupClaim] = []
        self.native = Native()
        self.back_end = BackEnd(
            native=cast("Any", self.native),
            volume_id=bytes(16),
            open_queue=self.refuse,
            epochs=AssociationEpochs(),
            report=lambda _: None,
            member=made,
        )
        self.made = made

    async def refuse(self, *_: object) -> QueueGrant:
        self.claims.append(self.made.claim())
        raise VerificationError("queue.standby", "another gateway serves")


async def no_queues() -> None:
    """End nothing."""


async def test_a_fenced_gateway_never_takes_over_with_what_it_holds() -> None:
    bench = Bench(member())
    bench.made.serve(bench.made.claim(), incarnation=7)
    bench.back_end.member = bench.made
    bench.back_end.lose("cut off")
    bench.back_end._is_alive.set()
    with pytest.raises(VerificationError):
        await bench.back_end.prepare(QueueName(association_id=1, queue_id=1))
    assert bench.back_end.is_fenced
    assert bench.native.lost
    count = len(bench.claims)
    with pytest.raises(Error, match=r"queue\.standby"):
        await bench.back_end.take_over(no_queues, accepts_loss=False)
    assert len(bench.claims) == count, "it asked the target"
    await bench.back_end.close()


async def test_a_connecting_host_takes_over_only_in_the_term_that_was_vacant() -> None:
    made = member(serves="", term=3)
    bench = Bench(made)
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1

    made.look = look
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        await bench.back_end.stand_ready(no_queues)
    assert (looks, [each.term for each in bench.claims]) == (1, [3])
    made.observe(term=4, serving_nqn="nqn.h", own_nqn=OWN)
    await bench.back_end.stand_ready(no_queues)
    assert len(bench.claims) == 1, "it fenced a serving gateway"
    await bench.back_end.close()


async def test_a_queue_that_starts_during_a_take_over_is_ended_and_not_handed_over() -> None:
    made = member(serves="")
    bench = Bench(made)
    ended = asyncio.Event()

    async def look() -> None:
        """Leave what was observed."""

    async def end_queues() -> None:
        ended.set()

    async def connect(_: QueueName) -> Any:
        bench.back_end.join(QueueName(association_id=1, queue_id=2))
        made.serve(made.claim(), incarnation=7)
        raise VerificationError("association.lost", "no data path here")

    made.look = look
    bench.back_end._connect = connect  # type: ignore[method-assign]
    with pytest.raises(Error, match=r"association\.lost"):
        await bench.back_end.stand_ready(end_queues)
    assert not bench.back_end._queues
    await asyncio.wait_for(ended.wait(), 1)
    await bench.back_end.close()


async def test_a_confirmation_says_what_the_target_has_in_the_same_term() -> None:
    made = member()
    made.serve(made.claim(), incarnation=7)
    assert made.claim().incarnation == 0, "its journal may not be empty"
    made.is_confirming, made.holder = True, 8
    claim = made.claim()
    assert (claim.is_take_over, claim.term, claim.incarnation) == (False, 4, 8)
    made.serve(claim, incarnation=9)
    assert (made.confirmed, made.claim().term) == (7, 4), "the target has restarted since"
    made.serve(claim, incarnation=8)
    assert made.confirmed == 8


async def test_commands_from_before_a_take_over_are_never_carried_out() -> None:
    bench = Bench(member())
    bench.back_end.join(QueueName(association_id=1, queue_id=1))
    with pytest.raises(Error, match=r"earlier term"):
        await bench.back_end.take_over(no_queues, accepts_loss=False)
    assert not bench.claims, "it asked the target"
    await bench.back_end.close()


@dataclass
class Fenced:
    """A gateway's volume service with one fenced volume, whose file can't be written."""

    fails: Error

    def __post_init__(self) -> None:
        self.returned: list[SealedAttachment] = []
        self.ended = 0
        self.kept = SealedAttachment(volume_id="v", key_epoch=1, sealed=b"", target_incarnation=9)
        self.service: Any = object.__new__(VolumeService)
        self.service._changing = set()
        self.service._gateway = SimpleNamespace(expect=lambda _: None)
        self.service._returning = SimpleNamespace(start=self.returned.extend)
        self.service._end_export = self.end
        self.attached: Any = SimpleNamespace(
            unflushed=SimpleNamespace(kept=self.kept, fence=self.fence)
        )
        self.service._attached = {"v": self.attached}

    async def end(self, *_: object) -> None:
        self.ended += 1

    async def fence(self) -> None:
        raise self.fails


async def test_a_fenced_volume_stands_by_even_if_its_file_can_not_be_written() -> None:
    fenced = Fenced(UnavailableError("attachment.file", "disk full"))
    await fenced.service._stand_by("v", fenced.attached)
    assert fenced.ended == 1
    assert [each.target_incarnation for each in fenced.returned] == [0]


async def test_a_fenced_volume_that_is_being_changed_stands_by_later() -> None:
    fenced = Fenced(UnavailableError("attachment.file", "disk full"))
    with fenced.service._change("v"):
        await fenced.service._stand_by("v", fenced.attached)
    assert fenced.service._attached
    fenced.service._attached = {"v": object()}
    await fenced.service._stand_by("v", fenced.attached)
    assert (fenced.ended, fenced.returned) == (0, [])


@pytest.mark.parametrize(
    ("serves", "loss", "is_refused"),
    [(OWN, False, True), (OWN, True, False), ("nqn.h", False, False), ("", False, False)],
)
async def test_writes_of_an_ended_target_count_unless_they_are_durable_or_given_up(
    tmp_path: Path, serves: str, loss: bool, is_refused: bool
) -> None:
    made = member(serves=serves)
    made.accepts_loss = loss
    files = AttachmentFiles(tmp_path / "s", tmp_path / "r")
    for each in (tmp_path / "s", tmp_path / "r"):
        each.mkdir()
    await files.load()

    async def open_queue(*_: object) -> QueueGrant:
        return cast("Any", SimpleNamespace(target_incarnation=7))

    kept = SealedAttachment(volume_id=str(uuid4()), key_epoch=1, sealed=b"x", target_incarnation=9)
    unflushed = Unflushed(open_queue, files=files, kept=kept, member=made)
    if is_refused:
        with pytest.raises(VerificationError, match=r"volume\.unflushed_lost"):
            await unflushed(1, 1)
    else:
        await unflushed(1, 1)
        assert unflushed.kept.target_incarnation == 7
