"""Sessions over UDP and over queue pairs in one guest of the kernel lab: `make bench-verbs`.

The guest is emulated and its RoCE is software: only the ratios of its figures mean anything.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kernel_lab.lab import Lab
from kernel_lab.test_verbs import GUEST_FILES, disk_of

WIRES = ("udp", "send", "write")
FIGURES = {"messages_per_second": "messages/s", "cpu_micros_per_packet": "CPU µs/packet"}
GUEST_SECONDS = 3600


def measure(rounds: int, output: Path) -> list[dict[str, Any]]:
    """Run each wire once a round, in alternating order, in one guest."""
    output.mkdir(parents=True, exist_ok=True)
    image = disk_of(Path(os.environ["SEALANE_DEB"]), output)
    order = [wire for number in range(rounds) for wire in WIRES[:: -1 if number % 2 else 1]]
    steps = [
        step
        for number, wire in enumerate(order)
        for step in (f"sessions bench {wire}", f"mv /out/bench.json /out/{number}.json")
    ]
    ran = Lab(Path(".lab/guest"), output / "out").run(
        *("roce_pair 4200", "installed", *steps),
        timeout=GUEST_SECONDS,
        options={
            "file": tuple(map(str, GUEST_FILES)),
            "disk": (str(image),),
            "cpus": 2,
            "memory": "2G",
        },
    )
    image.unlink()
    return [ran.json(str(number)) for number in range(len(order))]


def plot(medians: dict[str, dict[str, float]], path: Path) -> None:
    """Draw a bar for each wire, relative to UDP."""
    figure, axes = plt.subplots(1, len(FIGURES), figsize=(8, 3), layout="constrained")
    for axis, (name, label) in zip(axes, FIGURES.items(), strict=True):
        bars = axis.bar(WIRES, [medians[wire][name] / medians["udp"][name] for wire in WIRES])
        axis.bar_label(bars, [f"{medians[wire][name]:,.1f}" for wire in WIRES])
        axis.set(title=label, ylabel="relative to UDP")
        axis.margins(y=0.15)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print a table, write JSON and a plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verbs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each wire (3)")
    parser.add_argument("--output", type=Path, default=Path("sealane-verbs"), help="directory")
    arguments = parser.parse_args()
    samples = measure(arguments.rounds, arguments.output)
    medians = {
        wire: {
            name: statistics.median(each[name] for each in samples if each["wire"] == wire)
            for name in FIGURES
        }
        for wire in WIRES
    }
    document = {"samples": samples, "medians": medians}
    (arguments.output / "verbs.json").write_text(json.dumps(document, indent=1) + "\n")
    plot(medians, arguments.output / "verbs.png")
    print(f"{'wire':8}" + "".join(f"{label:>16}" for label in FIGURES.values()))
    for wire, figures in medians.items():
        print(f"{wire:8}" + "".join(f"{figures[name]:16,.1f}" for name in FIGURES))


if __name__ == "__main__":
    main()
