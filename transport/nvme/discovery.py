"""Discovery client: the subsystems that a host may connect to, and their addresses.

NVMe over Fabrics: the log may change while it is read in parts; its generation counter reveals
that.
"""

from dataclasses import dataclass

from sealane.errors import ProtocolError, UnavailableError
from sealane.protocol.nvme.constants import LogPage
from sealane.protocol.nvme.host_pages import (
    DISCOVERY_ENTRY_BYTES,
    DISCOVERY_HEADER_BYTES,
    DiscoveryEntry,
    decode_discovery_entry,
    decode_discovery_header,
)
from sealane.transport.nvme.handshake import Address
from sealane.transport.nvme.initiator import HostController

DISCOVERY_ENTRIES_MAX = 1024
_ATTEMPTS = 8  # a log that changes more often than this while it is read is given up
_ENTRIES_PER_READ = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredPath:
    """One path to a subsystem over TCP; `is_discovery` if that is a discovery subsystem."""

    subsystem_nqn: str
    address: Address
    is_discovery: bool


async def discover(host: HostController) -> list[DiscoveredPath]:
    """Read the discovery log of a connected discovery controller; return the TCP paths in it.

    ProtocolError for a malformed log, UnavailableError if it keeps changing.
    """
    for _ in range(_ATTEMPTS):
        before, count = await _header(host)
        if count > DISCOVERY_ENTRIES_MAX:
            raise ProtocolError(
                "log.malformed",
                f"a discovery log of {count} entries; allowed: {DISCOVERY_ENTRIES_MAX}",
            )
        entries = await _entries(host, count)
        # The last read clears the event, so that the next change is reported.
        after, _ = await _header(host, retain_event=False)
        if before == after:
            return [path for entry in entries if (path := _path(entry)) is not None]
    raise UnavailableError("discovery.unstable", f"the discovery log changed {_ATTEMPTS} times")


async def _header(host: HostController, *, retain_event: bool = True) -> tuple[int, int]:
    page = await host.log_page(LogPage.DISCOVERY, DISCOVERY_HEADER_BYTES, retain_event=retain_event)
    return decode_discovery_header(page)


async def _entries(host: HostController, count: int) -> list[DiscoveryEntry]:
    entries: list[DiscoveryEntry] = []
    while len(entries) < count:
        wanted = min(_ENTRIES_PER_READ, count - len(entries))
        page = await host.log_page(
            LogPage.DISCOVERY,
            wanted * DISCOVERY_ENTRY_BYTES,
            offset=DISCOVERY_HEADER_BYTES + len(entries) * DISCOVERY_ENTRY_BYTES,
            retain_event=True,
        )
        starts = range(0, len(page), DISCOVERY_ENTRY_BYTES)
        entries += [decode_discovery_entry(page[at : at + DISCOVERY_ENTRY_BYTES]) for at in starts]
    return entries


def _path(entry: DiscoveryEntry) -> DiscoveredPath | None:
    families = {DiscoveryEntry.IPV4, DiscoveryEntry.IPV6}
    if entry.transport != DiscoveryEntry.TCP or entry.address_family not in families:
        return None
    if not entry.trsvcid.isascii() or not entry.trsvcid.isdecimal():
        return None
    port = int(entry.trsvcid)
    if not 0 < port < 0x1_0000:
        return None
    return DiscoveredPath(
        subsystem_nqn=entry.subsystem_nqn,
        address=Address(entry.traddr, port),
        is_discovery=entry.subsystem_type != DiscoveryEntry.NVM,
    )
