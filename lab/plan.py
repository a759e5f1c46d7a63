"""Addresses of a lab's hosts; the same topology always gives the same addresses.

They exist only inside the lab's namespaces, so they can't collide with others.
"""

import ipaddress
from dataclasses import dataclass

from sealane.lab.topology import Topology, Wan


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A host's interface on a link, which has the link's name."""

    host: str
    is_right: bool
    port: str
    """Name of the interface at the other end, in the link's namespace."""
    ipv4: ipaddress.IPv4Interface
    ipv6: ipaddress.IPv6Interface

    @property
    def addresses(self) -> list[str]:
        """Both addresses, without prefix length."""
        return [str(self.ipv4.ip), str(self.ipv6.ip)]


def attachments(wan: Wan, *, number: int) -> list[Attachment]:
    """Return the interfaces of the hosts on link `number`, with their addresses."""
    network4 = ipaddress.ip_network(f"10.77.{number}.0/24")
    network6 = ipaddress.ip_network(f"fd5e:a1a4:e:{number:x}::/64")
    return [
        Attachment(
            host=host,
            is_right=host in wan.right,
            port=f"host{index}",
            ipv4=ipaddress.IPv4Interface((network4[index], 24)),
            ipv6=ipaddress.IPv6Interface((network6[index], 64)),
        )
        for index, host in enumerate(wan.hosts, 1)
    ]


def plan(topology: Topology) -> dict[str, list[Attachment]]:
    """Return every link's attachments, by the name of the link."""
    return {wan.name: attachments(wan, number=i) for i, wan in enumerate(topology.wan)}


def hosts_file(topology: Topology, host: str) -> str:
    """Return the /etc/hosts of `host`: peers as `peer.link`, and by their first link as `peer`."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    named: set[str] = set()
    for wan, attached in plan(topology).items():
        if not any(attachment.host == host for attachment in attached):
            continue
        for attachment in attached:
            # A host's bare name means its address on the first link that leads to it.
            names = [f"{attachment.host}.{wan}"]
            if attachment.host not in named:
                names.append(attachment.host)
            lines += [f"{address} {' '.join(names)}" for address in attachment.addresses]
        named |= {attachment.host for attachment in attached}
    return "\n".join(lines) + "\n"
