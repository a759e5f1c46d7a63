"""The daemons of a lane: broker and fabric at the near end, a fabric at the far end.

Configured as shipped, except for addresses and the operator's rate.
"""

import contextlib
from collections.abc import AsyncIterator
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
    """A host of the lab and its address on the lane's link."""

    namespace: Namespace
    address: str


@contextlib.asynccontextmanager
async def fabrics(
    scratch: Path, near: Host, far: Host, rate_bits_per_second: int
) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Start the daemons of a lane with files in an empty directory; stop them in reverse."""
    keys = {name: SoftwareKey.create() for name in (NEAR, FAR)}
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, host: Host, sections: dict[str, dict[str, object]]) -> Daemon:
            started = daemon(scratch, name, sections, enter=host.namespace.enter)
            return await stack.enter_async_context(started)

        broker = await start("broker", near, broker_section(scratch, keys, near.address))
        started = [
            await start(
                name,
                host,
                enrolment(scratch, name, keys[name], broker)
                | {
                    "fabric": {
                        "control_listen": f"{host.address}:0",
                        "data_listen": host.address,
                        "rate_max_bits_per_second": rate_bits_per_second,
                    }
                },
            )
            for name, host in ((NEAR, near), (FAR, far))
        ]
        yield started[0], started[1]
