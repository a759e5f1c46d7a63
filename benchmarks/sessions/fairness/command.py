"""`python -m benchmarks.sessions fairness`: who gets what of a fabric's rate, and who waits.

Two daemons as shipped, on loopback, whose rate is the bottleneck. Shares: sessions of one job, jobs
with a session each, jobs with several, jobs with long and short messages. Waits: messages of 1 KiB
behind a long one of the same session, with and without a priority, and beside one of another
session of the same job. Nothing here is a link: what is measured is how the fabric shares.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.sessions.lab.daemons import FAR, NEAR, Host, fabrics
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sealane.cli.demo.cluster import Daemon

SUMMARY: Final = "how sessions, jobs and messages of different priorities share a fabric"
RATE: Final = 200_000_000
LONG: Final = 64 << 20
PACKET_SECONDS: Final = 1500 * 8 / RATE
SETTLE_SECONDS: Final = 1.0
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One sending job."""

    sessions: int = 1
    message_bytes: int = MIB


SHARES: Final[dict[str, tuple[Load, ...]]] = {
    "4 sessions of a job": (Load(sessions=4),),
    "4 jobs of a session": (Load(),) * 4,
    "jobs of 1 and 3 sessions": (Load(), Load(sessions=3)),
    "jobs of 4 MiB and 64 KiB": (Load(message_bytes=4 * MIB), Load(message_bytes=MIB >> 4)),
}
WAITS: Final = (
    ("alone", 0, 40),
    ("same session", 0, 1),
    ("same session", 7, 40),
    ("another session", 0, 40),
    ("another session", 7, 40),
)
"""Where a long message is, the priority of the short ones, and how many of them a long one has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the flows of a case got."""

    case: str
    megabits_per_second: tuple[tuple[float, ...], ...]
    """By job and session."""

    @property
    def jain(self) -> float:
        """Jain's index: over the jobs, or over the sessions of the only one."""
        flows = [sum(job) for job in self.megabits_per_second]
        flows = flows if len(flows) > 1 else list(self.megabits_per_second[0])
        return sum(flows) ** 2 / (len(flows) * sum(flow * flow for flow in flows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How long short messages took."""

    long_message: str
    priority: int
    count: int
    p50_ms: float
    p99_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("--seconds", type=float, default=10.0, help="for each share")
    parser.add_argument("--repeats", type=int, default=10, help="long messages of each wait")
    parser.add_argument("--output", type=Path, default=Path("sealane-sessions/fairness"))


class Jobs:
    """The processes that use the two daemons."""

    def __init__(self, near: Daemon, far: Daemon, *, region_bytes: int = LONG + MIB) -> None:
        self._near, self._far = near, far
        self._defaults = {"region_bytes": region_bytes, "rate_bits_per_second": RATE}

    async def start(self, what: str, daemon: Daemon, **part: Any) -> asyncio.subprocess.Process:
        """Start one, and wait for its first line if it writes one before it begins."""
        told = self._defaults | part
        told |= {"socket": str(daemon.socket), "settle_seconds": SETTLE_SECONDS}
        told |= {"peer_address": self._far.addresses["fabric_control"]}
        module = ("-m", "benchmarks.sessions.fairness.peer")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *module, what, json.dumps(told)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        if what != "overtake" and process.stdout is not None:
            await process.stdout.readline()
        return process

    async def shares(self, case: str, loads: tuple[Load, ...], seconds: float) -> Share:
        """Run all jobs of a case at the same time."""
        started = [
            await self.start("share", self._near, seconds=seconds, **asdict(load)) for load in loads
        ]
        ended = await asyncio.gather(*(process.communicate(b"go\n") for process in started))
        bits = [json.loads(output)["bytes"] for output, _ in ended]
        rates = tuple(tuple(8e-6 * count / seconds for count in job) for job in bits)
        return Share(case=case, megabits_per_second=rates)

    async def waits(self, where: str, priority: int, count: int, repeats: int) -> Wait:
        """Send short messages beside or behind long ones."""
        process = await self.start(
            "overtake", self._near, where=where, priority=priority, count=count, repeats=repeats,
            message_bytes=LONG,
        )  # fmt: skip
        output, _ = await process.communicate()
        found = [1e3 * each for each in json.loads(output)["seconds"]]
        return Wait(
            long_message=where,
            priority=priority,
            count=len(found),
            p50_ms=median(found),
            p99_ms=quantiles(found, n=100)[98] if len(found) > 1 else found[0],
        )


async def _measure(arguments: argparse.Namespace) -> tuple[list[Share], list[Wait]]:
    settings = {
        "rate_max_bits_per_second": RATE,
        "region_bytes_max": 2 * LONG,
        "sessions_max": 64,
        "unit_bytes": 1408,
    }
    hosts = {name: Host(address="127.0.0.1") for name in (NEAR, FAR)}
    with tempfile.TemporaryDirectory(prefix="sealane-fairness-") as scratch, Progress() as progress:
        task = progress.add_task("measuring", total=len(SHARES) + len(WAITS))
        async with fabrics(Path(scratch), hosts, settings) as daemons:
            jobs = Jobs(daemons[NEAR], daemons[FAR])
            receiver = await jobs.start("receive", daemons[FAR])
            try:
                shares, waits = [], []
                for case, loads in SHARES.items():
                    shares.append(await jobs.shares(case, loads, arguments.seconds))
                    progress.advance(task)
                for where, priority, count in WAITS:
                    waits.append(await jobs.waits(where, priority, count, arguments.repeats))
                    progress.advance(task)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    receiver.kill()
                await receiver.wait()
    return shares, waits


def tables(shares: list[Share], waits: list[Wait]) -> tuple[Table, Table]:
    """Return both tables."""
    first = Table("flows", "Mbit/s by job", "Jain", title=f"Shares of {RATE / 1e6:.0f} Mbit/s")
    for share in shares:
        flows = " | ".join(
            " ".join(f"{session:.1f}" for session in job) for job in share.megabits_per_second
        )
        first.add_row(share.case, flows, f"{share.jain:.4f}")
    alone = waits[0].p50_ms
    second = Table(
        *("a 64 MiB message is in", "priority", "messages", "p50 ms", "p99 ms", "packets' wait"),
        title="Messages of 1 KiB; a packet takes 0.06 ms",
    )
    for wait in waits:
        ahead = (wait.p50_ms - alone) * 1e-3 / PACKET_SECONDS
        second.add_row(
            wait.long_message.replace("alone", "no session"), str(wait.priority), str(wait.count),
            f"{wait.p50_ms:.2f}", f"{wait.p99_ms:.2f}", f"{ahead:.1f}",
        )  # fmt: skip
    return first, second


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and save."""
    shares, waits = asyncio.run(_measure(arguments))
    console = Console(width=120)
    for table in tables(shares, waits):
        console.print(table)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = {
        "rate_bits_per_second": RATE,
        "shares": [asdict(share) | {"jain": share.jain} for share in shares],
        "waits": [asdict(wait) for wait in waits],
    }
    (arguments.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"saved in {arguments.output / 'results.json'}")
    return 0
