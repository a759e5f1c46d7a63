"""Fabrics of hosts of the lab, and a broker at the first of them.

Configured as shipped, except for addresses and what a caller sets.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.cli.demo.cluster import Daemon, broker_section, daemon, enrolment
from sealane.crypto.evidence.software import SoftwareKey
from sealane.lab.namespaces import Namespace

NEAR: Final = "fabric-near"
FAR: Final = "fabric-far"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host and its address for calls."""

    address: str
    namespace: Namespace | None = None
    """Of the lab; None: this machine."""
    data_address: str = ""
    """Where sessions receive, if elsewhere."""


@contextlib.asynccontextmanager
async def fabrics(
    scratch: Path, hosts: Mapping[str, Host], settings: Mapping[str, object]
) -> AsyncIterator[dict[str, Daemon]]:
    """Start fabrics by the names of their nodes, which begin with `fabric-`; stop them in the end.

    Files are in `scratch`, an empty directory. `settings` are those of the section [fabric].
    """
    keys = {name: SoftwareKey.create() for name in hosts}
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, host: Host, sections: dict[str, dict[str, object]]) -> Daemon:
            enter = (lambda: None) if host.namespace is None else host.namespace.enter
            started = daemon(scratch, name, sections, enter=enter)
            return await stack.enter_async_context(started)

        first = next(iter(hosts.values()))
        broker = await start("broker", first, broker_section(scratch, keys, first.address))
        yield {
            name: await start(
                name,
                host,
                enrolment(scratch, name, keys[name], broker)
                | {
                    "fabric": {
                        "control_listen": f"{host.address}:0",
                        "data_listen": host.data_address or host.address,
                        **settings,
                    }
                },
            )
            for name, host in hosts.items()
        }
