"""What many volumes cost: threads, descriptors and memory of each daemon, and how long verbs take.

Broker, target and gateway are real daemons on this machine. `--volumes` volumes of 1 MiB in files
are created, listed and attached, and `--hosts` of them get a host with one queue. One of these
hosts is busy, before and after the others connect. Then the gateway and the target are restarted.
"ready": it accepts calls; "served": all volumes are open, or exported again.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.control.result import Result
from rich import box
from rich.table import Table

import sealane.client
from sealane.cli.demo.cluster import Daemon, broker_section, daemon, enrolment
from sealane.client import Client, Volume
from sealane.crypto.evidence.software import SoftwareKey
from sealane.protocol.kinds import StoreHealth

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from attached_hosts import host_at
from ports import addresses_of_our_own

HOST: Final = "nqn.2014-08.org.nvmexpress:uuid:0f0f0f0f-0000-4000-8000-00000000beef"
SIZE_BYTES: Final = 1 << 20
AT_ONCE: Final = 200
IDLE_SECONDS: Final = 10.0
WRITES: Final = 2000
CALLS_AT_ONCE: Final = 32
CONNECTED_AT_ONCE: Final = 8
SERVED_SECONDS: Final = 120.0
SETTLED_SECONDS: Final = 3.0


def run(arguments: argparse.Namespace) -> Result:
    """Measure once, with `arguments.volumes` volumes."""
    samples = asyncio.run(_measure(arguments.volumes, min(arguments.hosts, arguments.volumes)))
    table = Table(title=f"{arguments.volumes} volumes of 1 MiB in files", box=box.SIMPLE_HEAD)
    columns = (
        *("after", "seconds", "daemon", "threads", "descriptors", "resident MiB"),
        *("CPU s", "context switches"),
    )
    for column in columns:
        table.add_column(column, justify="left" if column in {"after", "daemon"} else "right")
    for sample in samples:
        for number, (name, used) in enumerate(sample["daemons"].items()):
            table.add_row(
                *((sample["after"], f"{sample['seconds']:.2f}") if number == 0 else ("", "")),
                name,
                str(used["threads"]),
                str(used["descriptors"]),
                f"{used['resident_bytes'] / 2**20:.0f}",
                f"{used['cpu_seconds']:.2f}",
                str(used["context_switches"]),
            )
    return Result(table, samples)


class _Site:
    """Broker, target and gateway in one directory, at addresses that outlive a restart."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._keys = {name: SoftwareKey.create() for name in ("target", "gateway")}
        self._listen = dict(zip(("data", "control", "front"), addresses_of_our_own(3), strict=True))
        self._broker = broker_section(scratch, self._keys)
        self._enrolments: dict[str, dict[str, dict[str, object]]] = {}
        self.running: dict[str, Daemon] = {}
        self._stacks: dict[str, AsyncExitStack] = {}

    async def start(self, name: str) -> None:
        stack = AsyncExitStack()
        (self._scratch / f"{name}.notify").unlink(missing_ok=True)
        started = daemon(self._scratch, name, self._sections(name))
        self.running[name] = await stack.enter_async_context(started)
        self._stacks[name] = stack
        if name == "broker":
            broker = self.running[name]
            for node, key in self._keys.items():
                self._enrolments[node] = enrolment(self._scratch, node, key, broker)

    async def stop(self, name: str) -> None:
        del self.running[name]
        await self._stacks.pop(name).aclose()

    def _sections(self, name: str) -> dict[str, dict[str, object]]:
        listen = self._listen
        if name == "broker":
            return self._broker
        if name == "target":
            own: dict[str, object] = {
                "listen": listen["data"],
                "control_listen": listen["control"],
                "store": "file",
                # Each would otherwise allocate some 40 MB.
                "thin": True,
            }
        else:
            own = {
                "listen": listen["front"],
                "target_node": "target",
                "target_address": listen["control"],
            }
        return {**self._enrolments[name], name: own}


@asynccontextmanager
async def _site() -> AsyncIterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="sealane-benchmark-") as directory:
        site = _Site(Path(directory))
        try:
            for name in ("broker", "target", "gateway"):
                await site.start(name)
            yield site
        finally:
            for name in [*site.running][::-1]:
                await site.stop(name)


async def _measure(count: int, hosts_max: int) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    async with _site() as site, AsyncExitStack() as hosts:

        async def sample(after: str, work: Callable[[], Awaitable[Any]]) -> Any:
            before = {running.pid: usage(running.pid) for running in site.running.values()}
            began = time.perf_counter()
            result = await work()
            seconds = time.perf_counter() - began
            used = {running.pid: usage(running.pid) for running in site.running.values()}
            # Threads that end when idle have a moment to do so.
            await asyncio.sleep(SETTLED_SECONDS)
            daemons = {
                name: usage(running.pid) | _spent(used[running.pid], before.get(running.pid))
                for name, running in site.running.items()
            }
            samples.append({"after": after, "seconds": seconds, "daemons": daemons})
            if isinstance(result, dict):
                samples[-1] |= result
            print(f"{after}: {seconds:.2f} s", file=sys.stderr, flush=True)
            return result

        async with sealane.client.connect(str(site.running["gateway"].socket)) as client:
            await sample("start, no volume", _nothing)
            await sample(f"create {count}", lambda: _create(client, count))
            volumes = await sample(f"list {count}", client.volumes.list)
            await sample(f"list {count} again", client.volumes.list)
            first, rest = volumes[:AT_ONCE], volumes[AT_ONCE:]
            attached = await sample(
                f"attach {len(first)} at once", lambda: _attach(client, first, AT_ONCE)
            )
            if rest:
                more = f"attach {len(rest)} more"
                attached += await sample(more, lambda: _attach(client, rest, CALLS_AT_ONCE))
            busy, others = attached[0], attached[1:hosts_max]
            (queue,) = await _connect(hosts, [busy])
            await sample(f"{WRITES} writes to one volume", lambda: _write(queue))
            connecting = f"connect {len(others)} hosts"
            await sample(connecting, lambda: _connect(hosts, others))
            await sample(f"{IDLE_SECONDS:.0f} s idle", lambda: asyncio.sleep(IDLE_SECONDS))
            await sample(f"{WRITES} writes beside them", lambda: _write(queue))
            await hosts.aclose()
        for name in ("gateway", "target"):
            await site.stop(name)
            await sample(f"restart of the {name}: ready", lambda name=name: site.start(name))
            async with sealane.client.connect(str(site.running["gateway"].socket)) as client:
                await sample(f"restart of the {name}: served", lambda: _served(client, count))
    return samples


def usage(pid: int) -> dict[str, Any]:
    """Return threads by name, descriptors, memory, CPU time and context switches of a process."""
    process = Path("/proc", str(pid))
    names: Counter[str] = Counter()
    switches = 0
    for task in (process / "task").iterdir():
        try:
            status = dict(
                line.split(":", 1) for line in (task / "status").read_text().splitlines() if line
            )
        except (FileNotFoundError, ProcessLookupError):
            # It has ended meanwhile.
            continue
        names[status["Name"].strip()] += 1
        switches += int(status["voluntary_ctxt_switches"])
        switches += int(status["nonvoluntary_ctxt_switches"])
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    return {
        "threads": names.total(),
        "threads_by_name": dict(names),
        "descriptors": sum(1 for _ in (process / "fd").iterdir()),
        "resident_bytes": int((process / "statm").read_text().split()[1]) * 4096,
        "cpu_seconds": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        "context_switches": switches,
    }


def _spent(after: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a process has used meanwhile; of one that began meanwhile, all.

    Switches of threads that ended aren't counted.
    """
    known = before or {"cpu_seconds": 0.0, "context_switches": 0}
    keys = ("cpu_seconds", "context_switches")
    return {key: round(max(after[key] - known[key], 0), 2) for key in keys}


async def _write(queue: Any) -> dict[str, Any]:
    """Write to a volume, one block at a time; return the latencies."""
    seconds = []
    for number in range(WRITES):
        began = time.perf_counter()
        await queue.write(number % (SIZE_BYTES // 4096), bytes(4096))
        seconds.append(time.perf_counter() - began)
    cuts = statistics.quantiles(seconds, n=100)
    found = {"p50_seconds": cuts[49], "p99_seconds": cuts[98]}
    print(f"  p50 {cuts[49] * 1e3:.2f} ms, p99 {cuts[98] * 1e3:.2f} ms", file=sys.stderr)
    return found


async def _nothing() -> None: ...


async def _limited(works: Sequence[Callable[[], Awaitable[Any]]], at_once: int) -> list[Any]:
    limit = asyncio.Semaphore(at_once)

    async def one(work: Callable[[], Awaitable[Any]]) -> Any:
        async with limit:
            return await work()

    return await asyncio.gather(*map(one, works))


async def _create(client: Client, count: int) -> None:
    def create(number: int) -> Callable[[], Awaitable[Any]]:
        name = f"volume {number}"
        return lambda: client.volumes.create(display_name=name, size_bytes=SIZE_BYTES)

    await _limited([*map(create, range(count))], CALLS_AT_ONCE)


async def _attach(client: Client, volumes: Sequence[Volume], at_once: int) -> list[Volume]:
    def attach(volume: Volume) -> Callable[[], Awaitable[Any]]:
        return lambda: client.volumes.attach(volume.name, host_nqn=HOST)

    return await _limited([*map(attach, volumes)], at_once)


async def _connect(hosts: AsyncExitStack, volumes: Sequence[Volume]) -> list[Any]:
    async def connect(volume: Volume) -> Any:
        controller = await hosts.enter_async_context(host_at(volume, HOST))
        queue = await controller.open_queue(1)
        hosts.push_async_callback(queue.close)
        await queue.write(0, bytes(4096))
        return queue

    return await _limited([lambda v=volume: connect(v) for volume in volumes], CONNECTED_AT_ONCE)


async def _served(client: Client, count: int) -> None:
    async with asyncio.timeout(SERVED_SECONDS):
        while True:
            began = time.perf_counter()
            volumes = await client.volumes.list(with_store=True)
            if sum(map(_is_served, volumes)) == count:
                return
            # Asking is work for all three, too.
            await asyncio.sleep(max(0.1, 5 * (time.perf_counter() - began)))


def _is_served(volume: Volume) -> bool:
    return (
        volume.attachment is not None
        and volume.store is not None
        and volume.store.health in {StoreHealth.GOOD, StoreHealth.UNKNOWN}
    )
