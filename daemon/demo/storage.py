"""The demo's volume: the input through the gateway's front end and back, then five attacks."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sealane.client
from sealane._native import HostQueue, find_pieces
from sealane.client import Volume, VolumeEvent
from sealane.daemon.demo.adversary import SLOT_BYTES, DiskAdversary, WireAdversary, WireAttack
from sealane.daemon.demo.cluster import Cluster
from sealane.daemon.demo.results import AttackResult, VolumeProof
from sealane.daemon.demo.source import Source, distinctive_pieces
from sealane.errors import Error, UnavailableError, UsageError

SECTOR_BYTES: Final = 4096
CHUNK_BYTES: Final = 8 << 20
# Sectors behind the input that the attacks are made on.
SPARE_SECTORS: Final = 256
PIECES: Final = 4096
REFUSAL_SECONDS: Final = 10.0
HOST_NQN: Final = "nqn.2026-11.dev.sealane:demo-host"

Step = Callable[[str, str, int, int], None]
"""(name of a bar, its unit, total, done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeJob:
    """What to write, and to a volume of which size."""

    cluster: Cluster
    source: Source
    volume_bytes: int | None
    seed: int

    @property
    def input_sectors(self) -> int:
        """Sectors the input takes; the last one is filled up with zeros."""
        return -(-self.source.size_bytes // SECTOR_BYTES)

    @property
    def needed_bytes(self) -> int:
        """Bytes a volume must have for the input and the attacks."""
        return (self.input_sectors + SPARE_SECTORS) * SECTOR_BYTES

    def size_bytes(self) -> int:
        """Size of the volume; UsageError if the input doesn't fit the one that was asked for."""
        size = self.volume_bytes or self.needed_bytes
        if size % SECTOR_BYTES or size < self.needed_bytes:
            raise UsageError(
                "input.volume",
                f"--volume-size: found {size}, allowed: a multiple of {SECTOR_BYTES}, at least "
                f"{self.needed_bytes} for an input of {self.source.size_bytes} bytes",
            )
        return size


async def run_volume(
    job: VolumeJob, step: Step
) -> tuple[VolumeProof, tuple[AttackResult, ...]]:
    """Create a volume, prove it, attack it, delete it."""
    size_bytes = job.size_bytes()
    check_space(job)
    async with sealane.client.connect(str(job.cluster.gateway.socket)) as client:
        volume = await client.volumes.create(display_name="demo", size_bytes=size_bytes)
        proof = await prove(job, client, volume, step)
        attacks = await Attacks(job, client, volume, step).run()
        await client.volumes.delete(volume.name)
    return proof, attacks


def check_space(job: VolumeJob) -> None:
    """Refuse early when the target's disk can't take the sectors."""
    needed = (job.input_sectors + SPARE_SECTORS) * SLOT_BYTES
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
    """Attach the volume, through a port of the adversary's if one is given."""
    via_traddr = "127.0.0.1" if via_port else ""
    yield await client.volumes.attach(
        volume.name, host_nqn=HOST_NQN, via_traddr=via_traddr, via_trsvcid=via_port
    )
    await client.volumes.detach(volume.name)


async def prove(
    job: VolumeJob, client: sealane.client.Client, volume: Volume, step: Step
) -> VolumeProof:
    """Write the input, read it back, and look for it in what the target stores."""
    clock = asyncio.get_running_loop().time
    async with attached(client, volume) as here, host_queue(here) as queue:
        started = clock()
        await asyncio.to_thread(write_input, queue, job.source, step)
        write_seconds = clock() - started
        started = clock()
        sha256_read = await asyncio.to_thread(read_input, queue, job.source, step)
        read_seconds = clock() - started
        attachment = (await client.volumes.get(volume.name)).attachment
    assert attachment is not None  # noqa: S101 - it was attached a line ago
    step("search the store for the input", "files", 2, 0)
    pieces = distinctive_pieces(job.source, PIECES, job.seed)
    in_input = await asyncio.to_thread(count_pieces, job.source.path, pieces)
    step("search the store for the input", "files", 2, 1)
    in_store = await asyncio.to_thread(count_pieces, store_file(job, volume), pieces)
    step("search the store for the input", "files", 2, 2)
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


def write_input(queue: HostQueue, source: Source, step: Step) -> None:
    """Write the input from LBA 0 on, and flush."""
    buffer = bytearray(CHUNK_BYTES)
    done = 0
    with source.path.open("rb") as file:
        while length := file.readinto(buffer):
            padded = -(-length // SECTOR_BYTES) * SECTOR_BYTES
            buffer[length:padded] = bytes(padded - length)
            queue.write(done // SECTOR_BYTES, memoryview(buffer)[:padded])
            done += length
            step("write the volume", "MiB", -(-source.size_bytes >> 20), done >> 20)
    queue.flush()


def read_input(queue: HostQueue, source: Source, step: Step) -> str:
    """Read the input back and give its SHA-256."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    done = 0
    while done < source.size_bytes:
        length = min(CHUNK_BYTES, source.size_bytes - done)
        padded = -(-length // SECTOR_BYTES) * SECTOR_BYTES
        queue.read(done // SECTOR_BYTES, memoryview(buffer)[:padded])
        digest.update(memoryview(buffer)[:length])
        done += length
        step("read the volume", "MiB", -(-source.size_bytes >> 20), done >> 20)
    return digest.hexdigest()


def count_pieces(path: Path, pieces: list[bytes]) -> int:
    """Count the pieces that occur anywhere in a file."""
    return len({piece for piece, _ in find_pieces(str(path), pieces)})


def store_file(job: VolumeJob, volume: Volume) -> Path:
    """Find the file that the target keeps the volume's sectors in."""
    volume_id = volume.name.removeprefix("volumes/")
    (path,) = job.cluster.store_directory.glob(f"*{volume_id}*")
    return path


class Attacks:
    """Five attacks on one volume. Each is undone, and the sector must then read well again."""

    def __init__(
        self, job: VolumeJob, client: sealane.client.Client, volume: Volume, step: Step
    ) -> None:
        self._job = job
        self._client = client
        self._volume = volume
        self._step = step
        self._lba = job.input_sectors
        self._disk = DiskAdversary(store_file(job, volume))
        self._results: list[AttackResult] = []

    async def run(self) -> tuple[AttackResult, ...]:
        """Make all attacks."""
        async with self._client.volumes.watch(self._volume.name) as events:
            async with attached(self._client, self._volume) as here:
                async with host_queue(here) as queue:
                    for number in range(8):
                        await write_sector(queue, self._lba + number, number)
                    await self._flip_bit(queue, events)
                    await self._swap_sectors(queue, events)
                    await self._put_older_back(queue, events)
            target = await self._target_address()
            adversary = WireAdversary(*target)
            async with (
                adversary.listening() as port,
                attached(self._client, self._volume, via_port=port) as here,
            ):
                await self._replay(here, adversary, events)
                await self._redirect(here, adversary, events)
        return tuple(self._results)
'''
