"""In the lab's guest: sessions of real daemons over soft-RoCE. `verbs_sessions.py SCENARIO MODE`.

It needs the two devices that `roce_pair` makes (jobs/verbs.sh) and prints one line of JSON.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbs_guest import opened

from fabric_daemons import FabricDaemons, fabric_daemons
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.client.grants import listen_session
from sealane.client.messages import ErasureCoded, SelectiveRepeat
from sealane.client.session import Session
from sealane.protocol.v1 import sessions_pb2

HERE, THERE = "10.9.0.1", "10.9.0.2"
REGION = 8 << 20
RATE = 200_000_000
MODE = sys.argv[2].replace("udp", "send")
"""Of queue pairs, where there are any."""
BENCH_BYTES, BENCH_MESSAGES = 512 << 10, 12
ROCE_PORT = 4791
ETH_P_IP = 0x0800
BTH_AT = 14 + 20 + 8
"""Place of the base transport header in a frame: after Ethernet, IPv4 and UDP."""
MESSAGE_AT = {0x24: BTH_AT + 12, 0x2B: BTH_AT + 12 + 16 + 4}
"""Place of the message by opcode: UC SEND only; UC RDMA WRITE only, with immediate data."""
ICRC_BYTES = 4


@dataclass(frozen=True)
class Pair:
    """Both ends of one session."""

    daemons: FabricDaemons
    sender: Session
    receiver: Session

    async def carry(self, length: int, **how: Any) -> None:
        """Send random bytes; what lands must be the same."""
        data = secrets.token_bytes(length)
        self.sender.region[:length] = data
        self.receiver.region[:length] = bytes(length)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(
                self.receiver.receive(offset=0, length=length),
                self.sender.send(offset=0, length=length, **how),
            )
        landed = hashlib.sha256(self.receiver.region[:length]).digest()
        assert landed == hashlib.sha256(data).digest(), "other bytes have landed"

    async def seen(self, number: int) -> sessions_pb2.Session:
        """Return what the daemon of one end says of the session."""
        end = (self.sender, self.receiver)[number]
        async with connect(self.daemons.fabrics[number].socket) as client:
            return await client.sessions.GetSession(
                sessions_pb2.GetSessionRequest(name=end.session.name)
            )

    async def wait_states(self, wanted: dict[str, str]) -> None:
        """Wait until each wire's path is in this state at the sender."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while states(await self.seen(0)) != wanted:
                await self.carry(1 << 12)
                await asyncio.sleep(0.1)


def states(session: sessions_pb2.Session) -> dict[str, str]:
    """Return the state of the path of each wire."""
    name = sessions_pb2.Path.State.Name
    return {path.wire: name(path.state).lower() for path in session.paths}


@contextlib.asynccontextmanager
async def session(wires: tuple[list[str], list[str]], more: str = "") -> AsyncIterator[Pair]:
    """Open a session between two fabrics that have these wires."""

    def each_more(name: str) -> str:
        number = "ab".index(name)
        address = (HERE, THERE)[number]
        return (
            f'data_listen = ["{address}"]\nwires = {json.dumps(wires[number])}\n'
            f'verbs_mode = "{MODE}"\n'
        )

    with fabric_daemons(more=f"idle_timeout_seconds = 20\n{more}", each_more=each_more) as made:
        async with (
            connect(made.fabrics[0].socket) as near,
            connect(made.fabrics[1].socket) as far,
            contextlib.AsyncExitStack() as stack,
        ):
            address = made.fabrics[1].addresses["fabric_control"]
            listening = listen_session(far.sessions, "gradients", region_bytes=REGION)
            sender, receiver = await asyncio.gather(
                opened(stack, near, address, region_bytes=REGION, rate=RATE),
                stack.enter_async_context(listening),
            )
            yield Pair(made, sender, receiver)


async def both() -> dict[str, Any]:
    """Both wires carry one session's messages; each may fail, and comes back."""
    wires = ["udp", "verbs"]
    async with session((wires, wires), 'unit_bytes = "auto"\n') as pair:
        both_valid = {"udp": "validated", "verbs": "validated"}
        await pair.wait_states(both_valid)
        for how in ({"reliability": SelectiveRepeat()}, {"reliability": ErasureCoded(k=8, m=2)}):
            await pair.carry(2 << 20, **how)
        before = await pair.seen(0)
        nft("add table ip lab")
        # What arrives is lost in silence; what leaves is an error of the device.
        nft("add chain ip lab in { type filter hook prerouting priority 0; }")
        nft("add chain ip lab out { type filter hook output priority 0; }")
        of_udp = f"udp dport != {ROCE_PORT} ip saddr {{ {HERE}, {THERE} }} drop"
        for chain, rule, silent in (
            ("in", f"udp dport {ROCE_PORT} drop", "verbs"),
            ("in", of_udp, "udp"),
            ("out", f"udp dport {ROCE_PORT} drop", "verbs"),
        ):
            nft(f"add rule ip lab {chain} {rule}")
            print(f"lost: {silent} ({chain})", file=sys.stderr)
            await pair.carry(1 << 20)
            await pair.wait_states(both_valid | {silent: "silent"})
            nft(f"flush chain ip lab {chain}")
            await pair.wait_states(both_valid)
        after = await pair.seen(0)
        (failures,) = {
            path.statistics["device_failures"] for path in after.paths if path.wire == "verbs"
        }
        return figures(before) | {"device_failures": failures}


async def limited() -> dict[str, Any]:
    """A fabric that may pin no memory has its sessions over UDP, and says why."""
    wires = ["udp", "verbs"]
    async with session((wires, wires), "pinned_bytes_max = 2000000\n") as pair:
        await pair.carry(1 << 20)
        assert states(await pair.seen(0)) == {"udp": "validated"}
        log = pair.daemons.fabrics[1].log_lines()
        (reason,) = {line["reason"] for line in log if line["event"] == "verbs_unavailable"}
        return figures(await pair.seen(0)) | {"unavailable": reason}


async def only() -> dict[str, Any]:
    """All of a session goes over verbs."""
    async with session((["verbs"], ["verbs"])) as pair:
        for how in ({"reliability": SelectiveRepeat()}, {"reliability": ErasureCoded(k=8, m=2)}):
            for length in (1, 100_000, 1 << 20):
                await pair.carry(length, **how)
        seen = await pair.seen(0)
        assert states(seen) == {"verbs": "validated"}
        return figures(seen)


async def plain() -> dict[str, Any]:
    """All of a session goes over UDP."""
    async with session((["udp"], ["udp"])) as pair:
        for how in ({"reliability": SelectiveRepeat()}, {"reliability": ErasureCoded(k=8, m=2)}):
            for length in (1, 100_000, 1 << 20):
                await pair.carry(length, **how)
        return figures(await pair.seen(0))


async def bench() -> dict[str, Any]:
    """Time messages over one wire: `udp`, or verbs in mode `send` or `write`."""
    wire = "udp" if sys.argv[2] == "udp" else "verbs"
    async with session(([wire], [wire])) as pair:
        await pair.carry(BENCH_BYTES)
        before, busy, began = await pair.seen(0), busy_seconds(), time.monotonic()
        for _ in range(BENCH_MESSAGES):
            await pair.carry(BENCH_BYTES)
        seconds, busy = time.monotonic() - began, busy_seconds() - busy
        after = await pair.seen(0)
        packets = after.statistics["packets_sent"] - before.statistics["packets_sent"]
        return {
            "wire": sys.argv[2],
            "messages_per_second": BENCH_MESSAGES / seconds,
            "cpu_micros_per_packet": busy / packets * 1e6,
            "packets": packets,
            "unit_bytes": after.unit_bytes,
        }


def busy_seconds() -> float:
    """Return the processors' time of this machine that was not idle, in seconds."""
    columns = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(columns) - sum(columns[3:5])) / os.sysconf("SC_CLK_TCK")


async def forged() -> dict[str, Any]:
    """Somebody who knows the queue pair's number gets nothing into the region."""
    async with session((["verbs"], ["verbs"])) as pair:
        with heard() as frames:
            await pair.carry(1 << 16)
            await asyncio.to_thread(Path("heard").write_bytes, longest(frames))
        (address,) = (await pair.seen(1)).data_addresses
        pair.receiver.region[:] = bytes(REGION)
        forge = ["./forge", address, "1000", "heard"]
        await asyncio.to_thread(subprocess.run, forge, check=True, stdout=subprocess.DEVNULL)
        assert not any(pair.receiver.region), "a forged packet reached the job's memory"
        await pair.carry(1 << 16)
        return figures(await pair.seen(1))


@contextlib.contextmanager
def heard() -> Iterator[socket.socket]:
    """Yield a socket that hears all that passes the receiver's link."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP)) as link:
        link.bind(("roce1", 0))
        link.setblocking(False)
        yield link


def longest(frames: socket.socket) -> bytes:
    """Return the longest message sent to the receiver, as its queue pair got it."""
    messages = [b""]
    with contextlib.suppress(BlockingIOError):
        while True:
            frame = frames.recv(1 << 16)
            if frame[30:34] == socket.inet_aton(THERE):
                messages.append(frame[MESSAGE_AT[frame[BTH_AT]] : -ICRC_BYTES])
    return max(messages, key=len)


def nft(line: str) -> None:
    """Change the guest's packet filter."""
    subprocess.run(["nft", *line.split()], check=True)


def figures(seen: sessions_pb2.Session) -> dict[str, Any]:
    """Return what the test looks at."""
    paths = {path.wire: dict(path.statistics) for path in seen.paths}
    return {"unit_bytes": seen.unit_bytes, "paths": paths, "statistics": dict(seen.statistics)}


SCENARIOS = {each.__name__: each for each in (both, limited, only, plain, bench, forged)}

if __name__ == "__main__":
    print(json.dumps(asyncio.run(SCENARIOS[sys.argv[1]]())))
