"""`python -m benchmarks.control WHAT`: control-plane benchmarks.

Each one prints a table and saves its samples as JSON in --output.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.control import anchors, attach, leases, scale, verify
from benchmarks.control.result import Result
from rich.console import Console

BENCHMARKS: Final[Mapping[str, Callable[[argparse.Namespace], Result]]] = {
    "anchors": anchors.run,
    "attach": attach.run,
    "leases": leases.run,
    "scale": scale.run,
    "verify": verify.run,
}


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("what", choices=sorted(BENCHMARKS))
    found.add_argument(
        "--seconds", type=float, default=2.0, help="seconds per operation and round (default 2)"
    )
    found.add_argument(
        "--rounds", type=int, default=3, help="rounds; the table shows medians (default 3)"
    )
    found.add_argument(
        "--volumes", type=int, default=1000, help="volumes of `scale` (default 1000)"
    )
    found.add_argument(
        "--hosts", type=int, default=200, help="how many of them get a host (default 200)"
    )
    found.add_argument(
        "--output",
        type=Path,
        default=Path("sealane-control-benchmark"),
        help="directory for the JSON file",
    )
    return found


def main() -> int:
    """Run one benchmark."""
    arguments = parser().parse_args()
    result = BENCHMARKS[arguments.what](arguments)
    # Not a terminal: wide enough for the table.
    Console(width=None if sys.stdout.isatty() else 132).print(result.table)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.what}.json"
    machine = {"cpu": platform.processor(), "cores": os.cpu_count(), "python": sys.version}
    path.write_text(json.dumps({"machine": machine, "samples": result.samples}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
