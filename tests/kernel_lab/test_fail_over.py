"""A stock Linux host with two gateways of a fail-over group, under every fault of the serving one.

The host's kernel has native multipath. fio writes and checks every byte while the serving gateway
is killed, restarted, frozen and thawed, and cut off from the host. What fio measured as the longest
completion of an I/O is the pause.
"""

import contextlib
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kernel_lab.cluster import Cluster, Disk, Node
from kernel_lab.conftest import SIZE_MIB
from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from kernel_lab.link import Link, link_to
from sealane.daemon.target.fail_over import TAKE_OVER_SECONDS_MIN
from stopped import frozen

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]

# As docs/operate/fail-over.md recommends.
HOST_OPTIONS = ("-k 5", "--reconnect-delay=1", "--ctrl-loss-tmo=-1")
FAULTS = ("kill", "restart", "freeze", "cut")
ROUNDS = 3
"""Times that each fault happens."""
PAUSE_SECONDS_MAX = 30.0
"""Longest pause of an I/O that the test allows: an emulated guest on a machine that is busy."""
BOTH_LIVE = "paths_live 2"
_TAKEN_OVER_SECONDS = 60.0
_STALE_SECONDS = 2.0
"""Time for which the other gateway serves before what the fault held back goes on."""


@dataclass
class Side:
    """A gateway, and the link from the host to it."""

    node: Node
    disk: Disk
    link: Link

    @property
    def path(self) -> Disk:
        """Where the host connects."""
        return Disk(self.disk.nqn, self.link.port, self.disk.uuid, secret=self.disk.secret)


@dataclass
class Group:
    """Two gateways that fail over for the guest, and the faults of the serving one."""

    cluster: Cluster
    volume: str
    sides: list[Side] = field(default_factory=list)

    def state(self, side: Side) -> str:
        return self.cluster.attachment(self.volume, at=side.node).fail_over

    def serving(self) -> tuple[Side, Side]:
        """Return the serving gateway and the other one; AssertionError unless one serves."""
        first, second = self.sides
        states = (self.state(first), self.state(second))
        assert sorted(states) == ["active", "standby"], states
        return (first, second) if states[0] == "active" else (second, first)

    def until_serving(self, side: Side) -> None:
        deadline = time.monotonic() + _TAKEN_OVER_SECONDS
        while self.state(side) != "active":
            assert time.monotonic() < deadline, "the other gateway has not taken over"
            time.sleep(0.1)

    def kill(self, _: Guest) -> None:
        serving, other = self.serving()
        serving.node.kill()
        self.until_serving(other)
        serving.node.start()
        self._settle()

    def restart(self, _: Guest) -> None:
        serving, _ = self.serving()
        serving.node.restart()
        self._settle()

    def freeze(self, _: Guest) -> None:
        serving, other = self.serving()
        self._hold(serving.node.daemon.process.pid, other)

    def cut(self, _: Guest) -> None:
        serving, other = self.serving()
        self._hold(serving.link.process_id, other)

    def calls(self) -> dict[str, Callable[[Guest], None]]:
        return {name: getattr(self, name) for name in FAULTS}

    def _hold(self, process_id: int, other: Side) -> None:
        """Stop a process until the other gateway has served for a while; then it goes on."""
        with frozen(process_id):
            self.until_serving(other)
            time.sleep(_STALE_SECONDS)
        self._settle()

    def _settle(self) -> None:
        # The next take-over is allowed from then on.
        time.sleep(TAKE_OVER_SECONDS_MIN)


@pytest.fixture
def group(daemons: Cluster) -> Iterator[Group]:
    name = daemons.create_volume(size_mib=SIZE_MIB)
    made = Group(daemons, name)
    with contextlib.ExitStack() as stack:
        for node in (daemons.gateway, daemons.start_gateway("h")):
            disk = daemons.attach(name, at=node, fail_over=True)
            made.sides.append(Side(node, disk, stack.enter_context(link_to(disk.port))))
        yield made
    for side in made.sides:
        daemons.detach(name, at=side.node)
    daemons.delete_volume(name)


def pauses(directory: Path) -> dict[str, list[float]]:
    """Return each fault's pauses in seconds: the longest completion in the passes around it."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in (directory / "faults.txt").read_text().splitlines():
        name, before, after = line.split()
        longest = 0
        for number in range(int(before) + 1, int(after) + 1):
            job = json.loads((directory / f"pass-{number}.json").read_text())["jobs"][0]
            assert job["error"] == 0
            longest = max(
                longest,
                *(job[way]["lat_ns"]["max"] for way in ("read", "write", "sync")),
            )
        found[name].append(longest / 1e9)
    return found


def summary(each: list[float]) -> str:
    ordered = sorted(each)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return (
        f"{len(ordered)} rounds, p50 {statistics.median(ordered):.1f} s, p99 {p99:.1f} s, "
        f"max {ordered[-1]:.1f} s"
    )


def test_a_verifying_host_outlives_every_fault_of_the_serving_gateway(
    lab: Lab, group: Group
) -> None:
    first, second = group.sides
    ran = lab.run(
        first.path.connect(*HOST_OPTIONS),
        (
            "add_path",
            second.link.port,
            f"--dhchap-secret={second.disk.secret}",
            *HOST_OPTIONS,
        ),
        f"path_is {first.link.port} optimized",
        f"path_is {second.link.port} non-optimized",
        "passes_begin",
        *[step for _ in range(ROUNDS) for name in FAULTS for step in (f"fault {name}", BOTH_LIVE)],
        "passes_end",
        "verify libaio 4k-64k 16 16",
        "disconnect",
        calls=group.calls(),
        timeout=1500,
    )
    found = pauses(ran.directory)
    for name in FAULTS:
        print(f"pause, {name}: {summary(found[name])}")
    every = [each for name in FAULTS for each in found[name]]
    print(f"pause, all: {summary(every)}")
    assert {name: len(found[name]) for name in FAULTS} == dict.fromkeys(FAULTS, ROUNDS)
    assert max(every) < PAUSE_SECONDS_MAX
