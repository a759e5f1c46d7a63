"""Measurement in a lab of one condition: the transports send their messages in turn."""

import asyncio
import contextlib
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.sessions.lab import session_peer
from benchmarks.sessions.lab.cells import (
    MTU,
    UNIT_BYTES,
    WAYS,
    Cell,
    Effort,
    topology,
)
from benchmarks.sessions.lab.daemons import FAR, NEAR, Host, fabrics
from benchmarks.sessions.lab.jobs import Answer, Job
from benchmarks.sessions.packets import PROGRAM, Peer

from sealane.cli.demo.cluster import Daemon
from sealane.lab.lab import Lab, laboratory
from sealane.lab.plan import plan as addresses
from sealane.lab.report import run_report
from sealane.planning.planner import Objective, Plan, plan
from sealane.planning.planner.choice import code_of

IDLE_MIN: Final = 0.2
"""Minimum share of idle processor time during a run. Below it, ends in user space wait for a core,
and the result reflects the scheduler."""
ATTEMPTS: Final = 3
"""Maximum number of runs of a cell."""
REGION_BYTES: Final = 128 << 20
"""The most that receives take at a time if there are more than two."""
QUIC: Final = {"quic": "messages", "quic-bbr": "messages-bbr"}
"""Sending commands of the program, by transport."""
PATIENCE_SECONDS: Final = 150.0
"""Time that a job may take beyond its limit, for its first and last messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cell and its results: completion times in seconds, by transport."""

    cell: Cell
    times: dict[str, list[float]]
    unfinished: dict[str, int]
    """Messages that were given up, by transport."""
    scheme: tuple[int, int, int]
    """k, m and depth that the planner would choose by p99 if it knew the loss; k = 0 is selective
    repeat. The daemons choose for themselves."""
    void: list[str]
    """Reasons why the machine, not the link, determined the result; empty if valid."""
    idle: float
    """Share of idle processor time during the turn of the busiest transport."""
    load_average: float
    added_delay_p99: float
    """p99 of the delay added by the emulator on the worst link, in seconds."""
    processor_seconds: dict[str, float]
    """Processor time of both ends, by transport: of sessions that of jobs and fabrics, of others
    that of their processes, in which the kernel's work for them counts, too."""


def processor_ticks() -> tuple[int, int]:
    """Return idle and total processor time since boot, in ticks (proc_stat(5))."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    # Guest time, after the eighth field, is already part of user time.
    return ticks[3] + ticks[4], sum(ticks[:8])


def idle_since(before: tuple[int, int]) -> float:
    """Return the idle share of processor time since an earlier `processor_ticks`."""
    after = processor_ticks()
    return (after[0] - before[0]) / max(after[1] - before[1], 1)


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of running processes together (proc_pid_stat(5))."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(found[11]) + int(found[12]) for found in fields) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What the transports answered to a job, one after the other."""

    answers: dict[str, list[Answer]]
    processor_seconds: dict[str, float]
    idle: float
    """Share of idle processor time during the turn of the busiest transport."""


def plan_for(cell: Cell) -> Plan:
    """Return the planner's plan for the true loss."""
    return plan(cell.path, Objective.P99)


def _ends(lane: str, lab: Lab) -> tuple[Host, Host]:
    near, far = [attached.addresses[0] for attached in addresses(lab.topology)[lane]]
    return (
        Host(namespace=lab.hosts[f"{lane}-l"], address=near),
        Host(namespace=lab.hosts[f"{lane}-r"], address=far),
    )


def _jobs(near: Host, far: Host, daemons: tuple[Daemon, Daemon], cell: Cell) -> list[Peer]:
    """Start the sending and the receiving job of a lane's fabrics."""
    message_bytes = max(size * cell.rate // cell.links.full_rate for size in cell.links.sizes)
    slots = max(2, min(session_peer.SLOTS, REGION_BYTES // message_bytes))
    part = {
        "message_bytes": message_bytes,
        "slots": slots,
        # Arrays begin at whole pages.
        "region_bytes": slots * (message_bytes + mmap.PAGESIZE),
        "peer_address": daemons[1].addresses["fabric_control"],
        "rate_bits_per_second": cell.rate,
    }
    command = (sys.executable, "-m", "benchmarks.sessions.lab.session_peer")
    mine = json.dumps(part | {"socket": str(daemons[1].socket)})
    receiver = Peer(far.namespace, None, *command, "receive", mine)
    receiver.ask()
    mine = json.dumps(part | {"socket": str(daemons[0].socket)})
    return [Peer(near.namespace, None, *command, "send", mine), receiver]


def _peers(way: str, lane: str, lab: Lab, rate: int) -> list[Peer]:
    """Start the sending and the receiving process of a lane of TCP or QUIC."""
    ends = _ends(lane, lab)
    (left, right), far = [end.namespace for end in ends], ends[1].address
    command: tuple[str, ...]
    if (messages := QUIC.get(way)) is not None:
        receiver = Peer(right, None, str(PROGRAM), "messages", "receive", f"{far}:0", "0", str(MTU))
        sender = Peer(left, None, str(PROGRAM), messages, "send", receiver.ask(), "0", str(MTU))
        return [sender, receiver]
    command = (sys.executable, "-m", "benchmarks.sessions.lab.tcp_peer")
    receiver = Peer(right, None, *command, "receive", f"{far}:0")
    return [Peer(left, None, *command, "send", receiver.ask(), way, str(rate)), receiver]


class Lanes:
    """The processes of one lab."""

    def __init__(self, lab: Lab, cell: Cell) -> None:
        self._lab = lab
        self._cell = cell
        self._lanes = cell.links.lanes
        self._senders: list[tuple[str, Peer]] = []
        self._peers: list[Peer] = []
        self._pids: dict[str, list[int]] = {way: [] for way in WAYS}
        self._pool = ThreadPoolExecutor(self._lanes * len(WAYS))

    def start(self, daemons: Sequence[tuple[Daemon, Daemon]]) -> None:
        """Start the processes of all lanes, for sessions beside their running daemons."""
        for way, number in product(WAYS, range(self._lanes)):
            lane = f"{way}-{number}"
            if way == "session":
                near, far = _ends(lane, self._lab)
                peers = _jobs(near, far, daemons[number], self._cell)
                self._pids[way] += [daemon.pid for daemon in daemons[number]]
            else:
                peers = _peers(way, lane, self._lab, self._cell.rate)
            self._senders.append((way, peers[0]))
            self._peers += peers
            self._pids[way] += [peer.pid for peer in peers]

    def close(self) -> None:
        """Kill all processes."""
        for peer in self._peers:
            peer.kill()
        self._pool.shutdown()

    async def send(self, job: Job) -> Turns:
        """Run a job on all lanes, one transport after the other.

        If transports ran at the same time, those in user space would wait for a core while the
        kernel's wouldn't.
        """
        loop = asyncio.get_running_loop()

        def ask(peer: Peer) -> Answer:
            peer.tell(job.line())
            return Answer(**json.loads(peer.ask()))

        answers: dict[str, list[Answer]] = {}
        spent: dict[str, float] = {}
        idle = 1.0
        for way in WAYS:
            before, spent_before = processor_ticks(), processor_seconds(self._pids[way])
            peers = [peer for name, peer in self._senders if name == way]
            waiting = [loop.run_in_executor(self._pool, ask, peer) for peer in peers]
            _, late = await asyncio.wait(waiting, timeout=job.seconds + PATIENCE_SECONDS)
            if late:
                raise TimeoutError(f"{job}: no answer from {way}")
            answers[way] = [answer.result() for answer in waiting]
            spent[way] = processor_seconds(self._pids[way]) - spent_before
            idle = min(idle, idle_since(before))
        return Turns(answers=answers, processor_seconds=spent, idle=idle)


@contextlib.asynccontextmanager
async def _lanes(lab: Lab, cell: Cell) -> AsyncIterator[Lanes]:
    lanes = Lanes(lab, cell)
    async with contextlib.AsyncExitStack() as stack:
        daemons = []
        for number in range(cell.links.lanes):
            # Paths of Unix sockets are short.
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sl-")))
            near, far = _ends(f"session-{number}", lab)
            settings = {"rate_max_bits_per_second": cell.rate}
            started = fabrics(scratch, {NEAR: near, FAR: far}, settings)
            both = await stack.enter_async_context(started)
            daemons.append((both[NEAR], both[FAR]))
        stack.callback(lanes.close)
        await asyncio.to_thread(lanes.start, daemons)
        yield lanes


async def measure(
    wanted: Sequence[Cell], effort: Effort, *, until: float, attempts: int = ATTEMPTS
) -> AsyncIterator[Measured]:
    """Measure cells of one kind of link and one condition until `until` (monotonic).

    A cell that the machine disturbed is measured again, up to `attempts` times in all.
    """
    first = wanted[0]
    found = plan_for(first)
    network = topology(first.links, first.condition, first.rate)
    async with laboratory(network, relays=False) as lab, _lanes(lab, first) as lanes:
        # All processes have started before anything is timed.
        await lanes.send(Job(bytes=UNIT_BYTES, count=1, seconds=1.0, connection="first"))
        for cell in wanted:
            job = Job(
                bytes=cell.bytes,
                count=-(-effort.count // cell.links.lanes),
                seconds=cell.seconds * effort.share,
                connection=cell.connection,
            )
            for _ in range(attempts):
                if time.monotonic() > until:
                    return
                before = await lab.report()
                turns = await lanes.send(job)
                report = run_report(network, before, await lab.report())
                void = list(report.void)
                if turns.idle < IDLE_MIN:
                    void.append(f"only {turns.idle:.0%} of processor time was idle")
                if not void:
                    break
            answers = turns.answers
            yield Measured(
                cell=cell,
                times={way: [t for a in mine for t in a.times] for way, mine in answers.items()},
                unfinished={way: sum(a.unfinished for a in mine) for way, mine in answers.items()},
                scheme=code_of(found.row(cell.bytes).scheme),
                void=void,
                idle=turns.idle,
                load_average=os.getloadavg()[0],
                added_delay_p99=max(way.slip_p99_micros for way in report.ways) / 1e6,
                processor_seconds=turns.processor_seconds,
            )


def to_dict(measured: Measured) -> dict[str, Any]:
    """Return a dictionary for JSON."""
    links, condition, full_bytes, connection, rate = measured.cell.key
    return {
        "links": links,
        "condition": condition,
        "full_bytes": full_bytes,
        "connection": connection,
        "rate": rate,
        "bytes": measured.cell.bytes,
        "scheme": measured.scheme,
        "void": measured.void,
        "idle": measured.idle,
        "load_average": measured.load_average,
        "added_delay_p99": measured.added_delay_p99,
        "processor_seconds": measured.processor_seconds,
        "unfinished": measured.unfinished,
        "times": measured.times,
    }
