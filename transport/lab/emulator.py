"""The emulator of one link, a process of its own: started, asked, ended."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

from sealane.errors import UnavailableError
from sealane.transport.lab.namespaces import Namespace
from sealane.transport.lab.plan import Attachment
from sealane.transport.lab.topology import Topology, Wan

# A report names every step of two histograms: some hundred numbers each.
_LINE_BYTES_MAX: Final = 1 << 22


class EmulatorProcess:
    """A running emulator process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str | None) -> None:
        self._process = process
        self._lock = asyncio.Lock()
        self.address = address
        """Where a relay's clients send to; None between namespaces."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait_ended(self) -> None:
        """Wait for its end."""
        await self._process.wait()

    async def report(self) -> dict[str, Any]:
        """Return its `_native.EmulatorReport`; UnavailableError if it is gone."""
        async with self._lock:
            return await _ask(self._process, {"request": "report"})

    async def start_schedule(self) -> None:
        """Start the link's schedule of outages (again), now."""
        async with self._lock:
            await _ask(self._process, {"request": "schedule"})


@contextlib.asynccontextmanager
async def emulating(
    topology: Topology,
    wan: Wan,
    attached: list[Attachment] | None,
    namespace: Namespace | None = None,
    *,
    seed: int | None = None,
) -> AsyncIterator[EmulatorProcess]:
    """Run the emulator of `wan`: in a namespace between hosts, without one as a relay.

    UnavailableError `lab.emulator` if it can't start.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sealane.transport.lab.emulate"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
        # The namespace holds the far ends of its hosts' interfaces.
        preexec_fn=None if namespace is None else namespace.enter,
        # Ctrl-C at a terminal is for whoever runs this.
        start_new_session=True,
    )
    ports = [(a.port, a.is_right, a.addresses) for a in attached or ()]
    parameters = {
        "wan": wan.model_dump(),
        "mtu": topology.mtu,
        "seed": topology.seed if seed is None else seed,
        "ports": None if attached is None else ports,
    }
    try:
        started = await _ask(process, parameters)
        if "error" in started:
            raise UnavailableError("lab.emulator", f"link {wan.name}: {started['error']}")
        yield EmulatorProcess(process, started["address"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ask(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
    if process.stdin is None or process.stdout is None:
        raise UnavailableError("lab.emulator", "the emulator has no pipes")
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
    except ConnectionError:
        line = b""
    if not line:
        raise UnavailableError("lab.emulator", f"the emulator ended with {await process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer
