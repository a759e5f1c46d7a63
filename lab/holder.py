"""The process that holds a lab: `python -m sealane.lab.holder`.

It holds the namespaces and the emulators and answers on an abstract Unix socket, so that nothing
remains when it ends, for whatever reason. With namespaces, it is the first process of a PID
namespace, whose other processes the kernel ends with it. Started by `control.launch`.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sealane.errors import Error, UnavailableError, UsageError
from sealane.lab import kernel
from sealane.lab.lab import Lab, laboratory
from sealane.lab.measure import SHARE_MAX, Capacity, measure
from sealane.lab.names import PEER_CREDENTIALS, socket_address
from sealane.lab.plan import hosts_file, plan
from sealane.lab.topology import Topology


class Holder:
    """Answers requests about one lab."""

    def __init__(self, name: str, lab: Lab, capacity: Capacity | None) -> None:
        self._name = name
        self._lab = lab
        self._capacity = capacity
        self.down = asyncio.Event()
        self._answers = {
            "status": self._answer_status,
            "report": self._answer_report,
            "schedule": self._answer_schedule,
            "host": self._answer_host,
            "down": self._answer_down,
        }

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer request lines until the peer closes the connection."""
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            if not _is_allowed(writer.get_extra_info("socket")):
                return
            while line := await reader.readline():
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await writer.drain()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            answer: dict[str, Any] = await self._answers[request["request"]](request)
        except Error as error:
            return {"error": [error.reason, str(error.args[0]), error.exit_code]}
        return answer

    async def _answer_status(self, _: dict[str, Any]) -> dict[str, Any]:
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return the lab's description, without its links' counters."""
        topology = self._lab.topology
        links = plan(topology) if self._lab.hosts else {}
        return {
            "name": self._name,
            "pid": os.getpid(),
            "topology": topology.model_dump(),
            "packets_per_second": topology.packets_per_second,
            "capacity": None if self._capacity is None else asdict(self._capacity),
            "hosts": {
                host: {
                    wan: attachment.addresses
                    for wan, attached in links.items()
                    for attachment in attached
                    if attachment.host == host
                }
                for host in topology.hosts
            },
            "relays": {n: e.address for n, e in self._lab.emulators.items() if e.address},
        }

    async def _answer_report(self, _: dict[str, Any]) -> dict[str, Any]:
        return await self._lab.report()

    async def _answer_schedule(self, _: dict[str, Any]) -> dict[str, Any]:
        await self._lab.start_schedule()
        return {}

    async def _answer_host(self, request: dict[str, Any]) -> dict[str, Any]:
        topology = self._lab.topology
        if (host := request["host"]) not in topology.hosts:
            allowed = ", ".join(topology.hosts)
            raise UsageError(
                "lab.host", f"no host {host!r} in lab {self._name}; allowed: {allowed}"
            )
        namespace = self._lab.hosts.get(host)
        return {
            "descriptor": None if namespace is None else namespace.descriptor,
            "hosts_file": hosts_file(topology, host),
        }

    async def _answer_down(self, _: dict[str, Any]) -> dict[str, Any]:
        self.down.set()
        return {}


def _is_allowed(peer: socket.socket) -> bool:
    """Return True if the peer is our user or root; abstract sockets have no permissions."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    _, user, _ = PEER_CREDENTIALS.unpack(raw)
    return user in {0, os.geteuid()}


def check_capacity(topology: Topology, capacity: Capacity, others: int) -> None:
    """Raise UsageError `lab.capacity` if this and other labs' links need too much capacity."""
    allowed = int(SHARE_MAX * capacity.packets_per_second)
    needed = topology.packets_per_second + others
    if needed > allowed:
        beside = f", {others} of them in other labs" if others else ""
        raise UsageError(
            "lab.capacity",
            f"with all links busy, they carry {needed} packets per second of {topology.mtu} bytes"
            f"{beside}; allowed: {allowed}, {SHARE_MAX:.0%} of the {capacity.packets_per_second} "
            "that this machine can emulate now; lower rate_bits_per_second or paths, or raise mtu",
        )


async def hold(parameters: dict[str, Any]) -> None:
    """Run the lab described by `parameters` until it is told to end."""
    topology = Topology.model_validate(parameters["topology"])
    relays = parameters["relays"]
    async with contextlib.AsyncExitStack() as stack:
        control = stack.enter_context(_bound(parameters["name"]))
        capacity = None
        if not parameters["unmeasured"]:
            capacity = await measure(mtu=topology.mtu, relays=relays)
            check_capacity(topology, capacity, parameters["others"])
        lab = await stack.enter_async_context(laboratory(topology, relays=relays))
        holder = Holder(parameters["name"], lab, capacity)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, holder.down.set)
        _reap_orphans(lab)
        # Fails if our starter has ended: otherwise nobody would know of the lab.
        print(json.dumps(holder.status()), flush=True)
        kernel.let_go(0, 1, 2)
        server = await asyncio.start_unix_server(holder.converse, sock=control)
        stack.callback(server.close)
        await holder.down.wait()


def _bound(name: str) -> socket.socket:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        control.bind(socket_address(name, os.geteuid()))
    except OSError as error:
        control.close()
        raise UsageError(
            "lab.name", f"lab {name} is already running (sealane lab down {name} ends it)"
        ) from error
    control.listen()
    return control


def _reap_orphans(lab: Lab) -> None:
    """As the first process of a PID namespace, reap orphaned processes."""
    known = {emulator.pid for emulator in lab.emulators.values()}

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in known:
                    return
                os.waitpid(found.si_pid, 0)

    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, reap)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except Error as error:
        problem = [error.reason, str(error.args[0]), error.exit_code]
    except OSError as error:
        problem = ["lab.system", f"refused by the kernel: {error}", UnavailableError.exit_code]
    else:
        return
    print(json.dumps({"error": problem}), flush=True)


def main() -> None:
    """Run a lab with the parameters from standard input."""
    parameters = json.loads(sys.stdin.readline())
    with contextlib.suppress(BrokenPipeError), _reported():
        asyncio.run(hold(parameters))


if __name__ == "__main__":
    main()
