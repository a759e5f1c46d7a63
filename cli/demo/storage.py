"""The demo's volume: the input is written and read back through the gateway, then attacked."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sealane.client
from sealane._native import find_pieces
from sealane.cli.demo.adversary import SLOT_BYTES
from sealane.cli.demo.cluster import Cluster
from sealane.cli.demo.results import VolumeProof
from sealane.cli.demo.source import Source, distinctive_pieces
from sealane.client import Volume
from sealane.daemon.device.catalogue import STORE_SUFFIX
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.sector import SECTOR_BYTES
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController, VolumeQueue

CHUNK_BYTES: Final = 8 << 20
# Sectors behind the input, for the attacks.
SPARE_SECTORS: Final = 16
PIECES: Final = 4096
SEARCH: Final = "search the store for the input"
HOST_NQN: Final = "nqn.2026-11.dev.sealane:demo-host"

Step = Callable[[str, str, int, int], None]
"""Progress: (name of a bar, its unit, total, done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeJob:
    """The input to write and the size of the volume to write it to."""

    cluster: Cluster
    source: Source
    size_bytes: int
    seed: int

    @property
    def input_sectors(self) -> int:
        """Sectors that the input occupies."""
        return sectors(self.source.size_bytes)


def choose_volume_size(source: Source, requested_bytes: int | None) -> int:
    """Return the volume's size; UsageError `input.volume` if the requested size is too small."""
    needed = (sectors(source.size_bytes) + SPARE_SECTORS) * SECTOR_BYTES
    size = requested_bytes or needed
    if size % SECTOR_BYTES or size < needed:
        raise UsageError(
            "input.volume",
            f"--volume-size: found {size}, allowed: a multiple of {SECTOR_BYTES}, at least "
            f"{needed} for an input of {source.size_bytes} bytes",
        )
    return size


def sectors(size_bytes: int) -> int:
    """Return how many sectors a number of bytes takes; the last one is padded with zeros."""
    return -(-size_bytes // SECTOR_BYTES)


@asynccontextmanager
async def created(job: VolumeJob, client: sealane.client.Client) -> AsyncIterator[Volume]:
    """Create a volume for the input and the attacks; delete it when the block is left."""
    check_space(job)
    volume = await client.volumes.create(display_name="demo", size_bytes=job.size_bytes)
    yield volume
    await client.volumes.delete(volume.name)


def check_space(job: VolumeJob) -> None:
    """Check that the target's disk has room for the volume; UnavailableError `demo.space`."""
    needed = sectors(job.size_bytes) * SLOT_BYTES
    free = shutil.disk_usage(job.cluster.target.state_dir).free
    if free < needed:
        raise UnavailableError(
            "demo.space",
            f"{job.cluster.target.state_dir}: found {free} bytes free, needed: {needed}",
        )


@asynccontextmanager
async def attached(
    client: sealane.client.Client, volume: Volume, *, via_port: int = 0
) -> AsyncIterator[Volume]:
    """Attach the volume, through the adversary's port if one is given."""
    via_traddr = "127.0.0.1" if via_port else ""
    yield await client.volumes.attach(
        volume.name, host_nqn=HOST_NQN, via_traddr=via_traddr, via_trsvcid=via_port
    )
    await client.volumes.detach(volume.name)


@asynccontextmanager
async def host_queue(volume: Volume) -> AsyncIterator[VolumeQueue]:
    """Connect to the gateway's front end as any NVMe/TCP host would, and open one I/O queue."""
    attachment = volume.attachment
    if attachment is None:
        raise UnavailableError("demo.volume.detached", f"{volume.name} is not attached")
    async with HostController(
        traddr=attachment.traddr,
        trsvcid=attachment.trsvcid,
        subsystem_nqn=attachment.subsystem_nqn,
        host_nqn=attachment.host_nqn,
        credentials=Credentials(secret=HostSecret.parse(attachment.dhchap_secret)),
    ) as host:
        await host.request_queues(1)
        queue = await host.open_queue(1)
        try:
            yield queue
        finally:
            await queue.close()


async def prove(
    job: VolumeJob, client: sealane.client.Client, volume: Volume, step: Step
) -> VolumeProof:
    """Write the input, read it back, and search the target's store for it."""
    clock = asyncio.get_running_loop().time
    async with attached(client, volume) as here:
        async with host_queue(here) as queue:
            started = clock()
            await write_input(queue, job.source, step)
            write_seconds = clock() - started
            started = clock()
            sha256_read = await read_input(queue, job.source, step)
            read_seconds = clock() - started
        attachment = (await client.volumes.get(volume.name)).attachment
    if attachment is None:
        raise UnavailableError("demo.volume.detached", f"{volume.name} was detached meanwhile")
    step(SEARCH, "files", 2, 0)
    pieces = distinctive_pieces(job.source, PIECES, job.seed)
    in_input = await asyncio.to_thread(count_pieces, job.source.path, pieces)
    step(SEARCH, "files", 2, 1)
    in_store = await asyncio.to_thread(count_pieces, store_file(job, volume), pieces)
    step(SEARCH, "files", 2, 2)
    return VolumeProof(
        input_bytes=job.source.size_bytes,
        write_seconds=write_seconds,
        read_seconds=read_seconds,
        sectors_written=attachment.sectors_sealed,
        counters_used=attachment.counters_used,
        counters_leased=attachment.counters_leased,
        sha256_written=job.source.sha256,
        sha256_read=sha256_read,
        pieces_sampled=len(pieces),
        pieces_found_in_input=in_input,
        pieces_found_in_store=in_store,
    )


async def write_input(queue: VolumeQueue, source: Source, step: Step) -> None:
    """Write the input from LBA 0 on, and flush."""
    buffer = bytearray(CHUNK_BYTES)
    done = 0
    with source.path.open("rb") as file:
        while length := file.readinto(buffer):
            padded = sectors(length) * SECTOR_BYTES
            buffer[length:padded] = bytes(padded - length)
            await queue.write(done // SECTOR_BYTES, memoryview(buffer)[:padded])
            done += length
            step("write the volume", "MiB", mebibytes(source.size_bytes), mebibytes(done))
    await queue.flush()


async def read_input(queue: VolumeQueue, source: Source, step: Step) -> str:
    """Read the input back and return its SHA-256."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    done = 0
    while done < source.size_bytes:
        length = min(CHUNK_BYTES, source.size_bytes - done)
        padded = sectors(length) * SECTOR_BYTES
        await queue.read(done // SECTOR_BYTES, memoryview(buffer)[:padded])
        digest.update(memoryview(buffer)[:length])
        done += length
        step("read the volume", "MiB", mebibytes(source.size_bytes), mebibytes(done))
    return digest.hexdigest()


def mebibytes(size_bytes: int) -> int:
    """Round up to whole MiB, for the bars."""
    return -(-size_bytes >> 20)


def count_pieces(path: Path, pieces: list[bytes]) -> int:
    """Count the pieces that occur anywhere in a file."""
    return len(find_pieces(path, pieces))


def store_file(job: VolumeJob, volume: Volume) -> Path:
    """Return the file in which the target stores the volume's sectors."""
    volume_id = volume.name.removeprefix("volumes/")
    (path,) = job.cluster.store_directory.glob(f"{volume_id}*{STORE_SUFFIX}")
    return path
