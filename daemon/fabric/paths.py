"""Addresses of a session's paths: a pair of ends per path (session-wire.md).

Each end is a UDP socket or a queue pair of an RDMA device. Path i of a wire connects the i-th end
of that wire here with the i-th there. The initiator offers all its ends; the responder answers with
those that it pairs.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

from sealane._native import WireAddress
from sealane.daemon.config import PATHS_MAX, WIRES
from sealane.daemon.fabric.units import UNIT_OVERHEAD_BYTES
from sealane.errors import UsageError
from sealane.reasons import ReasonId

_MTU_MAX: Final = 65_535


def bind_addresses(
    listen_data: Sequence[str], paths: int, wires: Sequence[str] = ("udp",), mode: str = "send"
) -> list[str]:
    """Return what to bind for each path: `paths` paths per address and wire, in turn.

    `mode` is how peers bring packets to queue pairs: `send` or `write`.

    Port 0 lets the kernel choose, so a network that hashes ports can route each path differently.
    """
    hosts = [ipaddress.ip_address(address) for address in listen_data]
    ends = {
        "udp": [f"[{host}]:0" if host.version == 6 else f"{host}:0" for host in hosts],
        "verbs": [f"verbs:{host}{',write' if mode == 'write' else ''}" for host in hosts],
    }
    return [end for wire in WIRES if wire in wires for end in ends[wire] * paths]


def check_addresses(
    addresses: Sequence[str], reason: ReasonId, *, wires: Sequence[str] = WIRES
) -> None:
    """UsageError unless there are 1 to 32 addresses of these wires, which the engine can parse.

    A peer's text must not cause an internal error.
    """
    if not 1 <= len(addresses) <= PATHS_MAX:
        raise UsageError(reason, f"{len(addresses)} addresses; allowed: 1 to {PATHS_MAX}")
    for address in addresses:
        try:
            wire = WireAddress(address).wire
        except ValueError as error:
            raise UsageError(reason, str(error)) from error
        if wire not in wires:
            raise UsageError(reason, f"{address} is of {wire}; allowed: {', '.join(wires)}")


def of_wire(wire: str, addresses: Iterable[str]) -> list[str]:
    """Return those of the addresses that are of one wire."""
    return [address for address in addresses if WireAddress(address).wire == wire]


def pair_ends(own: Sequence[str], peers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the ends (own, the peer's) of each path, the same order at both ends: UDP first."""
    return [
        pair
        for wire in WIRES
        for pair in zip(of_wire(wire, own), of_wire(wire, peers), strict=False)
    ]


def unit_room(addresses: Iterable[str]) -> int:
    """Return the largest unit, in bytes, that all queue pairs among the addresses take."""
    mtus = (WireAddress(address).mtu_bytes for address in addresses)
    return min((mtu for mtu in mtus if mtu is not None), default=_MTU_MAX) - UNIT_OVERHEAD_BYTES


def carrying(unit_bytes: int, addresses: Sequence[str]) -> list[str]:
    """Return the addresses; only those of UDP if a queue pair can't carry units of this size."""
    return list(addresses) if unit_room(addresses) >= unit_bytes else of_wire("udp", addresses)
