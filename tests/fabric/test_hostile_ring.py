"""A job writes arbitrary bytes into its rings: only its own session ends, not its neighbour's."""

import asyncio
import hashlib
import mmap
import os
import random
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from raw_jobs import raw_job
from session_pairs import REGION, connected

SUBMISSION_ENTRIES = 128
ENTRY_BYTES = 64
ROUNDS = 300
FAULTS = {"ring.index.jump"} | {
    f"ring.entry.{name}"
    for name in ("opcode", "flags", "reliability", "length", "range", "reserved")
}


def scribble(chance: random.Random, memory: mmap.mmap) -> None:
    """Write a word anywhere, advance an index a little, or write a plausible entry."""
    produced = int.from_bytes(memory[:8], "little")
    match chance.randrange(4):
        case 0:
            at = chance.randrange(len(memory) // 8) * 8
            memory[at : at + 8] = chance.randbytes(8)
        case 1:
            memory[:8] = (produced + chance.choice([0, 1, 1, 1, 2, 300])).to_bytes(8, "little")
        case 2:
            word = chance.choice([0, 1, 2**63, 2**64 - 1])
            memory[64:72] = word.to_bytes(8, "little")
        case _:
            entry = bytearray(ENTRY_BYTES)
            entry[0] = chance.randrange(1, 9)
            entry[8:16] = chance.choice([0, 0, REGION, 2**64 - 8]).to_bytes(8, "little")
            entry[16:24] = chance.choice([0, 0, 8, REGION, 2**40]).to_bytes(8, "little")
            entry[40:48] = chance.choice([0, 0, produced, 2**64 - 1]).to_bytes(8, "little")
            at = SUBMISSION_ENTRIES + produced % 256 * ENTRY_BYTES
            memory[at : at + ENTRY_BYTES] = bytes(entry)
            memory[:8] = (produced + 1).to_bytes(8, "little")


@pytest.mark.parametrize("seed", range(12))
async def test_hostile_job_ends_nothing_but_its_session(
    fabrics: tuple[Any, Any], seed: int
) -> None:
    chance = random.Random(seed)
    async with connected(*fabrics) as (sender, receiver):
        async with raw_job(*fabrics) as job:
            session, memory, call = job.session, job.memory, job.call
            content = chance.randbytes(100_000)
            sender.region[: len(content)] = content
            transfer = asyncio.gather(
                sender.send(offset=0, length=len(content)),
                receiver.receive(offset=0, length=len(content)),
            )
            for _ in range(ROUNDS):
                scribble(chance, memory)
                os.eventfd_write(call, chance.choice([1, 1, 500]))
                if chance.random() < 0.1:
                    await asyncio.sleep(0)
            await transfer
            landed = receiver.region[: len(content)]
            assert hashlib.sha256(landed).digest() == hashlib.sha256(content).digest()
            if not session.close_reason:
                memory[:8] = (2**64 - 1).to_bytes(8, "little")
                os.eventfd_write(call, 1)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await session.wait_closed()
        assert session.close_reason in FAULTS
        await asyncio.gather(receiver.send(offset=0, length=8), sender.receive(offset=0, length=8))


@pytest.mark.parametrize(
    ("writes", "reason"),
    [
        ([(0, 257)], "ring.index.jump"),
        ([(64, 1), (0, 1), (128, 2)], "ring.index.jump"),
        ([(128, 9), (0, 1)], "ring.entry.opcode"),
        ([(128, 2 | 1 << 8), (0, 1)], "ring.entry.flags"),
        ([(128, 1 | 4 << 16), (0, 1)], "ring.entry.reliability"),
        ([(128, 2), (144, 1 << 40), (0, 1)], "ring.entry.length"),
        ([(128, 2), (136, REGION), (144, 1), (0, 1)], "ring.entry.range"),
        ([(128, 2), (168, 1), (0, 1)], "ring.entry.reserved"),
        ([(128, 1), (160, 8 << 8), (0, 1)], "ring.entry.priority"),
        ([(128, 2), (160, 1 << 8), (0, 1)], "ring.entry.priority"),
        ([(128, 2), (184, 1), (0, 1)], "ring.entry.deadline"),
    ],
)
async def test_each_fault_has_its_reason(
    fabrics: tuple[Any, Any], writes: list[tuple[int, int]], reason: str
) -> None:
    async with raw_job(*fabrics) as job:
        for at, word in writes:
            job.memory[at : at + 8] = word.to_bytes(8, "little")
        os.eventfd_write(job.call, 1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await job.session.wait_closed()
    assert job.session.close_reason == reason
