"""Measures how many packets per second this machine emulates, by overloading a small lab."""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyroute2.netns import create_socket
from pyroute2.process import ChildProcess

from sealane.errors import UnavailableError
from sealane.lab.emulator import EmulatorProcess
from sealane.lab.lab import Lab, laboratory
from sealane.lab.namespaces import Namespace
from sealane.lab.plan import plan
from sealane.lab.report import run_report
from sealane.lab.topology import Topology

SHARE_MAX: Final = 0.6
"""Largest share of the measured rate that topologies may need."""
MEASURE_SECONDS: Final = 0.4
UDP_SEGMENT: Final = 103
"""From <linux/udp.h>."""
# Below the kernel's limit for one list of UDP segments.
_DATAGRAM_BYTES_MAX: Final = 60_000
_HEADER_BYTES: Final = 28
_IDLE_PACKETS: Final = 200
_CHILD_SECONDS_MAX: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of one link's emulator on this machine, under its present load."""

    mtu: int
    packets_per_second: int
    cpu_micros_per_packet: float
    """CPU time of the emulator's thread, including the hosts' stacks for receiving and sending."""
    idle_slip_p50_micros: float
    """Lateness of single packets: the error of the delay without load."""
    idle_slip_p99_micros: float


def _topology(mtu: int, forward_to: str | None) -> Topology:
    link = {"rate_bits_per_second": 400_000_000_000, "delay_micros": 0, "buffer_bytes": 1 << 30}
    ends = {"name": "wan", "left": ["a"], "right": ["b"], "forward_to": forward_to}
    return Topology.model_validate({"mtu": mtu, "wan": [{**ends, **link}]})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """Traffic to send through the measured link."""

    namespace: Namespace | None
    to: tuple[str, int]
    payload_bytes: int


async def measure(*, mtu: int, relays: bool, seconds: float = MEASURE_SECONDS) -> Capacity:
    """Overload a fast link with full packets for a while; UnavailableError `lab.…`."""
    async with contextlib.AsyncExitStack() as stack:
        # Never read: the kernel drops what doesn't fit its buffer.
        sink = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sink.bind(("127.0.0.1", 0))
        forward_to = f"127.0.0.1:{sink.getsockname()[1]}" if relays else None
        topology = _topology(mtu, forward_to)
        lab = await stack.enter_async_context(laboratory(topology, relays=relays))
        (emulator,) = lab.emulators.values()
        payload_bytes = mtu - _HEADER_BYTES
        if emulator.address is not None:
            host, _, port = emulator.address.rpartition(":")
            traffic = _Traffic(namespace=None, to=(host, int(port)), payload_bytes=payload_bytes)
        else:
            far = create_socket(lab.hosts["b"].path, socket.AF_INET, socket.SOCK_DGRAM, flags=0)
            stack.enter_context(far).bind(("0.0.0.0", 0))  # noqa: S104 - in the namespace only
            to = (plan(topology)["wan"][1].addresses[0], far.getsockname()[1])
            traffic = _Traffic(namespace=lab.hosts["a"], to=to, payload_bytes=payload_bytes)
        return await _measure(lab, emulator, traffic, seconds)


async def _measure(
    lab: Lab, emulator: EmulatorProcess, traffic: _Traffic, seconds: float
) -> Capacity:
    before = await emulator.report()
    _run_child(_trickle, traffic, seconds)
    between = await emulator.report()
    elapsed = _run_child(_flood, traffic, seconds)
    after = await emulator.report()
    packets = after["forward"]["sent_packets"] - between["forward"]["sent_packets"]
    if not packets:
        raise UnavailableError("lab.measure", "no packet crossed the measured link")
    idle = run_report(lab.topology, {"wan": before}, {"wan": between}).ways[0]
    return Capacity(
        mtu=lab.topology.mtu,
        packets_per_second=round(packets / elapsed),
        cpu_micros_per_packet=(after["cpu_nanos"] - between["cpu_nanos"]) / packets / 1000,
        idle_slip_p50_micros=idle.slip_p50_micros,
        idle_slip_p99_micros=idle.slip_p99_micros,
    )


def _run_child(
    target: Callable[[_Traffic, float], bytes], traffic: _Traffic, seconds: float
) -> float:
    # Blocking is fine here, since the emulator is another process.
    with ChildProcess(target=target, args=[traffic, seconds]) as child:
        return float(child.get_data(timeout=_CHILD_SECONDS_MAX))


def _connected(traffic: _Traffic) -> socket.socket:
    if traffic.namespace is not None:
        traffic.namespace.enter()
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.connect(traffic.to)
    return sender


def _trickle(traffic: _Traffic, seconds: float) -> bytes:
    """Send single packets."""
    with _connected(traffic) as sender:
        for _ in range(_IDLE_PACKETS):
            sender.send(bytes(traffic.payload_bytes))
            time.sleep(seconds / _IDLE_PACKETS)
    return b"0"


def _flood(traffic: _Traffic, seconds: float) -> bytes:
    """Send as many packets as possible, in lists that the kernel splits; return the time taken."""
    with _connected(traffic) as sender:
        sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, traffic.payload_bytes)
        packets = bytes(traffic.payload_bytes * (_DATAGRAM_BYTES_MAX // traffic.payload_bytes))
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < seconds:
            # A full queue is the purpose here.
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                sender.send(packets)
    return str(elapsed).encode()
