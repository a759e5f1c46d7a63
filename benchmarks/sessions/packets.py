"""Processor time of bulk transfer over a clean link: sealed sessions, TLS over TCP, QUIC."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from benchmarks.sessions.profile import profiled
from benchmarks.sessions.veth import ADDRESSES, veth

from sealane.lab.namespaces import Namespace

FOLDER: Final = Path(__file__).parent
PROGRAM: Final = FOLDER / "target/release/sealane-benchmark-sessions"
OVERHEAD_BYTES: Final = 59 + 28
"""Bytes on the wire per unit in addition to its payload (docs/formats/session-wire.md)."""
UNIT_GRAIN_BYTES: Final = 64
"""Whole cache lines, and so whole AES blocks: saves 22 ns of AEAD per packet over 1413 bytes."""
WAYS: Final = ("session", "tls", "quic")
PACED_WAYS: Final = ("session", "tls")
"""quinn has no pacing rate to set."""
TIMEOUT_SECONDS: Final = 300


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer. Processor seconds are those of the ends' processes, including the kernel."""

    way: str
    mtu: int
    bytes: int
    seconds: float
    processor_sender: float
    processor_receiver: float
    processor_job: float
    """The part used by the jobs of both ends; 0 for streams, which do all work in the job."""
    statistics: dict[str, int]
    """Statistics of the sending session."""
    pace: int = 0
    """Bit/s to which the sender was limited; 0: as fast as possible."""

    @property
    def processor_per_gb(self) -> float:
        """Processor seconds of both ends per 10^9 bytes."""
        return (self.processor_sender + self.processor_receiver) / self.bytes * 1e9

    @property
    def packets_per_core_second(self) -> float:
        """Full packets per processor second of the busier end."""
        packets = self.bytes / unit_bytes(self.mtu)
        return packets / max(self.processor_sender, self.processor_receiver)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def unit_bytes(mtu: int) -> int:
    """Return the largest unit for a link with this MTU."""
    return (mtu - OVERHEAD_BYTES) // UNIT_GRAIN_BYTES * UNIT_GRAIN_BYTES


def build() -> None:
    """Build the TLS and QUIC peers."""
    command = ["cargo", "build", "--release", "--quiet", "--locked"]
    subprocess.run([*command, "--manifest-path", str(FOLDER / "Cargo.toml")], check=True)


class Peer:
    """A process in a namespace, pinned to a core or not (None); it reads and writes lines."""

    def __init__(self, namespace: Namespace, core: int | None, *command: str) -> None:
        self._name = " ".join(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_placed(namespace, core),  # noqa: PLW1509 - two system calls, no locks
        )
        # Both are pipes, as requested.
        self._input = cast("IO[str]", self._process.stdin)
        self._output = cast("IO[str]", self._process.stdout)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Write a line."""
        self._input.write(line + "\n")
        self._input.flush()

    def ask(self) -> str:
        """Read a line."""
        if not (line := self._output.readline()):
            raise RuntimeError(f"{self._name} ended with {self._process.wait()}")
        return line.strip()

    def finish(self) -> None:
        """Wait until the process ends."""
        self._process.communicate(timeout=TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Kill the process if it is still running."""
        self._process.kill()
        self._process.communicate()


def _placed(namespace: Namespace, core: int | None) -> Callable[[], None]:
    def place() -> None:
        namespace.enter()
        if core is not None:
            os.sched_setaffinity(0, {core})

    return place


def _ends(ends: tuple[Namespace, Namespace], *, mtu: int, size: int, rate: int) -> list[Peer]:
    """Start both ends of a session; they don't know each other's address yet."""
    command = (sys.executable, "-m", "benchmarks.sessions.peer")
    peers = [Peer(end, core, *command) for core, end in enumerate(ends)]
    for index, peer in enumerate(peers):
        part = {
            "address": ADDRESSES[index],
            "is_sender": index == 0,
            "unit_bytes": unit_bytes(mtu),
            "rate_bits_per_second": rate,
            "bytes": size,
        }
        peer.tell(json.dumps(part))
    return peers


def _begin(peers: list[Peer]) -> None:
    addresses = [peer.ask() for peer in peers]
    for peer, address in zip(peers, reversed(addresses), strict=True):
        peer.tell(address)


def _stream(
    way: str, ends: tuple[Namespace, Namespace], *, mtu: int, size: int, pace: int
) -> list[Peer]:
    rest = (str(size), str(mtu), str(pace // 8))
    receiver = Peer(ends[1], 1, str(PROGRAM), way, "receive", f"{ADDRESSES[1]}:0", *rest)
    sender = Peer(ends[0], 0, str(PROGRAM), way, "send", receiver.ask(), *rest)
    return [sender, receiver]


async def profile(*, mtu: int, size: int, rate: int) -> dict[str, float]:
    """Move `size` bytes over a session; return the shares of its processor time by activity."""
    async with veth(mtu) as ends:
        peers = _ends(ends, mtu=mtu, size=size, rate=rate)
        try:
            with profiled([peer.pid for peer in peers]) as found:
                _begin(peers)
                for peer in peers:
                    await asyncio.to_thread(peer.ask)
            for peer in peers:
                peer.tell("done")
                peer.finish()
        finally:
            for peer in peers:
                peer.kill()
    return found


async def transfer(way: str, *, mtu: int, size: int, rate: int = 0, pace: int = 0) -> Sample:
    """Move `size` bytes in one direction and return the figures of both ends.

    `rate`: a session's rate, bit/s. `pace`: limits any sender to that many bit/s instead; QUIC, by
    its link.
    """
    async with veth(mtu, 0 if way in PACED_WAYS else pace) as ends:
        if way == "session":
            peers = _ends(ends, mtu=mtu, size=size, rate=pace or rate)
            _begin(peers)
        else:
            peers = _stream(way, ends, mtu=mtu, size=size, pace=pace)
        try:
            sent, received = [json.loads(await asyncio.to_thread(peer.ask)) for peer in peers]
            for peer in peers:
                if way == "session":
                    peer.tell("done")
                peer.finish()
        finally:
            for peer in peers:
                peer.kill()
    return Sample(
        way=way,
        mtu=mtu,
        bytes=received["bytes"],
        seconds=received["seconds"],
        processor_sender=sent["processor_seconds"],
        processor_receiver=received["processor_seconds"],
        processor_job=sum(end.get("job_seconds", 0.0) for end in (sent, received)),
        statistics=sent.get("statistics", {}),
        pace=pace,
    )
