"""The targets of a gateway: the choice for a new volume, absences, and changes by a reload."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway import targets as module
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.node.target_view import TargetState
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.v1 import storage_pb2

GIB = 1 << 30


def status(free: int | None = GIB, **fields: Any) -> storage_pb2.TargetStatus:
    values = {"healthy": True, "volumes_max": 10, "capacity_bytes": 4 * GIB, **fields}
    return storage_pb2.TargetStatus(free_bytes=free, **values)


@dataclass
class Fleet:
    """Targets by node: what each answers, or how the call fails."""

    answers: dict[str, storage_pb2.TargetStatus | Exception | None] = field(default_factory=dict)
    """None: nothing, until `go_on` is set."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)
    reported: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)

    @contextlib.asynccontextmanager
    async def channel(self, address: str, node: str, role: str) -> AsyncIterator[str]:
        assert (address, role) == (f"{node}:1", "target")
        yield node

    async def report(self, is_well: bool) -> None:
        self.reported.put_nowait(is_well)

    def targets(self) -> Targets:
        return Targets(
            {node: f"{node}:1" for node in self.answers},
            identity=cast("Any", self),
            report=self.report,
        )


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet()

    class Stub:
        def __init__(self, channel: str) -> None:
            self.node = channel

        async def GetTarget(  # noqa: N802 - the method's name
            self, _: object, **__: object
        ) -> storage_pb2.TargetStatus:
            made.asked.append(self.node)
            answer = made.answers[self.node]
            if answer is None:
                await made.go_on.wait()
                return status()
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(module.storage_pb2_grpc, "StorageStub", Stub)
    return made


async def no_earlier_call() -> str:
    return ""


async def best(
    targets: Targets, size_bytes: int = GIB, earlier: Callable[[], Awaitable[str]] = no_earlier_call
) -> str:
    async with targets.chosen("", size_bytes=size_bytes, earlier=earlier) as node:
        return node


AWAY = UnavailableError("peer.unreachable", "connection refused")
OLD = UsageError("peer.unimplemented", "an earlier release")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"a": status(GIB), "b": status(2 * GIB)}, "b"),
        ({"a": status(2 * GIB), "b": status(GIB)}, "a"),
        # Of equals that with fewer volumes, then the first by name.
        ({"a": status(volumes=2), "b": status(volumes=1)}, "b"),
        ({"b": status(), "a": status()}, "a"),
        ({"a": status(9 * GIB, draining=True), "b": status()}, "b"),
        ({"a": status(9 * GIB, healthy=False), "b": status()}, "b"),
        ({"a": status(9 * GIB, volumes=10), "b": status()}, "b"),
        ({"a": AWAY, "b": status()}, "b"),
        ({"a": TimeoutError(), "b": status()}, "b"),
        # One that doesn't say comes before one that has too little room.
        ({"a": status(None), "b": status(2 * GIB)}, "b"),
        ({"a": status(GIB - 1), "b": status(None)}, "b"),
        ({"a": status(GIB - 1), "b": OLD}, "b"),
        ({"a": status(GIB - 2), "b": status(GIB - 1)}, "b"),
    ],
)
async def test_a_new_volume_gets_the_target_with_most_room_of_those_that_take_it(
    fleet: Fleet, answers: Mapping[str, storage_pb2.TargetStatus | Exception], expected: str
) -> None:
    fleet.answers = dict(answers)
    assert await best(fleet.targets()) == expected


async def test_a_volume_that_no_target_takes_is_refused_with_each_one_s_reason(
    fleet: Fleet,
) -> None:
    fleet.answers = {"a": AWAY, "b": status(draining=True), "c": status(volumes=10)}
    with pytest.raises(UnavailableError) as caught:
        await best(fleet.targets())
    assert caught.value.reason == "volume.target.none"
    for text in ("a: connection refused", "b: it is draining", "c: it has as many volumes"):
        assert text in str(caught.value)
    assert str(caught.value).count("[") == 1, "a reason id of its own only"


async def test_the_target_of_an_earlier_call_that_is_not_configured_is_said_to_be_that(
    fleet: Fleet,
) -> None:
    async def earlier() -> str:
        return "elsewhere"

    fleet.answers = {"a": AWAY, "b": AWAY}
    with pytest.raises(UsageError) as caught:
        await best(fleet.targets(), earlier=earlier)
    assert caught.value.reason == "volume.target.unknown"


async def test_the_target_of_an_earlier_call_counts_only_if_none_takes_a_volume(
    fleet: Fleet,
) -> None:
    async def earlier() -> str:
        return "b"

    fleet.answers = {"a": status(), "b": status(draining=True)}
    assert await best(fleet.targets(), earlier=earlier) == "a"
    fleet.answers["a"] = AWAY
    assert await best(fleet.targets(), earlier=earlier) == "b"


async def test_a_single_target_and_a_named_one_are_not_asked(fleet: Fleet) -> None:
    fleet.answers = {"a": AWAY}
    assert await best(fleet.targets()) == "a"
    fleet.answers = {"a": AWAY, "b": status()}
    async with fleet.targets().chosen("a", size_bytes=1, earlier=no_earlier_call) as node:
        assert node == "a"
    assert not fleet.asked
    with pytest.raises(UsageError, match="'c'; allowed: 'a', 'b'"):
        async with fleet.targets().chosen("c", size_bytes=1, earlier=no_earlier_call):
            pass


async def test_a_choice_does_not_wait_for_a_target_that_was_away_at_the_last_look(
    fleet: Fleet,
) -> None:
    fleet.answers = {"a": AWAY, "b": status()}
    made = fleet.targets()
    assert await best(made) == "b"
    fleet.asked.clear()
    assert await best(made) == "b"
    assert fleet.asked == ["b"]
    # If all were away, all are asked.
    fleet.answers["b"] = AWAY
    with pytest.raises(UnavailableError):
        await best(made)
    fleet.answers = {"a": status(), "b": status()}
    assert await best(made) == "a"


async def test_looks_report_what_is_away_until_it_is_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0)
    fleet.answers = {"a": AWAY, "b": status(healthy=False), "c": status(draining=True), "d": OLD}
    made = fleet.targets()
    assert {view.state for view in made.views()} == {TargetState.UNKNOWN}
    looking = asyncio.ensure_future(made.keep_looked_at())
    try:
        while TargetState.UNKNOWN in {view.state for view in made.views()}:
            assert not await fleet.reported.get()
        states = [str(view.state) for view in made.views()]
        assert states == ["away", "unhealthy", "draining", "good"]
        absence = made.absence("a")
        assert (absence and absence.reason, made.absence("b")) == ("peer.unreachable", None)
        figures = made.statistics()
        assert figures["a",] == {"is_away": 1, "is_unhealthy": 0, "is_draining": 0}
        assert (figures["b",]["is_unhealthy"], figures["c",]["is_draining"]) == (1, 1)
        assert figures["c",]["free_bytes"] == GIB
        fleet.answers |= {"a": status(), "b": status()}
        while not await fleet.reported.get():
            pass
        assert made.absence("a") is None
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


async def test_a_silent_target_delays_no_look_at_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0)
    monkeypatch.setattr(module, "ANSWER_SECONDS", PATIENCE_SECONDS)
    fleet.answers = {"a": None, "b": status()}
    made = fleet.targets()
    looking = asyncio.ensure_future(made.keep_looked_at())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while fleet.asked.count("b") < 3:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
            assert fleet.asked.count("a") == 1
            assert fleet.reported.empty(), "how `a` is isn't known yet"
            # A target that a reload adds is looked at, too.
            fleet.answers["c"] = status(healthy=False)
            await made.apply({n: f"{n}:1" for n in "abc"}, volumes_of=Volumes().on)
            assert not await fleet.reported.get()
            await made.apply({n: f"{n}:1" for n in "ab"}, volumes_of=Volumes().on)
            fleet.go_on.set()
            while not await fleet.reported.get():
                pass
            fleet.asked.clear()
            while fleet.asked.count("b") < 3:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
            assert "c" not in fleet.asked
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


async def test_an_answer_from_the_address_before_a_reload_says_nothing(fleet: Fleet) -> None:
    fleet.answers = {"a": None}
    made = fleet.targets()
    looking = asyncio.ensure_future(made.keep_looked_at())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not fleet.asked:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
            await made.apply({"a": "elsewhere:1"}, volumes_of=Volumes().on)
            fleet.go_on.set()
            for _ in range(5):
                await asyncio.sleep(0)
        [view] = made.views()
        assert (view.address, view.state) == ("elsewhere:1", TargetState.UNKNOWN)
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


class Volumes:
    """Volumes by their targets."""

    def __init__(self, **found: str) -> None:
        self.found = found

    async def on(self, nodes: Collection[str]) -> Mapping[str, str]:
        await asyncio.sleep(0)
        return {volume: node for volume, node in self.found.items() if node in nodes}


async def test_a_reload_adds_targets_and_changes_addresses(fleet: Fleet) -> None:
    fleet.answers = {"a": status(), "b": status(2 * GIB)}
    made = Targets({"a": "elsewhere:1"}, identity=cast("Any", fleet))
    await made.apply({"a": "a:1", "b": "b:1"}, volumes_of=Volumes(v="a").on)
    assert await best(made) == "b"


async def test_a_target_that_has_volumes_is_not_removed(fleet: Fleet) -> None:
    fleet.answers = {"a": status(), "b": status()}
    made = fleet.targets()
    with pytest.raises(UsageError) as caught:
        await made.apply({"a": "a:1", "c": "c:1"}, volumes_of=Volumes(v="a", w="b").on)
    assert caught.value.reason == "gateway.target.used"
    assert "w on b" in str(caught.value)
    assert "v on a" not in str(caught.value)
    assert [*made.nodes] == ["a", "b"]
    await made.apply({"a": "a:1"}, volumes_of=Volumes(v="a").on)
    assert [*made.nodes] == ["a"]
    with pytest.raises(UsageError) as caught:
        made.channel("b")
    assert caught.value.reason == "volume.target.unknown"


async def test_a_target_is_not_removed_while_it_gets_a_volume(fleet: Fleet) -> None:
    fleet.answers = {"a": status(), "b": status()}
    made = fleet.targets()
    async with made.chosen("b", size_bytes=1, earlier=no_earlier_call):
        with pytest.raises(UsageError, match="a new volume on b"):
            await made.apply({"a": "a:1"}, volumes_of=Volumes().on)
    listed, go_on = asyncio.Event(), asyncio.Event()

    async def slow(nodes: Collection[str]) -> Mapping[str, str]:
        listed.set()
        await go_on.wait()
        return {}

    removal = asyncio.ensure_future(made.apply({"a": "a:1"}, volumes_of=slow))
    await listed.wait()
    with pytest.raises(Error, match="'b'; allowed: 'a'"):
        async with made.chosen("b", size_bytes=1, earlier=no_earlier_call):
            pass
    assert await best(made) == "a"
    go_on.set()
    await removal
