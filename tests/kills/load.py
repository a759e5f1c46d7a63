"""Programs that use a volume while daemons restart: no call may fail, nothing may be lost."""

import asyncio
import random
import time

from patience import PATIENCE_SECONDS
from sealane.client import Disk
from seeds import SEED

BYTES = 1 << 20
WRITERS = 4
_SHARE = BYTES // WRITERS


class Load:
    """Writers of separate ranges that read back what they wrote; no call may fail."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._reference = bytearray(BYTES)
        self._rounds = [0] * WRITERS
        self._moved = asyncio.Condition()
        self.is_over = False
        self.pause_seconds = 0.0
        """The longest that a writer waited for one write with its flush and its read back."""

    async def run(self, writer: int) -> None:
        chance = random.Random(SEED + writer)
        while not self.is_over:
            length = chance.choice([1, 100, 4096, 12_288, 30_001])
            offset = writer * _SHARE + chance.randrange(_SHARE - length + 1)
            content = chance.randbytes(length)
            durable = chance.random() < 0.2
            began = time.monotonic()
            assert await self._disk.write(offset, content, durable=durable) == length
            self._reference[offset : offset + length] = content
            if chance.random() < 0.3:
                await self._disk.flush()
            at = writer * _SHARE
            assert await self._disk.read(at, _SHARE) == self._reference[at : at + _SHARE]
            self.pause_seconds = max(self.pause_seconds, time.monotonic() - began)
            async with self._moved:
                self._rounds[writer] += 1
                self._moved.notify_all()

    async def went_on(self) -> None:
        """Wait until each writer has made some progress."""
        wanted = [rounds + 3 for rounds in self._rounds]
        async with asyncio.timeout(PATIENCE_SECONDS), self._moved:
            await self._moved.wait_for(
                lambda: all(now >= then for now, then in zip(self._rounds, wanted, strict=True))
            )

    async def check(self) -> None:
        """Read back and compare everything."""
        assert await self._disk.read(0, BYTES) == self._reference
