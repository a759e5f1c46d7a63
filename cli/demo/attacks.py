"""Five attacks on the demo's volume, each with its expected refusal.

Every attack is undone, and the sector must then read as written: to refuse honest data as well
would prove nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import sealane.client
from sealane.cli.demo.adversary import DiskAdversary, WireAdversary, WireAttack
from sealane.cli.demo.results import AttackResult
from sealane.cli.demo.storage import (
    Step,
    VolumeJob,
    attached,
    host_queue,
    store_file,
)
from sealane.client import Volume, VolumeEvent
from sealane.errors import Error, VerificationError
from sealane.protocol.sector import SECTOR_BYTES
from sealane.transport.nvme.initiator import VolumeQueue

REFUSAL_SECONDS: Final = 60.0
ATTACKS: Final = 5
BIT_IN_SECTOR: Final = 8 * 100 + 3
NOTHING: Final = "no error"


async def run_attacks(
    job: VolumeJob, client: sealane.client.Client, volume: Volume, step: Step
) -> tuple[AttackResult, ...]:
    """Attack the stored sectors, then the wire."""
    attacks = Attacks(job, volume, step)
    async with client.volumes.watch(volume.name) as events:
        attacks.events = events
        async with attached(client, volume) as here, host_queue(here) as queue:
            await attacks.on_disk(queue)
        host, _, port = job.cluster.target.addresses["target"].rpartition(":")
        wire = WireAdversary(host, int(port))
        async with wire.listening() as via_port:
            async with attached(client, volume, via_port=via_port) as here:
                await attacks.replay(here, wire)
            async with attached(client, volume, via_port=via_port) as here:
                await attacks.redirect(here, wire)
    return tuple(attacks.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal: the reason, the role that refused, and the sector."""

    reason: str
    origin: str
    lba: int


class Attacks:
    """Makes the attacks and records the refusals."""

    events: AsyncIterator[VolumeEvent]

    def __init__(self, job: VolumeJob, volume: Volume, step: Step) -> None:
        self._first = job.input_sectors
        self._disk = DiskAdversary(store_file(job, volume))
        self._step = step
        self.results: list[AttackResult] = []

    async def on_disk(self, queue: VolumeQueue) -> None:
        """Flip a bit, swap two sectors, restore an older copy."""
        disk, lba = self._disk, self._first
        for number in range(3):
            await write(queue, lba + number, version=1)
        honest = [disk.read_slot(lba + number) for number in range(3)]

        disk.flip_bit(lba, BIT_IN_SECTOR)
        await self._expect(
            "bit flipped on disk",
            Refusal(reason="sector.tag", origin="gateway", lba=lba),
            lambda: check(queue, lba, version=1),
        )
        disk.write_slot(lba, honest[0])
        await check(queue, lba, version=1)

        disk.write_slot(lba, honest[1])
        disk.write_slot(lba + 1, honest[0])
        await self._expect(
            "sectors swapped on disk",
            Refusal(reason="sector.stale", origin="target", lba=lba),
            lambda: check(queue, lba, version=1),
        )
        disk.write_slot(lba, honest[0])
        disk.write_slot(lba + 1, honest[1])
        await check(queue, lba, version=1)

        await write(queue, lba + 2, version=2)
        newest = disk.read_slot(lba + 2)
        disk.write_slot(lba + 2, honest[2])
        await self._expect(
            "older copy restored on disk",
            Refusal(reason="sector.stale", origin="target", lba=lba + 2),
            lambda: check(queue, lba + 2, version=2),
        )
        disk.write_slot(lba + 2, newest)
        await check(queue, lba + 2, version=2)

    async def replay(self, here: Volume, wire: WireAdversary) -> None:
        """Let two writes pass, then send the first one's bytes again."""
        lba = self._first + 3

        async def write_twice_and_read() -> None:
            async with host_queue(here) as queue:
                await write(queue, lba, version=1)
                await write(queue, lba, version=2)
                await check(queue, lba, version=2)

        wire.arm(WireAttack.REPLAY)
        await self._expect(
            "write replayed on the wire",
            Refusal(reason="command.mac", origin="target", lba=lba),
            write_twice_and_read,
        )
        async with host_queue(here) as queue:
            await check(queue, lba, version=2)

    async def redirect(self, here: Volume, wire: WireAdversary) -> None:
        """Change the LBA of a write on its way."""
        lba = self._first + 5
        async with host_queue(here) as queue:
            await write(queue, lba, version=1)
            await write(queue, lba + 1, version=1)

        async def write_again() -> None:
            async with host_queue(here) as queue:
                await write(queue, lba, version=2)

        wire.arm(WireAttack.REDIRECT)
        await self._expect(
            "write redirected on the wire",
            # The target reports the LBA in the command, which the adversary chose.
            Refusal(reason="command.mac", origin="target", lba=lba + 1),
            write_again,
        )
        async with host_queue(here) as queue:
            # After the fence, the gateway repeated the write at the right LBA.
            await check(queue, lba, version=2)
            await check(queue, lba + 1, version=1)

    async def _expect(
        self, name: str, expected: Refusal, attempt: Callable[[], Awaitable[None]]
    ) -> None:
        """Run a host's I/O, record its result, and wait for the expected refusal to be reported.

        Gateway and target both report. Other refusals are skipped, but the last one is shown if
        the expected one doesn't come.
        """
        host_saw = NOTHING
        try:
            await attempt()
        except Error as error:
            host_saw = error.reason
        found: Refusal | None = None
        # After a time-out, `found` is another refusal or None: the attack counts as not refused.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFUSAL_SECONDS):
                while found != expected:
                    event = await anext(self.events)
                    if event.kind == "refused":
                        found = Refusal(reason=event.reason, origin=event.origin, lba=event.lba)
        self.results.append(
            AttackResult(
                name=name,
                expected_reason=expected.reason,
                found_reason=found.reason if found else "none",
                refused_by=found.origin if found else "nobody",
                refused=found == expected,
                host_saw=host_saw,
            )
        )
        self._step("attacks", "attacks", ATTACKS, len(self.results))


def pattern(lba: int, version: int) -> bytes:
    """Return the contents of a version of a sector."""
    return f"sector {lba} version {version} ".encode().ljust(32, b".") * (SECTOR_BYTES // 32)


async def write(queue: VolumeQueue, lba: int, version: int) -> None:
    """Write one sector."""
    await queue.write(lba, pattern(lba, version))


async def check(queue: VolumeQueue, lba: int, version: int) -> None:
    """Read one sector; VerificationError unless it has the contents of that version."""
    buffer = bytearray(SECTOR_BYTES)
    await queue.read(lba, buffer)
    if buffer != pattern(lba, version):
        raise VerificationError(
            "demo.sector.contents", f"sector {lba} does not contain version {version}"
        )
