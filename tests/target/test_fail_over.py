"""Fail-over groups at the target: who may take over, when, and what a restart keeps."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from sealane.crypto.queue import GroupClaim
from sealane.daemon.target.fail_over import (
    GROUPS_MAX,
    TAKE_OVER_SECONDS_MIN,
    FailOver,
    kept_with,
)
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, ProtocolError, UnavailableError, VerificationError
from sealane.protocol.v1 import broker_pb2, storage_pb2

GROUP = bytes(32)
ACME = ("acme", GROUP)
OTHER = ("other", GROUP)
SHARED: dict[str, Any] = {"tenant": "acme", "group": GROUP}


@dataclass
class Volume:
    """A volume that records what a take-over does to it."""

    steps: list[str] = field(default_factory=list)
    reported: list[TakeOver] = field(default_factory=list)
    kept: storage_pb2.FailOverGroups = field(default_factory=storage_pb2.FailOverGroups)
    users: set[str] = field(default_factory=set)
    failing: str = ""
    failure: Exception = field(
        default_factory=lambda: UnavailableError("anchor.timeout", "not anchored")
    )
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def has_queues(self, host_nqn: str) -> bool:
        return host_nqn in self.users

    async def step(self, name: str, detail: str = "") -> None:
        await self.gate.wait()
        if name == self.failing:
            raise self.failure
        self.steps.append(f"{name} {detail}".strip())

    async def fence(self, host_nqn: str) -> None:
        await self.step("fence", host_nqn)

    async def flush(self) -> None:
        await self.step("flush")

    def report(self, take_over: TakeOver) -> None:
        self.reported.append(take_over)

    async def keep(self, groups: storage_pb2.FailOverGroups) -> None:
        await self.step("keep")
        self.kept = groups


@dataclass
class Bench:
    """A volume's groups, with a clock that stands still."""

    volume: Volume = field(default_factory=Volume)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.fail_over = FailOver(self.volume, now=lambda: self.seconds)

    async def take(
        self,
        gateway: str,
        *,
        term: int | None = None,
        loss: bool = False,
        by_operator: bool = False,
    ) -> int:
        """Take over, as a gateway that has looked, and get a queue."""
        term = self.fail_over.state(ACME)[0] if term is None else term
        claim = GroupClaim(
            group=GROUP,
            term=term,
            is_take_over=True,
            accepts_loss=loss,
            by_operator=by_operator,
        )
        taken = await self.fail_over.take_over(ACME, gateway, claim)
        self.fail_over.require(ACME, gateway, taken)
        return taken

    def restart(self) -> None:
        self.fail_over = FailOver(self.volume, now=lambda: self.seconds)
        self.fail_over.restore(self.volume.kept)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_the_last_gateway_is_fenced_then_the_store_flushed_then_the_term_kept(
    bench: Bench,
) -> None:
    first = await bench.take("g")
    assert bench.volume.steps == ["keep"], "nobody served before"
    bench.volume.steps.clear()
    assert await bench.take("h") == first + 1
    assert bench.volume.steps == ["fence g", "flush", "keep"]
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        bench.fail_over.require(ACME, "g", first)
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        bench.fail_over.require(ACME, "h", first)
    assert bench.fail_over.statistics() == {"take_overs": 2, "standby_refusals": 2}


async def test_who_took_over_from_whom_and_why_is_reported_once_it_is_kept(bench: Bench) -> None:
    first = await bench.take("g")
    await bench.take("g")
    assert bench.volume.reported == [], "nobody was fenced"
    bench.volume.failing = "keep"
    with pytest.raises(Error, match=r"anchor"):
        await bench.take("h", by_operator=True)
    assert bench.volume.reported == []
    bench.volume.failing = ""
    taken = await bench.take("h", by_operator=True)
    await bench.take("h")
    with pytest.raises(UnavailableError, match=r"queue\.take_over\.early"):
        await bench.take("g")
    bench.seconds += TAKE_OVER_SECONDS_MIN
    last = await bench.take("g")
    assert first < taken < last
    assert bench.volume.reported == [
        TakeOver(
            **SHARED, host_nqn="h", fenced="g", term=taken, cause="operator", accepts_loss=False
        ),
        TakeOver(**SHARED, host_nqn="g", fenced="h", term=last, cause="host", accepts_loss=False),
    ]


async def test_each_accepted_loss_is_reported_once_it_is_kept(bench: Bench) -> None:
    with capture_logs() as logs:
        first = await bench.take("g", loss=True)
        own = await bench.take("g", loss=True)
    assert [line["accepts_loss"] for line in logs if line["event"] == "fail_over"] == [True, True]
    bench.restart()
    bench.volume.failing = "keep"
    with pytest.raises(Error, match=r"anchor"):
        await bench.take("h", loss=True)
    bench.volume.failing = ""
    # Its host repeats what its operator began.
    taken = await bench.take("h")
    await bench.take("h")
    shared = {**SHARED, "cause": "host", "accepts_loss": True}
    assert bench.volume.reported == [
        TakeOver(**shared, host_nqn="g", fenced="", term=first),
        TakeOver(**shared, host_nqn="g", fenced="g", term=own),
        TakeOver(**shared, host_nqn="h", fenced="g", term=taken),
    ]


async def test_only_a_target_that_was_rolled_back_knows_no_term_as_late(bench: Bench) -> None:
    old = await bench.take("g")
    term = await bench.take("h")
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        bench.fail_over.require(ACME, "g", old)
    with pytest.raises(VerificationError, match=r"volume\.rolled_back"):
        bench.fail_over.require(ACME, "g", term + 1)
    with pytest.raises(VerificationError, match=r"volume\.rolled_back"):
        bench.fail_over.require(OTHER, "g", term + 1)
    # A restart may undo a term that a standby has seen, but in which nobody has served.
    with pytest.raises(VerificationError, match=r"is in term 2 \[queue\.take_over\.term\]"):
        await bench.take("g", term=term + 1)


async def test_a_claim_of_an_older_term_takes_nothing_over(bench: Bench) -> None:
    old = await bench.take("g")
    await bench.take("h")
    bench.seconds += TAKE_OVER_SECONDS_MIN
    bench.volume.steps.clear()
    with pytest.raises(VerificationError, match=r"queue\.take_over\.term"):
        await bench.take("g", term=old)
    assert bench.volume.steps == []


async def test_two_gateways_do_not_fence_each_other_at_once(bench: Bench) -> None:
    await bench.take("g")
    await bench.take("h")
    with pytest.raises(UnavailableError, match=r"queue\.take_over\.early"):
        await bench.take("g")
    await bench.take("h")  # the serving one, after a restart
    bench.seconds += TAKE_OVER_SECONDS_MIN
    await bench.take("g")


async def test_a_restarted_target_waits_for_the_gateway_with_the_journal(bench: Bench) -> None:
    term = await bench.take("g")
    bench.restart()
    with pytest.raises(UnavailableError, match=r"queue\.take_over\.unflushed"):
        await bench.take("h")
    # That it has a queue again doesn't mean that it has sent all of them again.
    bench.fail_over.require(ACME, "g", term)
    with pytest.raises(UnavailableError, match=r"queue\.take_over\.unflushed"):
        await bench.take("h")
    assert await bench.take("g") == term + 1, "a new process of it: it has no journal"
    assert await bench.take("h") == term + 2
    bench.restart()
    bench.seconds += TAKE_OVER_SECONDS_MIN
    assert await bench.take("g", loss=True) == term + 3


async def test_a_confirmation_changes_neither_name_nor_term_and_anchors_nothing(
    bench: Bench,
) -> None:
    term = await bench.take("g")
    bench.restart()
    bench.volume.steps.clear()
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        bench.fail_over.confirm(ACME, "h", term)
    bench.fail_over.confirm(ACME, "g", term)
    assert (bench.fail_over.state(ACME), bench.volume.steps) == ((term, "g"), [])
    assert await bench.take("h") == term + 1
    assert bench.volume.steps == ["fence g", "flush", "keep"]


async def test_no_term_of_a_new_process_begins_without_a_fence_and_a_flush(bench: Bench) -> None:
    term = await bench.take("g")
    bench.restart()
    bench.volume.steps.clear()
    bench.volume.failing = "keep"
    with pytest.raises(Error, match=r"anchor"):
        await bench.take("g")
    assert bench.volume.steps == ["fence g", "flush"]
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        bench.fail_over.require(ACME, "g", term)
    bench.volume.failing = ""
    await bench.take("h")


async def test_a_released_group_is_forgotten_and_its_term_never_comes_back(bench: Bench) -> None:
    term = await bench.take("g")
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        await bench.fail_over.release(ACME, "h", term)
    bench.restart()
    bench.volume.steps.clear()
    await bench.fail_over.release(ACME, "g", term)
    assert bench.volume.steps == ["fence g", "flush", "keep"]
    assert not bench.volume.kept.groups
    bench.restart()
    with pytest.raises(VerificationError, match=r"queue\.standby"):
        bench.fail_over.require(ACME, "g", term)
    assert bench.fail_over.state(ACME) == (term, "")
    assert await bench.take("h") == term + 1


async def test_each_group_counts_its_own_terms(bench: Bench) -> None:
    first = await bench.take("g")
    claim = GroupClaim(group=GROUP, term=bench.fail_over.state(OTHER)[0], is_take_over=True)
    await bench.fail_over.take_over(OTHER, "x", claim)
    # Its gateway counts on: it is not told the term.
    assert await bench.take("h") == first + 1


async def test_a_repeated_take_over_joins_the_one_in_progress(bench: Bench) -> None:
    term = await bench.take("g")
    bench.volume.gate.clear()
    taking = [asyncio.ensure_future(bench.take("h")) for _ in range(50)]
    await asyncio.sleep(0.01)
    for each in taking[1:]:
        each.cancel()
    await asyncio.gather(*taking[1:], return_exceptions=True)
    assert len(bench.fail_over._tasks._tasks) == 1
    with pytest.raises(UnavailableError, match=r"queue\.take_over\.pending"):
        await asyncio.wait_for(bench.take("h", loss=True), 1)
    bench.volume.gate.set()
    assert await taking[0] == term + 1


async def test_another_tenants_take_over_waits_for_nobody(bench: Bench) -> None:
    await bench.take("g")
    bench.volume.gate.clear()
    taking = asyncio.ensure_future(bench.take("h"))
    await asyncio.sleep(0.01)
    bench.volume.gate, held = asyncio.Event(), bench.volume.gate
    bench.volume.gate.set()
    claim = GroupClaim(group=GROUP, term=bench.fail_over.state(OTHER)[0], is_take_over=True)
    async with asyncio.timeout(1):
        await bench.fail_over.take_over(OTHER, "x", claim)
    held.set()
    await taking
    assert {each.host_nqn for each in bench.volume.kept.groups} == {"h", "x"}


async def test_a_take_over_that_fails_unexpectedly_answers(bench: Bench) -> None:
    bench.volume.failing = "keep"
    bench.volume.failure = OSError("unexpected")
    async with asyncio.timeout(1):
        with pytest.raises(OSError, match="unexpected"):
            await bench.take("g")


async def test_nobody_is_admitted_during_a_take_over(bench: Bench) -> None:
    term = await bench.take("g")
    bench.volume.gate.clear()
    taking = asyncio.ensure_future(bench.take("h"))
    await asyncio.sleep(0.01)
    with pytest.raises(UnavailableError, match=r"queue\.take_over\.pending"):
        bench.fail_over.require(ACME, "g", term)
    bench.volume.gate.set()
    await taking


async def test_a_failed_flush_leaves_the_last_gateway_in_its_place(bench: Bench) -> None:
    term = await bench.take("g")
    bench.volume.failing = "flush"
    with pytest.raises(Error):
        await bench.take("h")
    bench.fail_over.require(ACME, "g", term)


async def test_nobody_serves_while_it_is_unknown_what_is_anchored(bench: Bench) -> None:
    term = await bench.take("g")
    bench.volume.failing = "keep"
    with pytest.raises(Error):
        await bench.take("h")
    for gateway in ("g", "h"):
        with pytest.raises(VerificationError, match=r"queue\.standby"):
            bench.fail_over.require(ACME, gateway, term)
    bench.volume.failing = ""
    await bench.take("h")


async def test_a_take_over_ends_even_if_its_caller_is_gone(bench: Bench) -> None:
    await bench.take("g")
    bench.volume.gate.clear()
    taking = asyncio.ensure_future(bench.take("h"))
    await asyncio.sleep(0.01)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    bench.volume.gate.set()
    await asyncio.sleep(0.01)
    assert bench.fail_over.state(ACME)[1] == "h"


async def test_another_tenant_has_groups_of_its_own(bench: Bench) -> None:
    term = await bench.take("g")
    claim = GroupClaim(group=GROUP, term=bench.fail_over.state(OTHER)[0], is_take_over=True)
    await bench.fail_over.take_over(OTHER, "x", claim)
    assert "fence g" not in bench.volume.steps
    bench.fail_over.require(ACME, "g", term)


async def test_unused_groups_make_room_and_used_ones_do_not(bench: Bench) -> None:
    def key(number: int) -> tuple[str, bytes]:
        return "acme", bytes([number]) * 32

    async def take(number: int, *, loss: bool = False) -> None:
        term = bench.fail_over.state(key(number))[0]
        claim = GroupClaim(group=key(number)[1], term=term, is_take_over=True, accepts_loss=loss)
        taken = await bench.fail_over.take_over(key(number), f"g{number}", claim)
        bench.fail_over.require(key(number), f"g{number}", taken)
        bench.volume.users.add(f"g{number}")

    for number in range(GROUPS_MAX):
        await take(number)
    with pytest.raises(UnavailableError, match=r"queue\.group\.limit"):
        await take(GROUPS_MAX)
    bench.volume.users.remove("g3")
    await take(GROUPS_MAX)
    assert "fence g3" in bench.volume.steps
    assert len(bench.volume.kept.groups) == GROUPS_MAX
    # What a restarted target knows of is forgotten only with an operator's consent.
    bench.restart()
    bench.volume.users.clear()
    with pytest.raises(UnavailableError, match=r"queue\.group\.limit"):
        await take(3)
    assert bench.volume.reported == []
    ended = bench.fail_over.state(key(0))[0]
    await take(3, loss=True)
    assert "fence g0" in bench.volume.steps
    forgotten, taken = bench.volume.reported
    assert forgotten == TakeOver(
        tenant="acme",
        group=key(0)[1],
        host_nqn="",
        fenced="g0",
        term=ended,
        cause="host",
        accepts_loss=True,
    )
    assert taken.group == key(3)[1]


def test_groups_lie_in_the_descriptors_file_beside_what_older_versions_read() -> None:
    signed = broker_pb2.SignedVolumeDescriptor(descriptor=b"d", signature=b"s")
    groups = storage_pb2.FailOverGroups(
        groups=[storage_pb2.FailOverGroup(tenant="t", group=GROUP, host_nqn="g", term=3)],
        newest_term=4,
    )
    content = kept_with(signed.SerializeToString(), groups)
    read = broker_pb2.SignedVolumeDescriptor.FromString(content)
    assert (read.descriptor, read.signature) == (b"d", b"s")
    found = storage_pb2.FailOverGroups.FromString(content)
    assert (found.groups, found.newest_term) == (groups.groups, 4)


@pytest.mark.parametrize("group", [b"", bytes(31), bytes(33)])
def test_a_group_of_the_wrong_length_is_refused(bench: Bench, group: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"queue\.group\.malformed"):
        GroupClaim(group=group, term=0)
    forged = storage_pb2.FailOverGroups(groups=[storage_pb2.FailOverGroup(group=group)])
    with pytest.raises(VerificationError, match=r"volume\.descriptor\.malformed"):
        bench.fail_over.restore(forged)
