"""Who calls, as far as an address tells, and how often one address may."""

import ipaddress
import urllib.parse
from collections import OrderedDict
from typing import Final

from sealane.errors import UnavailableError

# A cluster behind one address may start at once; nodes attest again every five minutes.
CALLS_PER_SECOND: Final = 50
BURST_CALLS: Final = 512

_PEERS_MAX: Final = 4096
_IPV6_PREFIX_BITS: Final = 64


def address_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer (`ipv4:192.0.2.1:5000`).

    For IPv6 it is the /64 prefix, which is what one customer usually has.
    """
    family, _, rest = urllib.parse.unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return family
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _IPV6_PREFIX_BITS), strict=False))
    return str(address)


class RateLimiter:
    """A token bucket for each address: `BURST_CALLS` at once, `CALLS_PER_SECOND` after that.

    It remembers the 4096 addresses that called last; one that fell out starts afresh.
    """

    def __init__(self) -> None:
        # A bucket is the time at which it is full again: each call makes it later by an interval.
        self._full_at: OrderedDict[str, int] = OrderedDict()

    def take(self, address: str, *, now_ns: int) -> None:
        """Count a call; UnavailableError `attestation.rate.limit`."""
        interval = 10**9 // CALLS_PER_SECOND
        full_at = max(self._full_at.pop(address, now_ns), now_ns)
        is_refused = full_at - now_ns > (BURST_CALLS - 1) * interval
        self._full_at[address] = full_at if is_refused else full_at + interval
        if len(self._full_at) > _PEERS_MAX:
            self._full_at.popitem(last=False)
        if is_refused:
            raise UnavailableError(
                "attestation.rate.limit",
                f"more than {CALLS_PER_SECOND} calls a second from {address}: try again later",
            )
