"""The process that emulates one link: `python -m sealane.lab.emulate`.

Reads the link's parameters as one JSON line and answers with one line (`address` or `error`). Then
answers each request line with one line, until standard input ends. Started by `emulator`.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from sealane._native import Emulator
from sealane.lab import kernel
from sealane.lab.topology import Wan


def start(parameters: dict[str, Any]) -> Emulator:
    """Start the emulator with the given parameters; OSError or ValueError."""
    wan = Wan.model_validate(parameters["wan"])
    forward = [wan.settings] * wan.paths
    backward = [wan.backward.settings] * wan.paths
    outages = [outage.nanos for outage in wan.outages]
    detours = [(*detour.nanos, detour.more_micros * 1000) for detour in wan.detours]
    strips_ce = (wan.strip_ce, wan.backward.strip_ce)
    if parameters["ports"] is None:
        return Emulator.relay(
            forward,
            backward,
            seed=parameters["seed"],
            forward_to=wan.forward_to or "",
            outages=outages,
            detours=detours,
            strips_ce=strips_ce,
        )
    return Emulator.wan(
        forward,
        backward,
        seed=parameters["seed"],
        ports=[tuple(port) for port in parameters["ports"]],
        mtu=parameters["mtu"],
        outages=outages,
        detours=detours,
        access=None if wan.access is None else wan.access.settings,
        strips_ce=strips_ce,
        corruption_passes_checksum=wan.corruption_passes_checksum,
    )


def dropped_on_interfaces() -> int:
    """Return how many packets this namespace's interfaces dropped because a host's queue was full.

    From /proc/net/dev, whose twelfth number is the transmit drops.
    """
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[11]) for line in lines)


def main() -> None:
    """Emulate until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Minimizes late packets, the emulator's error. The native thread, started later, inherits this.
    kernel.go_first()
    parameters = json.loads(sys.stdin.readline())
    try:
        emulator = start(parameters)
    except (OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    # Without namespaces, the interfaces are the machine's: they don't count.
    counted = parameters["ports"] is not None
    print(json.dumps({"address": emulator.address}), flush=True)
    # Up to here, errors were for our starter, which may wait for the end of standard error.
    kernel.let_go(sys.stderr.fileno())
    for line in sys.stdin:
        if json.loads(line)["request"] == "schedule":
            emulator.start_schedule()
            print("{}", flush=True)
            continue
        report = emulator.report()
        report["missed_packets"] += dropped_on_interfaces() if counted else 0
        print(json.dumps(report), flush=True)
    emulator.stop()


if __name__ == "__main__":
    main()
