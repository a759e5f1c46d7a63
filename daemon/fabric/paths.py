"""Addresses of a session's paths: a pair of them, with ports, for each (session-wire.md).

Path i goes from the i-th address of one end to the i-th of the other. The initiator offers as many
as it has, the responder answers with no more than those.
"""

import contextlib
import ipaddress
from collections.abc import Sequence

from sealane.daemon.config import PATHS_MAX
from sealane.errors import UsageError
from sealane.reasons import ReasonId


def bind_addresses(listen_data: Sequence[str], paths: int) -> list[str]:
    """Return address:port to bind for each path, `paths` of them at every address, in turn.

    Port 0: the kernel's choice, so that a network which hashes ports sends each its own way.
    """
    hosts = [ipaddress.ip_address(address) for address in listen_data]
    named = [f"[{host}]:0" if host.version == 6 else f"{host}:0" for host in hosts]
    return named * paths


def check_addresses(addresses: Sequence[str], reason: ReasonId) -> None:
    """UsageError unless each is one that the engine can parse, and there are 1 to 32 of them.

    A peer's text must not become an internal error.
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
