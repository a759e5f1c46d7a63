"""Random sequences of actions on a device, checked against a simple model."""

import asyncio
import datetime as dt
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.test_devices import OTHER, S_AGAIN, S, World, change
from brokers import Count, start_broker
from sealane.crypto.certificates import Subject
from sealane.daemon.broker.devices import FENCE
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.device.anchors.anchor import CATALOGUE, Change
from sealane.errors import Error

PROCESSES = (S, S_AGAIN, OTHER)
NODES = ("s", "o")

processes = st.sampled_from(PROCESSES)
actions = st.one_of(
    st.tuples(st.just("open"), processes, st.booleans()),
    st.tuples(st.just("advance"), processes, st.sampled_from((0, 0, 0, 1)), st.booleans()),
    st.tuples(st.just("forget"), processes),
    st.tuples(st.just("advance_late"), processes),
    st.tuples(st.just("confirm"), processes),
    st.tuples(st.just("close"), processes),
    st.tuples(st.just("check"), processes),
    st.tuples(st.just("move"), st.sampled_from(NODES)),
    st.tuples(st.just("anew")),
    st.tuples(st.just("wait"), st.sampled_from((1, 40, 61))),
)


@dataclass
class Model:
    """One owner, the current opening, an earlier one that may still be ending, and one record."""

    owner: str | None = None
    holder: tuple[Subject, int] | None = None
    ending: tuple[Subject, int] | None = None
    until: dt.datetime | None = None
    is_initialised: bool = False
    number: int = 0
    floor: int = 0
    epochs: dict[bytes, int] = field(default_factory=dict)

    def blob(self) -> bytes:
        return b"%d" % self.number

    def may_open(self, caller: Subject, now: dt.datetime, *, is_right: bool) -> str:
        if self.owner is None:
            return ""
        if caller.node != self.owner:
            return "device.owner.refused"
        if self.until is not None and now < self.until:
            return "device.busy"
        return "" if is_right or not self.is_initialised else "device.anchor.mismatch"

    def held(self, caller: Subject) -> str:
        if self.owner is None:
            return "device.fenced"
        if caller.node != self.owner:
            return "device.owner.refused"
        mine = (caller, self.epochs.get(caller.incarnation, 0))
        if self.ending == mine:
            return "device.moved"
        return "" if self.holder == mine else "device.fenced"

    def drop(self) -> None:
        """Remove the record; its number stays used."""
        self.number, self.floor = 0, max(self.floor, self.number)

    def end(self, now: dt.datetime) -> None:
        """Let the current opening, if any, end."""
        if self.holder is not None:
            self.ending, self.until = self.holder, now + FENCE
        self.holder = None


async def _said(call: object) -> str:
    try:
        await call  # type: ignore[misc]
    except Error as error:
        return error.reason
    return ""


class Run:
    """Applies each action to the broker and to the model, and compares the results."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.model = Model()
        self.granted: list[int] = []

    async def open(self, caller: Subject, is_right: bool) -> None:
        model = self.model
        found = [model.blob()] if is_right and model.number else []
        is_right = bool(found)
        expected = model.may_open(caller, self.world.now, is_right=is_right)
        epochs: list[int] = []

        async def call() -> None:
            epochs.append((await self.world.open(caller, found=found)).fencing_epoch)

        assert await _said(call()) == expected
        if not expected:
            # Epochs are unique and increase.
            assert not self.granted or epochs[0] > max(self.granted)
            self.granted += epochs
            if not model.is_initialised:
                model.drop()
            model.owner = model.owner or caller.node
            model.epochs[caller.incarnation] = epochs[0]
            model.holder, model.ending, model.until = (caller, epochs[0]), None, None

    async def advance(self, caller: Subject, stale: int, is_old: bool) -> None:
        """Advance, also as a thief with any number; `is_old` chooses an earlier one."""
        model = self.model
        epoch = model.epochs.get(caller.incarnation, 0)
        start = max(model.number - stale, 0)
        is_old &= model.number == 0 and model.floor > 0
        number = model.floor if is_old else max(start, model.floor) + 10
        expected = model.held(caller)
        if not expected and (start != model.number or is_old):
            expected = "anchor.order"
        made = change(start, number, b"%d" % number)
        assert await _said(self.world.advance(epoch, made, caller=caller)) == expected
        if not expected:
            model.number = number

    async def forget(self, caller: Subject) -> None:
        model = self.model
        epoch = model.epochs.get(caller.incarnation, 0)
        gone = Change(name=CATALOGUE, expected=model.number, record=None)
        expected = model.held(caller)
        assert await _said(self.world.advance(epoch, gone, caller=caller)) == expected
        if not expected:
            model.drop()

    async def advance_late(self, caller: Subject) -> None:
        """Advance under an opening before the process's last one."""
        expected = self.model.held(caller)
        expected = "device.fenced" if expected in {"", "device.moved"} else expected
        epoch = self.model.epochs.get(caller.incarnation, 1) - 1
        made = change(self.model.number, max(self.model.number, self.model.floor) + 10)
        assert await _said(self.world.advance(epoch, made, caller=caller)) == expected

    async def confirm(self, caller: Subject) -> None:
        model = self.model
        epoch = model.epochs.get(caller.incarnation, 0)
        call = self.world.devices.confirm(
            caller, device_id=self.world.device_id, fencing_epoch=epoch
        )
        assert await _said(call) == model.held(caller)
        model.is_initialised |= not model.held(caller)

    async def check(self, caller: Subject) -> None:
        epoch = self.model.epochs.get(caller.incarnation, 0)
        call = self.world.devices.check(caller, device_id=self.world.device_id, fencing_epoch=epoch)
        assert await _said(call) == self.model.held(caller)

    async def close(self, caller: Subject) -> None:
        model = self.model
        mine = (caller, model.epochs.get(caller.incarnation, 0))
        call = self.world.devices.close(
            caller, device_id=self.world.device_id, fencing_epoch=mine[1]
        )
        assert await _said(call) == ""
        if model.holder == mine:
            model.holder = None
        if model.ending == mine:
            model.ending, model.until = None, None

    async def move(self, node: str) -> None:
        model = self.model
        said = await _said(self.world.books.move(self.world.device_id, node, unseen=True))
        assert said == ("device.not_found" if model.owner is None else "")
        if not said and node != model.owner:
            model.end(self.world.now)
            model.owner = node

    async def anew(self) -> None:
        model = self.model
        said = await _said(self.world.books.believe_anew(self.world.device_id))
        assert said == ("device.not_found" if model.owner is None else "")
        if not said:
            model.holder = None
            model.is_initialised = False
            model.drop()

    async def wait(self, seconds: int) -> None:
        self.world.now += dt.timedelta(seconds=seconds)

    async def look(self) -> None:
        """Compare the broker's records with the model."""
        if self.model.owner is not None:
            entry, records, _ = await self.world.books.details(self.world.device_id)
            assert entry.owner == self.model.owner
            kept = dict(records).get(CATALOGUE)
            assert (0 if kept is None else kept.number) == self.model.number
            stored = await self.world.registry.devices.get(str(self.world.device_id))
            assert stored is not None
            assert stored.record.anchor_floor == self.model.floor


async def _run(world: World, script: list[tuple[object, ...]]) -> None:
    # A new device each time at the same broker: starting a broker takes longer than a script.
    run = Run(replace(world, device_id=uuid.uuid4()))
    for name, *arguments in script:
        await getattr(run, str(name))(*arguments)
        await run.look()
    if run.model.owner is not None:
        await world.books.forget(run.world.device_id)


@pytest.mark.slow
def test_device_does_what_its_model_does(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        store = SqliteStore(tmp_path / "b.sqlite")
        _, _, registry = runner.run(start_broker(store, starts=Count(), heads=Count()))
        world = World(registry)

        @settings(max_examples=max(500, settings.default.max_examples))
        @given(st.lists(actions, min_size=4, max_size=12))
        def check(script: list[tuple[object, ...]]) -> None:
            runner.run(_run(world, script))

        try:
            check()
        finally:
            runner.run(registry.close())
