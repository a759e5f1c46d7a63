"""Measurement of a scheme: one lab with its daemons, in which one traffic follows the other."""

import asyncio
import contextlib
import json
import mmap
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.sessions.lab.daemons import Host, fabrics
from benchmarks.sessions.lab.lanes import (
    IDLE_MIN,
    idle_since,
    processor_seconds,
    processor_ticks,
)
from benchmarks.sessions.packets import PROGRAM, Peer
from benchmarks.uno.lab.cells import (
    CONTROL,
    LINE,
    MTU,
    NETWORK,
    PREPARED_SECONDS,
    RECEIVER,
    SENDERS,
    Links,
    Scheme,
    Traffic,
    network,
)
from benchmarks.uno.lab.flow_peer import SLOTS
from benchmarks.uno.lab.runs import Found, Sample, Sender, Spans, record, senders, shares

from sealane.cli.demo.cluster import Daemon
from sealane.lab.lab import Lab, laboratory
from sealane.lab.plan import plan
from sealane.lab.report import run_report

SAMPLE_SECONDS: Final = 0.02
"""Interval at which the receiver's queue, and what has arrived from each host, are read."""
LEAD_SECONDS: Final = 0.3
"""Time from the order to send to the first message: all senders have read it by then."""
PATIENCE_SECONDS: Final = 60.0
"""Time that a message may take beyond its limit until the run fails."""
SETTLE_SECONDS: Final = 20.0
SETTLE_STEP_SECONDS: Final = 0.5
SETTLED_IDLE: Final = 0.7
WARMING: Final = Traffic(name="warming", far=2 * SENDERS, near=SENDERS, bytes=2_000_000)
SESSION_PEER: Final = (sys.executable, "-m", "benchmarks.uno.lab.flow_peer")


class Network:
    """A running lab with the daemons of a scheme."""

    def __init__(self, lab: Lab, scheme: Scheme) -> None:
        self.lab = lab
        self.scheme = scheme
        attached, calls = (plan(lab.topology)[name] for name in (NETWORK, CONTROL))
        self.hosts = {
            each.host: Host(
                namespace=lab.hosts[each.host],
                address=call.addresses[0],
                data_address=each.addresses[0],
            )
            for each, call in zip(attached, calls, strict=True)
        }
        self.daemons: dict[str, Daemon] = {}
        self.names = [each.host for each in attached]
        """Hosts in the order of the emulator."""
        self._runs = 0

    async def run(self, traffic: Traffic, seed: int) -> Found:
        """Send all messages of a traffic."""
        self._runs += 1
        mine = senders(traffic, seed)
        pool = ThreadPoolExecutor(len(mine))
        peers: list[Peer] = []
        prepared = time.monotonic() + PREPARED_SECONDS
        await self.lab.start_schedule()
        try:
            started = await asyncio.to_thread(self._start, mine, peers)
            # All daemons of the network share this machine's cores: let them finish their plans.
            await _settled()
            begin = time.monotonic() + LEAD_SECONDS
            late = begin - prepared
            if traffic.links.outages:
                begin = max(begin, prepared)
            pids = [peer.pid for peer in peers] + [each.pid for each in self.daemons.values()]
            pairs = list(zip(mine, started, strict=True))
            found = await self._send(traffic, pairs, pool, begin, pids)
        finally:
            for peer in peers:
                peer.kill()
            pool.shutdown()
        if traffic.links.outages and late > 0:
            found.void.append(f"the outages began {late:.1f} s before the traffic was ready")
        return found

    def _start(self, mine: Sequence[Sender], peers: list[Peer]) -> list[Peer]:
        """Start the receiver and all senders; return those once they are connected."""

        def start(host: str, *command: str) -> Peer:
            peers.append(Peer(self.hosts[host].namespace, None, *command))
            return peers[-1]

        address = f"{self.hosts[RECEIVER].data_address}:0"
        found = []
        if self.scheme.way == "quic":
            program = str(PROGRAM)
            to = start(RECEIVER, program, "messages", "receive", address, "0", str(MTU)).ask()
            for sender in mine:
                count = str(sender.connections)
                found.append(start(sender.host, program, "flows", "send", to, count, str(MTU)))
        elif self.daemons:
            sessions = [self._sessions(index, sender) for index, sender in enumerate(mine)]
            part: dict[str, Any] = {"socket": str(self._daemon(RECEIVER).socket)}
            part["sessions"] = [each for of_sender in sessions for each in of_sender]
            start(RECEIVER, *SESSION_PEER, "receive", json.dumps(part)).ask()
            to = self._daemon(RECEIVER).addresses["fabric_control"]
            for sender, own in zip(mine, sessions, strict=True):
                part = {
                    "socket": str(self._daemon(sender.host).socket),
                    "sessions": own,
                    "peer_node": _node(RECEIVER),
                    "address": to,
                    "rate": LINE,
                }
                found.append(start(sender.host, *SESSION_PEER, "send", json.dumps(part)))
        else:
            part = {"address": address}
            to = start(RECEIVER, *SESSION_PEER, "receive", json.dumps(part)).ask()
            part = {"address": to, "congestion": self.scheme.way, "rate": LINE}
            for sender in mine:
                line = json.dumps(part | {"connections": sender.connections})
                found.append(start(sender.host, *SESSION_PEER, "send", line))
        for peer in found:
            peer.ask()
        return found

    def _sessions(self, index: int, sender: Sender) -> list[dict[str, Any]]:
        """Return what both ends need to know of a sender's sessions."""
        # Arrays begin at whole pages.
        region_bytes = SLOTS * (sender.longest + mmap.PAGESIZE)
        return [
            {
                "name": f"{self._runs}-{index}-{number}",
                "message_bytes": sender.longest,
                "region_bytes": region_bytes,
            }
            for number in range(sender.connections)
        ]

    def _daemon(self, host: str) -> Daemon:
        return self.daemons[_node(host)]

    async def _sample(self, begin: float) -> Sample:
        report = await self.lab.emulators[NETWORK].report()
        at = time.monotonic() - begin
        sink = self.names.index(RECEIVER)
        access = report["access"]
        return Sample(
            at=at,
            queued=access[sink]["down"]["queued_bytes"],
            arrived=tuple(access[sink]["arrived_bytes"]),
            sent=sum(
                each["up"]["offered_bytes"] for host, each in enumerate(access) if host != sink
            ),
            emulator_seconds=report["cpu_nanos"] / 1e9,
        )

    async def _send(
        self,
        traffic: Traffic,
        pairs: Sequence[tuple[Sender, Peer]],
        pool: ThreadPoolExecutor,
        begin: float,
        pids: Sequence[int],
    ) -> Found:
        found = Found()
        limit = traffic.seconds_max
        loop = asyncio.get_running_loop()

        def ask(sender: Sender, peer: Peer) -> Spans:
            words = [f"{at:.6f}:{length}" for at, length in sender.messages]
            peer.tell(" ".join([f"{begin:.6f}", f"{limit}", *words]))
            spans = json.loads(peer.ask())["spans"]
            return [(int(number), sent, ended) for number, sent, ended in spans]

        await asyncio.sleep(begin - LEAD_SECONDS - time.monotonic())
        ticks, spent = processor_ticks(), processor_seconds(pids)
        waiting = {loop.run_in_executor(pool, ask, *pair): pair[0] for pair in pairs}
        pending = set(waiting)
        await asyncio.sleep(begin - time.monotonic())
        found.samples.append(await self._sample(begin))
        end = begin + traffic.seconds + 2 * limit + PATIENCE_SECONDS
        while pending:
            done, pending = await asyncio.wait(pending, timeout=SAMPLE_SECONDS)
            found.samples.append(await self._sample(begin))
            found.spans += [(waiting[answer], answer.result()) for answer in done]
            if time.monotonic() > end:
                raise TimeoutError(f"{traffic.name}: no answer from {len(pending)} senders")
        found.idle = idle_since(ticks)
        found.processor_seconds = processor_seconds(pids) - spent
        return found


async def _settled() -> None:
    """Wait until most of the processor time is idle, or for SETTLE_SECONDS."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        before = processor_ticks()
        await asyncio.sleep(SETTLE_STEP_SECONDS)
        if idle_since(before) > SETTLED_IDLE:
            return


def _node(host: str) -> str:
    return f"fabric-{host}"


@contextlib.asynccontextmanager
async def running(scheme: Scheme, links: Links, *, seed: int) -> AsyncIterator[Network]:
    """Run a lab, with a fabric for each host if the scheme is one of sessions."""
    topology = network(scheme, links, seed=seed)
    async with laboratory(topology, relays=False) as lab, contextlib.AsyncExitStack() as stack:
        made = Network(lab, scheme)
        if scheme.way == "session":
            # Paths of Unix sockets are short.
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sl-")))
            nodes = {_node(host): each for host, each in made.hosts.items()}
            made.daemons = await stack.enter_async_context(fabrics(scratch, nodes, scheme.fabric))
        yield made


async def measure(
    scheme: Scheme, wanted: Sequence[tuple[Traffic, int]], *, until: float
) -> AsyncIterator[dict[str, Any]]:
    """Yield a record for each traffic with the number of its run, until `until` (monotonic).

    All have the same links.
    """
    traffic, number = wanted[0]
    async with running(scheme, traffic.links, seed=1 + number) as made:
        if made.daemons:
            # Each daemon makes its first plans for these paths, and together they use up the cores.
            await made.run(WARMING, 0)
        for traffic, number in wanted:
            if time.monotonic() > until:
                return
            before = await made.lab.report()
            found = await made.run(traffic, number)
            report = run_report(made.lab.topology, before, await made.lab.report())
            void = [*report.void, *found.void]
            if found.idle < IDLE_MIN:
                void.append(f"only {found.idle:.0%} of processor time was idle")
            measured = record(scheme, traffic, number, found, shares(found, made.names))
            yield measured | {"void": void, "idle": found.idle}
