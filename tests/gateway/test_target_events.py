"""Events of targets: they are followed to the target that a volume's device has moved to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway import target_events as module
from sealane.daemon.gateway.target_events import TargetEvents
from sealane.daemon.gateway.targets import Place, Targets
from sealane.daemon.volume.events import Event, EventLog
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import storage_pb2

VOLUME = "v"
NOT_FOUND = UsageError("namespace.not_found", "there is no such volume here")


class Silence(Exception):  # noqa: N818 - an answer that never comes
    """The target doesn't answer."""


class Stream:
    """A target's stream: its messages, then silence."""

    def __init__(self, answer: list[str] | Exception) -> None:
        self._answer = answer
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[storage_pb2.VolumeEvent]:
        if isinstance(self._answer, Silence):
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        for kind in self._answer:
            yield storage_pb2.VolumeEvent(kind=kind)
        await asyncio.Event().wait()

    async def initial_metadata(self) -> tuple[()]:
        if isinstance(self._answer, Silence):
            await asyncio.Event().wait()
        return ()

    def done(self) -> bool:
        return isinstance(self._answer, Exception)

    def cancel(self) -> None:
        self.is_cancelled = True


class Fleet:
    """Targets by node: what each reports, or its refusal."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | Exception] = {}
        self.opened: list[tuple[str, Stream]] = []
        self.renewed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def stream(self, node: str) -> AsyncIterator[tuple[str, asyncio.Future[None]]]:
        renewed = asyncio.ensure_future(self._renewed())
        try:
            yield node, renewed
        finally:
            renewed.cancel()

    async def _renewed(self) -> None:
        await self.renewed.wait()


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


AWAY = UnavailableError("peer.unreachable", "connection refused")
OPENING = UnavailableError("namespace.opening", "the target is still opening its volumes")


@contextlib.asynccontextmanager
async def many_followed(fleet: Fleet, places: Sequence[Place]) -> AsyncIterator[None]:
    log = EventLog("g")
    following = TargetEvents(cast("Targets", cast("Any", fleet)), log)
    for number, place in enumerate(places):
        following.follow(str(number), place)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield
    finally:
        await following.close()


@pytest.mark.parametrize("refusal", [AWAY, Silence()])
async def test_a_target_that_serves_nobody_is_asked_for_few_volumes_at_a_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", PATIENCE_SECONDS)
    fleet.answers = {"a": refusal, "b": ["first"]}
    places = [Place("a") for _ in range(100)] + [Place("b") for _ in range(100)]
    async with many_followed(fleet, places):
        while [node for node, _ in fleet.opened].count("b") < 100:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        asked = [node for node, _ in fleet.opened].count("a")
        assert asked == module._ASKED_AT_ONCE
        # Volumes that move away don't wait for the target's answer.
        for place in places[:100]:
            place.move("b")
        while [node for node, _ in fleet.opened].count("b") < 200:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        assert [node for node, _ in fleet.opened].count("a") == asked


async def test_one_volume_that_is_not_open_delays_no_other(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(module, "_LOST_RETRY_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(module, "_REFUSED_SECONDS", PATIENCE_SECONDS)
    fleet.answers = {"a": UnavailableError("store.open", "its drive is away")}
    async with many_followed(fleet, [Place("a") for _ in range(20)]):
        while len(fleet.opened) < 20:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)


async def test_calls_that_a_target_never_accepts_stop_no_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ACCEPT_SECONDS", 0.01)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.001)
    fleet.answers = {"a": Silence()}
    async with many_followed(fleet, [Place("a") for _ in range(20)]):
        while len(fleet.opened) < 20:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)
    open_ones = [stream for _, stream in fleet.opened if not stream.is_cancelled]
    assert not open_ones


async def test_calls_that_wait_for_a_target_end_when_the_certificate_is_renewed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ACCEPT_SECONDS", 2 * PATIENCE_SECONDS)
    fleet.answers = {"a": Silence()}
    async with many_followed(fleet, [Place("a") for _ in range(20)]):
        while len(fleet.opened) < module._ASKED_AT_ONCE:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        fleet.renewed.set()
        while len(fleet.opened) < 20:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)


async def test_a_volume_that_moves_away_while_it_waits_for_a_turn_is_followed_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", PATIENCE_SECONDS)
    fleet.answers = {"a": AWAY, "b": ["first"]}
    places = [Place("a") for _ in range(100)]
    async with many_followed(fleet, places):
        while len(fleet.opened) < module._ASKED_AT_ONCE:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        places[50].move("b")
        while fleet.opened[-1][0] != "b":  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)
        assert len(fleet.opened) == module._ASKED_AT_ONCE + 1
        # What has left the queue has taken no turn along.
        for place in places[:50]:
            place.move("b")
        while len(fleet.opened) < 2 * module._ASKED_AT_ONCE + 51:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
    assert [node for node, _ in fleet.opened].count("b") == 51


async def test_volumes_that_a_target_is_still_opening_delay_others_little_and_ask_seldom(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(module, "_REFUSED_SECONDS", 0.02)
    fleet.answers = {"a": OPENING}
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with many_followed(fleet, [Place("a") for _ in range(100)]):
        while len(fleet.opened) < 100:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)
    # 25 times the turns there are.
    assert loop.time() - began >= (100 / module._ASKED_AT_ONCE - 1) * 0.02 * 0.9
