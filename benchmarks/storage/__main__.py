"""`python -m benchmarks.storage`: plain and sealed volumes compared, or any NVMe/TCP target.

Without --target it starts a broker, a target and a gateway, and measures a plain namespace of the
target and a sealed volume behind the gateway alternately, so that other load slows both.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.storage.cells import Cell, Sample, all_cells
from benchmarks.storage.measure import System, host_of, measure
from benchmarks.storage.report import plot, table, write_json
from benchmarks.storage.world import running_systems
from rich.console import Console
from rich.progress import Progress

from sealane.errors import Error

# Width of the table when the output isn't a terminal.
TABLE_COLUMNS = 132
HOST_NQN = "nqn.2026-11.dev.sealane:benchmark-host"


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.storage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--target", metavar="HOST:PORT", help="measure this controller instead of our own systems")
    add("--subsystem", metavar="NQN", help="subsystem NQN at --target")
    add("--host-nqn", default=HOST_NQN, metavar="NQN", help="host NQN to connect with")
    add(
        "--beside",
        action="store_true",
        help="with --target: measure our own systems in the same run",
    )
    add(
        "--store", default="memory", choices=("memory", "file", "emulated"), help="storage back end"
    )
    add("--drive", metavar="NAME", help="drive for --store emulated: sn655 or evo870")
    add("--seconds", type=float, default=1.0, help="seconds per cell, system and round (default 1)")
    add("--rounds", type=int, default=5, help="rounds; the table shows medians (default 5)")
    add("--depths", default="1,32", help="commands outstanding per queue (default 1,32)")
    add("--queues", default="1,2", help="I/O queues (default 1,2)")
    add("--span-mib", type=int, default=256, help="MiB of the namespace to use (default 256)")
    add("--only", metavar="TEXT", help="only cells whose name contains TEXT")
    add("--seed", type=int, default=1, help="seed of block addresses and data (default 1)")
    add(
        "--output",
        type=Path,
        default=Path("sealane-storage-benchmark"),
        help="directory for results",
    )
    return found


async def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure every cell on every system, round by round, and write the results."""
    numbers = [
        tuple(int(part) for part in text.split(","))
        for text in (arguments.depths, arguments.queues)
    ]
    cells = [c for c in all_cells(*numbers) if not arguments.only or arguments.only in c.name]
    if not cells:
        raise SystemExit(f"--only {arguments.only}: no cell name contains it")
    samples: list[Sample] = []
    async with systems_of(arguments) as systems:
        with Progress(console=console, transient=True) as progress:
            total = len(systems) * len(cells) * arguments.rounds
            bar = progress.add_task("measuring", total=total)
            await prefill(systems, arguments)
            for round_ in range(arguments.rounds):
                for cell in cells:
                    # Each round starts with another system, so the order favours none.
                    for turn in range(len(systems)):
                        system = systems[(turn + round_) % len(systems)]
                        progress.update(bar, description=f"{cell.name} {system.name}")
                        samples.append(
                            await measure(
                                system,
                                cell,
                                seconds=arguments.seconds,
                                span_bytes=arguments.span_mib << 20,
                                round_=round_ + arguments.seed,
                            )
                        )
                        progress.advance(bar)
        names = [system.name for system in systems]
    publish(arguments, console, samples, cells, names)


async def prefill(systems: list[System], arguments: argparse.Namespace) -> None:
    """Write the whole span once: reading unwritten blocks would be too cheap."""
    chunk = secrets.token_bytes(8 << 20)
    for system in systems:
        async with host_of(system) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            blocks = len(chunk) // queue.namespace.block_bytes
            for index in range((arguments.span_mib << 20) // len(chunk)):
                await queue.write(index * blocks, chunk)
            await queue.close()


def publish(
    arguments: argparse.Namespace,
    console: Console,
    samples: list[Sample],
    cells: list[Cell],
    names: list[str],
) -> None:
    """Print the table; save JSON and the plot."""
    console.print(table(samples, cells, names))
    arguments.output.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(arguments).items()
    }
    settings |= {"machine": platform.machine(), "processors": os.cpu_count()}
    write_json(arguments.output / "results.json", samples, cells, names, settings)
    plot(arguments.output / "storage.png", samples, cells, names)
    console.print(f"results.json and storage.png in {arguments.output}")


@contextlib.asynccontextmanager
async def systems_of(arguments: argparse.Namespace) -> AsyncIterator[list[System]]:
    """Yield the systems to measure; ratios are relative to the first."""
    async with contextlib.AsyncExitStack() as stack:
        systems = []
        if arguments.target is None or arguments.beside:
            systems = await stack.enter_async_context(
                running_systems(
                    store=arguments.store,
                    drive=arguments.drive,
                    size_bytes=arguments.span_mib << 20,
                    host_nqn=arguments.host_nqn,
                )
            )
        if arguments.target is not None:
            if arguments.subsystem is None:
                raise SystemExit("--target needs --subsystem")
            host, _, port = arguments.target.rpartition(":")
            peer = System(
                name="target",
                traddr=host.strip("[]"),
                trsvcid=int(port),
                subsystem_nqn=arguments.subsystem,
                host_nqn=arguments.host_nqn,
                processes={},
            )
            systems.insert(0, peer)
        yield systems


def main() -> int:
    """Run the benchmark; print an error as one line."""
    arguments = parser().parse_args()
    console = Console(width=TABLE_COLUMNS) if not sys.stdout.isatty() else Console()
    try:
        asyncio.run(run(arguments, console))
    except Error as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
