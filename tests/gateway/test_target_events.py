"""Events of targets: they are followed to the target that a volume's device has moved to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway import target_events as module
from sealane.daemon.gateway.target_events import TargetEvents
from sealane.daemon.gateway.targets import Place, Targets
from sealane.daemon.volume.events import Event, EventLog
from sealane.errors import UsageError
from sealane.protocol.v1 import storage_pb2

VOLUME = "v"
NOT_FOUND = UsageError("namespace.not_found", "there is no such volume here")


class Stream:
    """A target's stream: its messages, then silence."""

    def __init__(self, answer: list[str] | Exception) -> None:
        self._answer = answer
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[storage_pb2.VolumeEvent]:
        if isinstance(self._answer, Exception):
            raise self._answer
        for kind in self._answer:
            yield storage_pb2.VolumeEvent(kind=kind)
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


class Fleet:
    """Targets by node: what each reports, or its refusal."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | Exception] = {}
        self.opened: list[tuple[str, Stream]] = []

    @contextlib.asynccontextmanager
    async def stream(self, node: str) -> AsyncIterator[tuple[str, asyncio.Future[None]]]:
        yield node, asyncio.get_running_loop().create_future()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet()

    class Stub:
        def __init__(self, channel: str) -> None:
            self._node = channel

        def WatchEvents(self, _: object) -> Stream:  # noqa: N802 - the method's name
            made.opened.append((self._node, Stream(made.answers[self._node])))
            return made.opened[-1][1]

    monkeypatch.setattr(module.storage_pb2_grpc, "StorageStub", Stub)
    return made


@contextlib.asynccontextmanager
async def followed(fleet: Fleet, place: Place) -> AsyncIterator[AsyncIterator[Event]]:
    """Follow one volume, and yield what is published."""
    log = EventLog("g")
    following = TargetEvents(cast("Targets", cast("Any", fleet)), log)
    with log.subscribed(VOLUME) as events:
        following.follow(VOLUME, place)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                yield aiter(events)
        finally:
            await following.close()


async def test_events_come_from_the_new_target_while_the_old_one_is_silent(fleet: Fleet) -> None:
    fleet.answers = {"old": ["first"], "new": ["second"]}
    place = Place("old")
    async with followed(fleet, place) as events:
        assert (await anext(events)).kind == "first"
        place.move("new")
        assert (await anext(events)).kind == "second"
    assert [node for node, _ in fleet.opened] == ["old", "new"]
    assert all(stream.is_cancelled for _, stream in fleet.opened)


async def test_a_target_that_opens_the_volume_later_is_asked_again_and_reported_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOST_RETRY_SECONDS", 0.001)
    fleet.answers = {"new": NOT_FOUND}
    async with followed(fleet, Place("new")) as events:
        lost = await anext(events)
        assert (lost.kind, lost.reason) == ("lost_by_target", "namespace.not_found")
        while len(fleet.opened) < 4:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)
        fleet.answers = {"new": ["found"]}
        assert (await anext(events)).kind == "found"


async def test_a_volume_that_its_new_target_has_not_opened_yet_is_not_lost(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOST_RETRY_SECONDS", 0.001)
    fleet.answers = {"old": ["first"], "new": NOT_FOUND}
    place = Place("old")
    async with followed(fleet, place) as events:
        assert (await anext(events)).kind == "first"
        place.move("new")
        while len(fleet.opened) < 4:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)
        fleet.answers = {"new": ["found"]}
        assert (await anext(events)).kind == "found"


async def test_a_volume_that_did_not_arrive_with_its_device_is_lost_in_the_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(module, "_MOVED_SECONDS", 0.05)
    fleet.answers = {"old": ["first"], "new": NOT_FOUND}
    place = Place("old")
    async with followed(fleet, place) as events:
        assert (await anext(events)).kind == "first"
        place.move("new")
        assert (await anext(events)).kind == "lost_by_target"
        assert len(fleet.opened) > 2, "it was asked for only once"


async def test_a_volume_that_its_target_lost_is_followed_to_the_next(fleet: Fleet) -> None:
    fleet.answers = {"old": NOT_FOUND, "new": ["found"]}
    place = Place("old")
    async with followed(fleet, place) as events:
        assert (await anext(events)).kind == "lost_by_target"
        place.move("new")
        assert (await anext(events)).kind == "found"
    assert len(fleet.opened) == 2, "the lost volume isn't asked for without a pause"
