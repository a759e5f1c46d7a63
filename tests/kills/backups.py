"""A snapshot of running brokers, its restore, and what they granted before and after."""

import itertools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from control_plane import sealanectl
from kills.storage_world import StorageWorld

_NODES = {"s": ["target"], "g": ["gateway"]}


@dataclass(frozen=True)
class Grant:
    """A lease: its volume, broker instance and start epoch, and its counters."""

    arena: tuple[str, int, int]
    counters: range


def take_snapshot(world: StorageWorld, broker: str = "broker") -> None:
    """Have a broker write a snapshot; note the trust anchor."""
    root = world.site.root
    made = sealanectl("key", "recipient", root / "recipient")
    assert made.returncode == 0, made.stderr
    taken = sealanectl(
        *("--socket", world.daemons[broker].socket, "broker", "snapshot", root / "snapshot"),
        *("--to", root / "recipient.pub"),
    )
    assert taken.returncode == 0, taken.stderr
    shutil.copy(root / broker / "trust-anchor.pem", root / "anchor.pem")


def prepare(world: StorageWorld, *, instance: int, broker: str = "broker") -> None:
    """Give a broker an unused instance number and no counters or database."""
    state, config = world.site.root / broker, world.site.root / f"{broker}.toml"
    for path in [*state.glob("broker.sqlite*"), *state.glob("*.counter")]:
        path.unlink()
    text = re.sub(r"(?m)^instance = \d+\n", "", config.read_text())
    config.write_text(text.replace("[broker]\n", f"[broker]\ninstance = {instance}\n"))


def restore(world: StorageWorld, *, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Restore the snapshot with the configuration of `broker`, and accept nodes and devices."""
    site, root = world.site, world.site.root
    site.write_policy(_NODES)
    accepted = [word for device in devices for word in ("--accept-device", device)]
    restored = sealanectl(
        *("-o", "json", "broker", "restore", root / "snapshot", "--yes"),
        *("--config", root / "broker.toml"),
        *("--key", root / "recipient", "--trust-anchor", root / "anchor.pem"),
        *("--restored-before", "0", "--accept", "s", "--accept", "g", *accepted),
    )
    assert restored.returncode == 0, restored.stderr
    outcome: dict[str, Any] = json.loads(restored.stdout)
    return outcome


def opened_device(*logs: Path) -> str:
    """Return the id of the target's device, of audit logs."""
    opened = [r for log in logs for r in records(log) if r["kind"] == "device.open"]
    return str(cast("dict[str, Any]", opened[-1]["detail"])["device_id"])


def records(path: Path) -> list[dict[str, object]]:
    """Return the records of an audit log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def grants(path: Path) -> list[Grant]:
    """Return the leases that an audit log says were granted."""
    return [
        Grant(
            arena=(str(d["volume_id"]), int(d["broker_instance"]), int(d["start_epoch"])),
            counters=range(int(d["counter_start"]), int(d["counter_end"])),
        )
        for record in records(path)
        if record["kind"] == "lease.grant" and record["outcome"] == "granted"
        for d in [cast("dict[str, Any]", record["detail"])]
    ]


def check_disjoint(granted: list[Grant]) -> None:
    """Fail if any counter was granted twice for one volume."""
    by_arena: dict[tuple[str, int, int], list[range]] = defaultdict(list)
    for grant in granted:
        by_arena[grant.arena].append(grant.counters)
    for ranges in by_arena.values():
        ranges.sort(key=lambda each: each.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
