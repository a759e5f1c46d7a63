"""Addresses of a session's paths: a pair of addresses with ports per path (session-wire.md).

Path i connects the i-th address of one end with the i-th of the other. The initiator offers all its
addresses; the responder answers with at most as many.
"""

import contextlib
import ipaddress
from collections.abc import Sequence

from sealane.daemon.config import PATHS_MAX
from sealane.errors import UsageError
from sealane.reasons import ReasonId


def bind_addresses(listen_data: Sequence[str], paths: int) -> list[str]:
    """Return address:port to bind for each path: `paths` paths per address, in turn.

    Port 0 lets the kernel choose, so a network that hashes ports can route each path differently.
    """
    hosts = [ipaddress.ip_address(address) for address in listen_data]
    named = [f"[{host}]:0" if host.version == 6 else f"{host}:0" for host in hosts]
    return named * paths


def check_addresses(addresses: Sequence[str], reason: ReasonId) -> None:
    """UsageError unless there are 1 to 32 addresses, each of which the engine can parse.

    A peer's text must not cause an internal error.
    """
    if not 1 <= len(addresses) <= PATHS_MAX:
        raise UsageError(reason, f"{len(addresses)} addresses; allowed: 1 to {PATHS_MAX}")
    for address in addresses:
        _check_address(address, reason)


def _check_address(address: str, reason: ReasonId) -> None:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(ValueError):
        is_bracketed = host.startswith("[") and host.endswith("]")
        found = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
        is_plain = "%" not in host and port.isascii() and port.isdigit()
        if is_plain and is_bracketed == (found.version == 6) and 1 <= int(port) <= 65_535:
            return
    raise UsageError(reason, f"{address!r} is not a numeric address with a port")
