"""Volumes that daemons of one release write and those of the other read."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Final

from compat.cluster import Cluster
from kills.load import BYTES
from sealane.client import Disk, Volume, connect
from trust.test_revocation import HOST

_SECTOR: Final = 4096


async def written_volume(made: Cluster, text: str) -> Volume:
    """Return a new volume with `text` in its first sector, detached."""
    async with connect(made.socket("g")) as client:
        volume = await client.volumes.create(size_bytes=BYTES)
    await write(made, volume, text)
    return volume


async def check_volumes(made: Cluster, kept: Mapping[str, Volume]) -> None:
    """Attach each volume again and compare what it holds."""
    for text, volume in kept.items():
        await check(made, volume, text)


async def write(made: Cluster, volume: Volume, text: str) -> None:
    """Attach a volume, write `text` into its first sector, and detach it."""
    async with _attached(made, volume) as disk:
        await disk.write(0, _content(text))
        await disk.flush()


async def check(made: Cluster, volume: Volume, text: str) -> None:
    """Attach a volume and compare its first sector with `text`."""
    async with _attached(made, volume) as disk:
        assert await disk.read(0, _SECTOR) == _content(text)


@contextlib.asynccontextmanager
async def _attached(made: Cluster, volume: Volume) -> AsyncIterator[Disk]:
    async with connect(made.socket("g")) as client:
        attached = await client.volumes.attach(volume.name, host_nqn=HOST)
        async with client.open(attached) as disk:
            yield disk
        await client.volumes.detach(volume.name)


def _content(text: str) -> bytes:
    """Return a sector of text."""
    return text.encode().ljust(_SECTOR, b".")
