"""A broker whose store is lost and restored from a snapshot, with running gateway and target."""

import asyncio
import itertools
import json
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from control_plane import sealanectl
from kills.storage_world import BLOCK, LOST, StorageWorld, storage_world
from sealane.client import Client, Volume, connect
from trust.test_revocation import HOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# The device's former server is waited for (device.busy): 60 s.
HEAL_SECONDS = 200.0


@dataclass(frozen=True)
class Grant:
    """A lease: its volume, broker instance and start epoch, and its counters."""

    arena: tuple[str, int, int]
    counters: range


NODES = {"s": ["target"], "g": ["gateway"]}


@pytest.mark.parametrize("anchor", ["file", "broker"])
async def test_volume_goes_on_after_its_broker_was_restored(anchor: str, tmp_path: Path) -> None:
    async with storage_world(store="file", anchor=anchor, scratch=tmp_path) as world:
        root = world.site.root
        async with connect(world.daemons["g"].socket) as client:
            created = await client.volumes.create(size_bytes=1 << 20)
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            await _write(client, volume, 1, b"before the snapshot")
            await asyncio.to_thread(_snapshot, world)
            await client.volumes.detach(volume.name)
        # A gateway's next process has no leases left, so it gets others.
        await world.restart("g")
        async with connect(world.daemons["g"].socket) as client:
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            await _write(client, volume, 2, b"after the snapshot")
            world.daemons["broker"].kill()
            before = _grants(root / "broker" / "audit.jsonl")
            await asyncio.to_thread(_restore, world, anchor)
            await asyncio.to_thread(world.start, "broker")
            # The attachment outlives the broker.
            await asyncio.to_thread(_wait_reopened, world)
            await _read(client, volume, 1, b"before the snapshot")
            await _read(client, volume, 2, b"after the snapshot")
            await _write(client, volume, 3, b"after the restore")
            await client.volumes.detach(volume.name)
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            await _write(client, volume, 4, b"under another lease")
            for block, content in (
                (2, b"after the snapshot"),
                (3, b"after the restore"),
                (4, b"under another lease"),
            ):
                await _read(client, volume, block, content)
        after = _grants(root / "broker" / "audit.jsonl")
        assert len(after) > len(before) >= 2
        assert after[: len(before)] == before
        _check_disjoint(after)
        kinds = [each["kind"] for each in _records(root / "broker" / "audit.jsonl")]
        assert "broker.restore" in kinds


async def _write(client: Client, volume: Volume, block: int, content: bytes) -> None:
    async with client.open(volume) as disk:
        await disk.write(block * BLOCK, content)
        await disk.flush()


async def _read(client: Client, volume: Volume, block: int, content: bytes) -> None:
    """Read what was written, once the volume is served again."""
    async with asyncio.timeout(HEAL_SECONDS):
        while True:
            try:
                async with client.open(volume) as disk:
                    assert await disk.read(block * BLOCK, len(content)) == content
                    return
            except LOST:
                await asyncio.sleep(1)


def _wait_reopened(world: StorageWorld) -> None:
    """Wait until the running target has opened its device at the restored broker."""
    deadline = time.monotonic() + HEAL_SECONDS
    while time.monotonic() < deadline:
        opened = [e for e in world.daemons["s"].log_lines() if e["event"] == "device_opened"]
        if len(opened) > 1:
            return
        time.sleep(0.5)
    raise AssertionError("the target did not open its device again")


def _snapshot(world: StorageWorld) -> None:
    root = world.site.root
    made = sealanectl("key", "recipient", root / "recipient")
    assert made.returncode == 0, made.stderr
    socket = world.daemons["broker"].socket
    taken = sealanectl(
        "--socket", socket, "broker", "snapshot", root / "snapshot", "--to", root / "recipient.pub"
    )
    assert taken.returncode == 0, taken.stderr


def _restore(world: StorageWorld, anchor: str) -> None:
    site, root = world.site, world.site.root
    shutil.copy(root / "broker" / "trust-anchor.pem", root / "anchor.pem")
    state = root / "broker"
    for path in [*state.glob("broker.sqlite*"), *state.glob("*.counter")]:
        path.unlink()
    config = root / "broker.toml"
    config.write_text(config.read_text().replace("[broker]\n", "[broker]\ninstance = 7\n"))
    site.write_policy(NODES)
    devices = _device(root) if anchor == "broker" else []
    restored = sealanectl(
        *("-o", "json", "broker", "restore", root / "snapshot", "--config", config, "--yes"),
        *("--key", root / "recipient", "--trust-anchor", root / "anchor.pem"),
        *("--restored-before", "0", "--accept", "s", "--accept", "g"),
        *devices,
    )
    assert restored.returncode == 0, restored.stderr


def _device(root: Path) -> list[str]:
    opened = [r for r in _records(root / "broker" / "audit.jsonl") if r["kind"] == "device.open"]
    return ["--accept-device", str(opened[-1]["detail"]["device_id"])]  # type: ignore[index]


def _records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _grants(path: Path) -> list[Grant]:
    return [
        Grant(
            arena=(str(d["volume_id"]), int(d["broker_instance"]), int(d["start_epoch"])),
            counters=range(int(d["counter_start"]), int(d["counter_end"])),
        )
        for record in _records(path)
        if record["kind"] == "lease.grant" and record["outcome"] == "granted"
        for d in [cast("dict[str, Any]", record["detail"])]
    ]


def _check_disjoint(grants: list[Grant]) -> None:
    """Fail if any counter was granted twice for one volume."""
    by_arena: dict[tuple[str, int, int], list[range]] = defaultdict(list)
    for grant in grants:
        by_arena[grant.arena].append(grant.counters)
    for ranges in by_arena.values():
        ranges.sort(key=lambda each: each.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
