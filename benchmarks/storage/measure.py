"""Measurement of one cell on one system, with the processor time of every process."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from benchmarks.storage.cells import Cell, Sample

from sealane import _native
from sealane.client import Volume
from sealane.errors import UnavailableError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import ConnectedQueue, HostController

WARM_UP_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A subsystem to measure, and the processes that serve it."""

    name: str
    traddr: str
    trsvcid: int
    subsystem_nqn: str
    host_nqn: str
    dhchap_secret: str | None = None
    processes: Mapping[str, int]
    """Process ids by name."""

    @classmethod
    def secure(cls, volume: Volume, *, host_nqn: str, processes: Mapping[str, int]) -> Self:
        """Return the subsystem of an attached volume; UnavailableError if it isn't attached."""
        attachment = volume.attachment
        if attachment is None:
            raise UnavailableError("volume.detached", f"{volume.name} isn't attached")
        return cls(
            name="secure",
            traddr=attachment.traddr,
            trsvcid=attachment.trsvcid,
            subsystem_nqn=attachment.subsystem_nqn,
            host_nqn=host_nqn,
            dhchap_secret=attachment.dhchap_secret,
            processes=processes,
        )


def process_cpu_seconds(pid: int) -> float:
    """Return the processor time used so far by all threads of a process."""
    cpu_clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) computes it
    return time.clock_gettime_ns(cpu_clock) / 1e9


async def measure(
    system: System, cell: Cell, *, seconds: float, span_bytes: int, round_: int
) -> Sample:
    """Connect, warm up, run the load for `seconds`, disconnect."""
    async with contextlib.AsyncExitStack() as stack:
        host = await stack.enter_async_context(host_of(system))
        await host.request_queues(cell.queues)
        namespace = await host.identify_namespace()
        queues = []
        for queue_id in range(1, cell.queues + 1):
            connected = await host.connect_queue(queue_id)
            stack.callback(connected.close)
            queues.append(connected)
        span = min(span_bytes, namespace.block_count * namespace.block_bytes)
        await load(queues, namespace, cell, seconds=WARM_UP_SECONDS, span=span, seed=round_)
        before = {name: process_cpu_seconds(pid) for name, pid in system.processes.items()}
        result = await load(queues, namespace, cell, seconds=seconds, span=span, seed=round_)
        after = {name: process_cpu_seconds(pid) for name, pid in system.processes.items()}
    commands = max(result["commands"], 1)
    cpu = {name: (after[name] - before[name]) * 1e6 / commands for name in before}
    return Sample(
        system=system.name,
        cell=cell.name,
        round=round_,
        commands=result["commands"],
        seconds=result["seconds"],
        bytes_per_second=result["bytes"] / result["seconds"],
        commands_per_second=result["commands"] / result["seconds"],
        latency_p50_us=result["latency_p50_us"],
        latency_p99_us=result["latency_p99_us"],
        latency_p999_us=result["latency_p999_us"],
        cpu_us_per_command={"load": result["cpu_seconds"] * 1e6 / commands, **cpu},
    )


def host_of(system: System) -> HostController:
    """Return a host for the subsystem."""
    credentials = None
    if system.dhchap_secret:
        credentials = Credentials(secret=HostSecret.parse(system.dhchap_secret))
    return HostController(
        traddr=system.traddr,
        trsvcid=system.trsvcid,
        subsystem_nqn=system.subsystem_nqn,
        host_nqn=system.host_nqn,
        credentials=credentials,
    )


async def load(
    queues: list[ConnectedQueue],
    namespace: NamespaceIdentity,
    cell: Cell,
    *,
    seconds: float,
    span: int,
    seed: int,
) -> "_native.LoadResult":
    """Run the engine's load generator, which has its own threads."""
    settings: _native.LoadSettings = {
        "is_write": cell.operation == "write",
        "is_random": cell.pattern == "random",
        "io_bytes": cell.io_bytes,
        "depth": cell.depth,
        "span_bytes": span,
        "seconds": seconds,
        "seed": seed,
        "is_verified": False,
    }
    described_queues = [queue.describe(block_bytes=namespace.block_bytes) for queue in queues]
    return await asyncio.to_thread(_native.run_load, described_queues, settings)
