"""The emulator of one link, in a process of its own."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sealane.errors import UnavailableError
from sealane.lab.namespaces import Namespace
from sealane.lab.plan import Attachment
from sealane.lab.topology import Topology, Wan

# A report has every step of two histograms, some hundred numbers each.
_LINE_BYTES_MAX: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link to emulate: between hosts if it has a namespace, else as a relay."""

    wan: Wan
    seed: int
    namespace: Namespace | None = None
    attached: list[Attachment] | None = None


class EmulatorProcess:
    """A running emulator process."""

    def __init__(self, process: asyncio.subprocess.Process, wan: str) -> None:
        self._process = process
        self._wan = wan
        self._lock = asyncio.Lock()
        self.address: str | None = None
        """The address of a relay, once it has started; None between namespaces."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def start(self, parameters: dict[str, Any]) -> None:
        """Configure the link and wait until it is up; UnavailableError `lab.emulator`."""
        started = await _ask(self._process, parameters)
        if "error" in started:
            raise UnavailableError("lab.emulator", f"link {self._wan}: {started['error']}")
        self.address = started["address"]

    async def report(self) -> dict[str, Any]:
        """Return its `_native.EmulatorReport`; UnavailableError `lab.emulator` if it has ended."""
        async with self._lock:
            return await _ask(self._process, {"request": "report"})

    async def start_schedule(self) -> None:
        """Start, or restart, the link's schedule of outages and detours now."""
        async with self._lock:
            await _ask(self._process, {"request": "schedule"})


@contextlib.asynccontextmanager
async def emulating(
    links: Sequence[Link], topology: Topology
) -> AsyncIterator[dict[str, EmulatorProcess]]:
    """Run the emulators of links, by name; UnavailableError `lab.emulator` if one can't start."""
    async with contextlib.AsyncExitStack() as stack:
        # Launch all before waiting for the first, so that they start in parallel.
        emulators = [await stack.enter_async_context(_launched(link)) for link in links]
        for link, emulator in zip(links, emulators, strict=True):
            attached = link.attached
            await emulator.start(
                {
                    "wan": link.wan.model_dump(),
                    "mtu": topology.mtu,
                    "seed": link.seed,
                    "ports": None
                    if attached is None
                    else [(a.port, a.is_right, a.addresses) for a in attached],
                }
            )
        yield {link.wan.name: emulator for link, emulator in zip(links, emulators, strict=True)}


@contextlib.asynccontextmanager
async def _launched(link: Link) -> AsyncIterator[EmulatorProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sealane.lab.emulate"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
        # The namespace holds the far ends of its hosts' interfaces.
        preexec_fn=None if link.namespace is None else link.namespace.enter,
        # Ctrl-C at a terminal must reach only the process that runs this.
        start_new_session=True,
    )
    try:
        yield EmulatorProcess(process, link.wan.name)
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
        raise UnavailableError(
            "lab.emulator", f"the emulator ended with exit code {await process.wait()}"
        )
    answer: dict[str, Any] = json.loads(line)
    return answer
