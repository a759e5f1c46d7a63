"""`python -m benchmarks.freshness [WHAT ...]`: cost of each part of freshness.

A Rust program (src/) measures. This one builds and runs it, prints tables, saves every sample as
JSON and draws plots. Rates are per second of *processor* time, so other load on the machine hardly
changes them; latencies are wall time, and other load raises them.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.freshness import plots, report
from rich.console import Console
from rich.table import Table

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
PROGRAM: Final = ROOT / "native/target/release/sealane-benchmark-freshness"
TABLE_COLUMNS: Final = 132

Samples = Sequence[Mapping[str, Any]]

WHAT: Final[Mapping[str, Callable[[Samples], Table]]] = {
    "functions": report.functions,
    "updates": report.updates,
    "writers": report.writers,
    "memory": report.memory,
    "pending": report.pending,
    "writes": report.writes,
    "reads": report.reads,
    "drive": report.drive,
    "latency": report.latency,
    "processor": report.processor,
    "petabyte": report.petabyte,
}


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.freshness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("what", nargs="*", choices=[[], *WHAT], help="measurements to run (default: all)")
    add("--rounds", type=int, default=5, help="rounds; tables show medians (default 5)")
    add(
        "--pool",
        type=int,
        default=19,
        help="log2 of the leaves updated; 0: all, 12 GB (default 19)",
    )
    add("--terabytes", type=int, default=10, help="largest tree; 1000 takes 12 GB (default 10)")
    add("--gibibytes", type=int, default=256, help="largest working set of writes (default 256)")
    add("--milliseconds", type=int, default=500, help="length of each run on a store (default 500)")
    add("--quick", action="store_true", help="one round, small trees and working sets: one minute")
    add(
        "--output",
        type=Path,
        default=Path("sealane-freshness"),
        help="directory for the JSON files and for file stores",
    )
    add("--images", type=Path, help="directory for the plots (default: that of --output)")
    return found


def build() -> None:
    """Build the measuring program in the engine's target directory."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise SystemExit("cargo not found: `make build` lists what is missing")
    subprocess.run(
        [cargo, "build", "--quiet", "--release", "--locked"],
        cwd=HERE,
        env=os.environ | {"CARGO_TARGET_DIR": str(ROOT / "native/target")},
        check=True,
    )


def samples(what: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one measurement and return its samples."""
    options = {
        "functions": [arguments.rounds],
        "updates": [arguments.rounds, arguments.pool],
        "writers": [arguments.rounds],
        "memory": [arguments.terabytes],
        "writes": [arguments.gibibytes, arguments.writes],
        "reads": [arguments.steps],
        "drive": [arguments.rounds, arguments.milliseconds],
        "latency": [arguments.rounds, arguments.milliseconds // 2],
        "processor": [arguments.rounds, arguments.milliseconds, arguments.output],
        "petabyte": [arguments.rounds],
    }
    command = [PROGRAM, what, *map(str, options.get(what, []))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    """Measure, print tables, save JSON and draw plots."""
    arguments = parser().parse_args()
    arguments.writes, arguments.steps = 1 << 20, 5
    if arguments.quick:
        arguments.rounds, arguments.pool, arguments.terabytes = 1, 16, 2
        arguments.gibibytes, arguments.steps = 16, 2
        arguments.milliseconds = 200
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    build()
    images = arguments.images or arguments.output
    for directory in (arguments.output, images):
        directory.mkdir(parents=True, exist_ok=True)
    machine = {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
    }
    for what in arguments.what or WHAT:
        found = samples(what, arguments)
        console.print(WHAT[what](found))
        settings = machine | {"rounds": arguments.rounds, "load_average": os.getloadavg()}
        kept = {"settings": settings, "samples": found}
        (arguments.output / f"{what}.json").write_text(json.dumps(kept, indent=1))
        plots.plot(images, what, found)
    console.print(f"JSON in {arguments.output}, plots in {images}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
