"""An anchor in memory whose answers and delays the test controls."""

import asyncio
from collections.abc import Mapping, Sequence

from sealane.daemon.device.anchors.anchor import CATALOGUE, Anchored, Change, changed
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.errors import Error


class MemoryAnchor:
    """An anchor that outlives its users: `close` only records the call."""

    def __init__(self) -> None:
        self.records: Mapping[str, Anchored] = {}
        self.floor = 0
        self.calls: list[list[Change]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.called = asyncio.Event()
        self.errors: list[Error] = []
        self.loses_answers = False
        self.is_closed = False

    async def advance(self, changes: Sequence[Change]) -> None:
        self.calls.append([*changes])
        self.called.set()
        await self.open.wait()
        if self.errors and not self.loses_answers:
            raise self.errors.pop(0)
        self.records, self.floor = changed(self.records, changes, floor=self.floor)
        if self.errors:
            raise self.errors.pop(0)

    async def close(self) -> None:
        self.is_closed = True

    async def hold(
        self, anchors: DeviceAnchors, name: str = CATALOGUE, number: int = 1
    ) -> "asyncio.Future[None]":
        """Delay a call until `open` is set."""
        self.open.clear()
        self.called.clear()
        task = asyncio.ensure_future(anchors.advance(name, number, b"held"))
        await self.called.wait()
        return task
