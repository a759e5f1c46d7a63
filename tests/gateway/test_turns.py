"""Reattaching and filling: volumes of one target wait for each other only."""

import asyncio
from typing import Any, cast

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway import filling, reattaching
from sealane.daemon.gateway.attachments import SealedAttachment
from sealane.daemon.gateway.filling import Fillings
from sealane.daemon.gateway.reattaching import Reattaching
from sealane.daemon.volume.events import EventLog
from sealane.errors import UnavailableError
from sealane.protocol.v1 import broker_pb2


class Storage:
    """Volumes by the target that has each; that of `silent` takes for ever."""

    def __init__(self, places: dict[str, str], *, silent: str) -> None:
        self.places = places
        self.silent = silent
        self.go_on = asyncio.Event()
        self.asked: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.found: list[str] = []

    async def descriptor(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        self.found.append(volume_id)
        return broker_pb2.VolumeDescriptor(
            volume_id=volume_id, target_node=self.places[volume_id], filling_gateway="g"
        )

    async def use(self, descriptor: broker_pb2.VolumeDescriptor) -> None:
        self.asked.put_nowait((descriptor.volume_id, descriptor.target_node))
        if descriptor.volume_id == self.silent:
            await self.go_on.wait()

    async def next_asked(self) -> tuple[str, str]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.asked.get()


def reattached(storage: Storage) -> Reattaching:
    serving = asyncio.Event()
    serving.set()

    async def reattach(_: SealedAttachment, descriptor: broker_pb2.VolumeDescriptor) -> None:
        await storage.use(descriptor)

    made = Reattaching(
        cast("Any", None),
        gateway=cast("Any", None),
        find=storage.descriptor,
        reattach=reattach,
        events=EventLog("g"),
        serving=serving,
    )
    for volume_id in storage.places:
        made.start([kept(volume_id)])
    return made


def kept(volume_id: str) -> SealedAttachment:
    class Kept:
        def __init__(self) -> None:
            self.volume_id = volume_id

    return cast("SealedAttachment", cast("Any", Kept()))


async def test_reattaching_at_a_silent_target_leaves_others_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reattaching, "REATTACHED_AT_ONCE_MAX", 1)
    storage = Storage({"v": "a", "w": "b"}, silent="v")
    made = reattached(storage)
    try:
        assert {await storage.next_asked(), await storage.next_asked()} == {("v", "a"), ("w", "b")}
    finally:
        await made.close()


async def test_a_volume_that_moved_while_it_waited_takes_its_turn_at_the_new_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reattaching, "REATTACHED_AT_ONCE_MAX", 1)
    storage = Storage({"v": "a", "w": "a", "x": "b"}, silent="v")
    made = reattached(storage)
    try:
        assert {await storage.next_asked(), await storage.next_asked()} == {("v", "a"), ("x", "b")}
        assert storage.asked.empty()
        storage.places["w"] = "b"
        before = storage.found.count("w")
        storage.go_on.set()
        assert await storage.next_asked() == ("w", "b")
        # In the turn at its former target, to find where it is; then before and in its new turn.
        assert storage.found.count("w") == before + 3
    finally:
        await made.close()


async def test_filling_at_a_silent_target_leaves_others_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filling, "FILLINGS_MAX", 1)
    storage = Storage({"v": "a", "w": "b"}, silent="v")

    class BackEnds:
        async def open(self, descriptor: broker_pb2.VolumeDescriptor, **_: object) -> None:
            await storage.use(descriptor)
            raise UnavailableError("peer.unreachable", "connection refused")

    made = Fillings(
        node="g",
        broker=cast("Any", storage),
        gateway=cast("Any", None),
        leases=cast("Any", None),
        back_ends=cast("Any", BackEnds()),
        events=EventLog("g"),
    )
    try:
        for volume_id in storage.places:
            made.start(await storage.descriptor(volume_id))
        assert {await storage.next_asked(), await storage.next_asked()} == {("v", "a"), ("w", "b")}
    finally:
        await made.close()
