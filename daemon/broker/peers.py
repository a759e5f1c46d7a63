"""Address prefixes of callers, and the rate limit of each prefix."""

import ipaddress
import urllib.parse
from typing import Final

from sealane.errors import UnavailableError

# A cluster behind one prefix may start at once; nodes attest again every five minutes.
CALLS_PER_SECOND: Final = 50
BURST_CALLS: Final = 512

PREFIXES_MAX: Final = 4096
"""Prefixes with a limit of their own; all further ones share one limit."""
IPV4_PREFIX_BITS: Final = 24
IPV6_PREFIX_BITS: Final = 56

_OTHERS: Final = "others"


def address_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer (`ipv4:192.0.2.1:5000`), without the port."""
    family, _, rest = urllib.parse.unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return family
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def prefix_of(address: str) -> str:
    """Return the prefix that an address counts under: a range typical of a single party.

    /24 for IPv4, /56 for IPv6; anything else counts as is.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    bits = IPV4_PREFIX_BITS if parsed.version == 4 else IPV6_PREFIX_BITS
    return str(ipaddress.ip_network((parsed, bits), strict=False))


class RateLimiter:
    """A token bucket per prefix: `BURST_CALLS` at once, then `CALLS_PER_SECOND`.

    A bucket is forgotten only once it is full again, so a caller can't escape its limit by
    switching addresses. While `PREFIXES_MAX` buckets are in use, further prefixes share one.
    """

    def __init__(self) -> None:
        # A bucket is the time at which it is full again; each call delays that by an interval.
        self._full_at: dict[str, int] = {}
        self._swept_ns = 0

    def take(self, address: str, *, now_ns: int) -> None:
        """Count a call; UnavailableError `attestation.rate.limit`."""
        interval = 10**9 // CALLS_PER_SECOND
        prefix = self._bucket(prefix_of(address), now_ns, interval)
        full_at = max(self._full_at.get(prefix, now_ns), now_ns)
        if full_at - now_ns > (BURST_CALLS - 1) * interval:
            raise UnavailableError(
                "attestation.rate.limit",
                f"more than {CALLS_PER_SECOND} calls a second from {prefix}: try again later",
            )
        self._full_at[prefix] = full_at + interval

    def _bucket(self, prefix: str, now_ns: int, interval: int) -> str:
        if prefix in self._full_at or len(self._full_at) < PREFIXES_MAX:
            return prefix
        # At most once per time in which a bucket fills, because a sweep visits all buckets.
        if now_ns - self._swept_ns >= interval:
            self._swept_ns = now_ns
            self._full_at = {p: at for p, at in self._full_at.items() if at > now_ns}
        return prefix if len(self._full_at) < PREFIXES_MAX else _OTHERS
