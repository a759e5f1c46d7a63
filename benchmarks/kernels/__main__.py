"""`python -m benchmarks.kernels`: sealing, tree nodes and erasure coding against other libraries.

Builds and runs the Rust program in this folder on one core. Each round runs every case once and
starts with a different one; symbols stay in the caches. ISA-L is measured if libisal2 is installed.
Prints medians and ranges, saves every sample as JSON and draws a plot.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.kernels.report import Sample, decode_table, plot, tables
from rich.console import Console

FOLDER: Final = Path(__file__).parent


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add(
        "what",
        nargs="*",
        choices=["aead", "node", "erasure", "parity", []],
        help="cases to run (default: all)",
    )
    add("--rounds", type=int, default=21, help="rounds; tables show medians (default 21)")
    add(
        "--target",
        help="Rust target to build for instead of this machine's; Cargo's runner for it runs the"
        " program: aarch64-unknown-linux-gnu under QEMU, where only ratios mean anything",
    )
    add("--core", type=int, default=None, help="core to run on (default: any)")
    add("--output", type=Path, default=Path("sealane-kernels"), help="directory for results")
    return found


def run(arguments: argparse.Namespace) -> list[Sample]:
    """Build the program in release mode, run it and return its samples."""
    command = ["cargo", "run", "--release", "--quiet", "--locked"]
    command += ["--manifest-path", str(FOLDER / "Cargo.toml")]
    command += ["--target", arguments.target] if arguments.target else []
    command += ["--"]
    command += [str(arguments.rounds), *arguments.what]
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Sample(**json.loads(line)) for line in printed.splitlines()]


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> int:
    """Measure, print tables, save results."""
    arguments = parser().parse_args()
    console = Console(width=200)
    samples = run(arguments)
    for table in tables(samples):
        console.print(table)
    if any(sample.what == "decode" for sample in samples):
        console.print(decode_table(samples))
    arguments.output.mkdir(parents=True, exist_ok=True)
    document = {
        "processor": processor(),
        "target": arguments.target,
        "rounds": arguments.rounds,
        "load_average": os.getloadavg(),
        "samples": [asdict(sample) for sample in samples],
    }
    (arguments.output / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    plot(arguments.output / "kernels.png", samples)
    console.print(f"saved: {arguments.output / 'results.json'}, {arguments.output / 'kernels.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
