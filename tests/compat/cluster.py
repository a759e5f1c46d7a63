"""A cluster whose daemons run one release or the other, each at the address that it always had."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from control_plane import Daemon, Site, short_directory
from fabric_daemons import SECTION
from kills.restarts import start_in_place

ORDER = ("broker", "s", "g", "a", "b")
"""The order of an upgrade (docs/operate/upgrade.md): broker, target, gateway, two fabrics."""

_TESTS: Final = Path(__file__).parents[1]
_RUN_JOB: Final = 'runpy.run_module("compat.job", run_name="__main__")'


class Release(Enum):
    """Whose code a daemon runs."""

    PREVIOUS = "previous"
    THIS = "this"

    @property
    def prefix(self) -> list[str]:
        """A command that gives its child this release's code."""
        if self is Release.THIS:
            return []
        return ["env", f"PYTHONPATH={os.environ['SEALANE_PREVIOUS_PATH']}"]


@dataclass
class Cluster:
    """Daemons by name, and the release that each runs."""

    site: Site
    stack: contextlib.ExitStack
    daemons: dict[str, Daemon] = field(default_factory=dict)

    def start(self, name: str, release: Release) -> None:
        """Start a daemon, at its previous addresses if it ran before."""
        running = start_in_place(self.site, self.stack, name, prefix=release.prefix)
        assert release_of(running) == release
        self.daemons[name] = running

    async def replace(self, name: str, release: Release) -> None:
        """Stop a daemon as its service manager would, and start the other release in its place."""
        assert await asyncio.to_thread(self.daemons[name].stop) == 0
        await asyncio.to_thread(self.start, name, release)

    async def run_job(self, release: Release) -> None:
        """Run a job (compat.job) with this release's client."""
        job = await asyncio.create_subprocess_exec(
            *release.prefix,
            sys.executable,
            *("-c", "import runpy, sys; sys.path.append(sys.argv.pop(1)); " + _RUN_JOB),
            *(str(_TESTS), *map(self.socket, "gab")),
            self.daemons["b"].addresses["fabric_control"],
        )
        assert await job.wait() == 0, f"a job with the client of {release.value} release failed"

    def socket(self, name: str) -> str:
        """Return the path of a daemon's socket."""
        return str(self.site.root / f"{name}-run" / "sealaned.sock")


def release_of(daemon: Daemon) -> Release:
    """Return the release whose native module a daemon has loaded."""
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    [module] = {line.split()[-1] for line in maps.splitlines() if "/sealane/_native" in line}
    is_previous = module.startswith(os.environ["SEALANE_PREVIOUS_PATH"].partition(":")[0])
    return Release.PREVIOUS if is_previous else Release.THIS


@contextlib.asynccontextmanager
async def cluster(release: Release) -> AsyncIterator[Cluster]:
    """Start everything with one release; stop and remove it at the end."""
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        made = Cluster(site, stack)
        site.write_policy({"s": ["target"], "g": ["gateway"], "a": ["fabric"], "b": ["fabric"]})
        site.broker_config()
        await asyncio.to_thread(made.start, "broker", release)
        broker = made.daemons["broker"]
        site.write_config(
            "s",
            site.enrolment("s", broker)
            + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            + 'store = "file"\nanchor = "broker"\n',
        )
        await asyncio.to_thread(made.start, "s", release)
        site.write_config(
            "g",
            site.enrolment("g", broker)
            + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            + f'target_address = "{made.daemons["s"].addresses["target_control"]}"\n',
        )
        await asyncio.to_thread(made.start, "g", release)
        for name in ("a", "b"):
            site.write_config(name, site.enrolment(name, broker) + SECTION)
            await asyncio.to_thread(made.start, name, release)
        yield made


def show(pauses: Sequence[tuple[str, Release, float, float]], paused: tuple[str, str]) -> None:
    """Print the pauses of each step, in seconds, of two kinds of use."""
    print(f"\n{'replaced':10} {'by release':10} {paused[0]:>14} {paused[1]:>14}")
    for name, release, *seconds in pauses:
        print(f"{name:10} {release.value:10}", *(f"{each:12.1f} s" for each in seconds))
