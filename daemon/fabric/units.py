"""Unit size of a session if it isn't configured: chosen by the path's MTU (RFC 8899).

The size is fixed when a session is established, so the search happens there: both ends name the
candidates that their routes may carry, the paths are challenged with packets of each size, and the
session uses the largest that is answered (native/proto/src/session/units.rs).
"""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

UNIT_GRAIN_BYTES: Final = 64
"""Whole cipher blocks are cheaper than the few bytes that a finer grain would gain."""
UNIT_OVERHEAD_BYTES: Final = 59
"""Header, descriptor, immediate and tag of a unit (docs/formats/session-wire.md)."""
IP_UDP_BYTES: Final = {4: 28, 6: 48}
MTUS: Final = (9000, 1500, 1280)
"""Jumbo frames, Ethernet, and the minimum of IPv6."""
UNIT_BYTES_MIN: Final = 1152
"""What the smallest of these MTUs leaves, over IPv4 or IPv6."""
UNIT_BYTES_MAX: Final = 8896
UNIT_CANDIDATES_MAX: Final = 4
"""Number of sizes that a round of challenges tries."""

# Socket options of <linux/in.h>, <linux/in6.h>: the path MTU of a connected socket.
_IP_MTU: Final = 14
_IPV6_MTU: Final = 24


def unit_bytes_for(mtu: int, ip_version: int) -> int:
    """Return the largest unit, in bytes, whose packet has at most `mtu` bytes."""
    room = mtu - IP_UDP_BYTES[ip_version] - UNIT_OVERHEAD_BYTES
    return room // UNIT_GRAIN_BYTES * UNIT_GRAIN_BYTES


def candidates(ip_version: int, mtu_max: int) -> Sequence[int]:
    """Return units to try, in bytes, descending: for `mtu_max` and the usual MTUs below it."""
    mtu = min(mtu_max, MTUS[0])
    units = {unit_bytes_for(each, ip_version) for each in (mtu, *MTUS) if each <= mtu}
    return sorted((unit for unit in units if unit >= UNIT_BYTES_MIN), reverse=True) or [
        UNIT_BYTES_MIN
    ]


def unit_max(address: str, ip_version: int) -> int:
    """Return the largest unit, in bytes, that the route to `address` may carry."""
    return unit_bytes_for(min(route_mtu(address), MTUS[0]), ip_version)


def route_mtu(address: str) -> int:
    """Return the MTU in bytes of the route to `address`; a large value if unknown.

    It is a hint that saves attempts: it includes what ICMP reported for the path, which may be
    forged.
    """
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError, OSError):
        is_v6 = ipaddress.ip_address(host).version == 6
        family = socket.AF_INET6 if is_v6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: this only looks the route up.
            probe.connect((host, 9))
            if is_v6:
                return probe.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
            return probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    return MTUS[0]
