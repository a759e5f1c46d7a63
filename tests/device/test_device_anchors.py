"""The records of a device: concurrent changes share a call, and none is sent twice."""

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from device.memory_anchor import MemoryAnchor
from sealane.daemon.device.anchors.anchor import (
    CATALOGUE,
    CHANGES_MAX,
    Anchored,
    volume_record,
)
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.errors import Error, UnavailableError, UsageError, VerificationError

A, B = (volume_record(UUID(int=n)) for n in (1, 2))


@pytest.fixture
def anchor() -> MemoryAnchor:
    return MemoryAnchor()


@pytest.fixture
async def anchors(anchor: MemoryAnchor) -> AsyncIterator[DeviceAnchors]:
    anchors = DeviceAnchors(anchor, timeout_seconds=5)
    yield anchors
    await anchors.close()
    assert anchor.is_closed


async def test_what_was_advanced_is_anchored_when_it_returns(
    anchor: MemoryAnchor, anchors: DeviceAnchors
) -> None:
    assert anchors.current(A) is None
    await anchors.advance(A, 3, b"one")
    assert anchor.records == {A: Anchored(number=3, blob=b"one")}
    assert anchors.current(A) == (3, b"one")
    await anchors.advance(A, 9, b"two")
    await anchors.forget(A)
    await anchors.forget(A)
    assert anchor.records == {}
    assert anchors.current(A) is None


async def test_what_is_told_during_a_call_goes_with_the_next_and_the_newest_stands_for_all(
    anchor: MemoryAnchor, anchors: DeviceAnchors
) -> None:
    held = await anchor.hold(anchors)
    told = [asyncio.ensure_future(anchors.advance(A, n, bytes([n]))) for n in range(1, 6)]
    told.append(asyncio.ensure_future(anchors.advance(B, 1, b"b")))
    await asyncio.sleep(0)
    assert anchors.current(A) is None
    anchor.open.set()
    await asyncio.gather(held, *told)
    assert [[c.name for c in call] for call in anchor.calls] == [[CATALOGUE], [A, B]]
    assert anchor.records[A] == Anchored(number=5, blob=b"\5")


async def test_no_call_carries_more_than_the_anchor_takes(
    anchor: MemoryAnchor, anchors: DeviceAnchors
) -> None:
    held = await anchor.hold(anchors)
    names = [volume_record(UUID(int=n)) for n in range(CHANGES_MAX + 1)]
    told = [asyncio.ensure_future(anchors.advance(name, 1, b"x")) for name in names]
    await asyncio.sleep(0)
    anchor.open.set()
    await asyncio.gather(held, *told)
    assert [len(call) for call in anchor.calls] == [1, CHANGES_MAX, 1]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_call_of_unknown_outcome_is_repeated_as_it_was(
    anchor: MemoryAnchor, anchors: DeviceAnchors, is_lost: bool
) -> None:
    anchor.loses_answers = is_lost
    anchor.errors = [UnavailableError("peer.unreachable", "gone")]
    await anchors.advance(A, 1, b"a")
    await anchors.advance(A, 2, b"b")
    assert anchor.calls[0] == anchor.calls[1]
    assert anchor.records == {A: Anchored(number=2, blob=b"b")}


async def test_wait_is_bounded_and_what_was_told_still_goes(anchor: MemoryAnchor) -> None:
    anchors = DeviceAnchors(anchor, timeout_seconds=0.05)
    anchor.open.clear()
    with pytest.raises(UnavailableError, match=r"anchor\.timeout"):
        await anchors.advance(A, 1, b"a")
    anchor.open.set()
    await anchors.advance(A, 2, b"b")
    assert anchor.records == {A: Anchored(number=2, blob=b"b")}
    await anchors.close()


async def test_numbers_grow_also_over_what_is_on_its_way(
    anchor: MemoryAnchor, anchors: DeviceAnchors
) -> None:
    held = await anchor.hold(anchors)
    for number in (0, 1):
        with pytest.raises(UsageError, match=r"anchor\.(order|range)"):
            await anchors.advance(CATALOGUE, number, b"x")
    anchor.open.set()
    await held
    with pytest.raises(UsageError, match=r"anchor\.order"):
        await anchors.advance(CATALOGUE, 1, b"x")


@pytest.mark.parametrize(
    "error",
    [VerificationError("device.fenced", "moved"), UnavailableError("anchor.failed", "broken")],
)
async def test_who_lost_the_device_is_told_once_and_anchors_nothing_more(
    anchor: MemoryAnchor, error: Error
) -> None:
    told: list[Error] = []
    anchors = DeviceAnchors(anchor, lost=told.append)
    anchor.errors = [error]
    for _ in range(2):
        with pytest.raises(type(error), match=error.reason):
            await anchors.advance(A, 1, b"a")
    with pytest.raises(type(error), match=error.reason):
        await anchors.forget(B)
    assert told == [error]
    assert len(anchor.calls) == 1
    await anchors.close()


async def test_anchor_that_wears_out_is_asked_seldom_but_at_once_where_it_matters(
    anchor: MemoryAnchor,
) -> None:
    anchors = DeviceAnchors(anchor, spacing_seconds=3600, timeout_seconds=5)
    for number in range(1, 50):
        await anchors.advance(A, number, b"a")
    assert anchor.calls == []
    await anchors.advance(CATALOGUE, 1, b"c", at_once=True)
    assert len(anchor.calls) == 1
    assert anchor.records[A].number == 49
    await anchors.advance(B, 1, b"b")
    await anchors.close()
    assert anchor.records[B].number == 1


async def test_close_ends_the_wait_for_an_anchor_that_does_not_answer(anchor: MemoryAnchor) -> None:
    anchors = DeviceAnchors(anchor, timeout_seconds=0.05)
    anchor.open.clear()
    waiting = asyncio.ensure_future(anchors.advance(A, 1, b"a"))
    await anchor.called.wait()
    await anchors.close()
    with pytest.raises(UnavailableError):
        await waiting
    assert anchor.is_closed


async def test_who_stops_waits_only_once_in_vain(anchor: MemoryAnchor) -> None:
    anchors = DeviceAnchors(anchor, timeout_seconds=0.05)
    anchor.open.clear()
    anchors.begin_end()
    for name, seconds in ((A, r"0\.05"), (B, "0"), (CATALOGUE, "0")):
        with pytest.raises(UnavailableError, match=rf"not updated within {seconds} s"):
            await anchors.advance(name, 1, b"a")
    await anchors.close()
