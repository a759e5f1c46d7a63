"""Boot a guest made by `build-guest` and run a job in it.

Output of job and kernel goes to standard output; the job's exit status becomes that of run-guest.
124: the time limit ran out. 125: the guest did not start, or ended without an exit status (for
example a panic).
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from kernel_lab import emulation, layout
from kernel_lab.emulation import Guest, GuestOptions


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="run-guest",
        description=__doc__.partition("\n\n")[0],
        epilog=__doc__.partition("\n\n")[2],
    )
    add = parser.add_argument
    add("cache", type=Path, help="the directory given to build-guest")
    add("job", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT…]", help="what to run in it")
    add("--shell", action="store_true", help="give the script the terminal, and no time limit")
    add("--timeout", type=float, default=120, metavar="S", help="seconds until its end (120)")
    add("--out", type=Path, metavar="DIR", help="directory to receive what is left in /out")
    add("--host", default="true", metavar="COMMAND", help="run here whenever lab-ready is called")
    add("--no-network", dest="network", action="store_false", help="no user-mode network")
    add("--tpm", type=Path, metavar="PATH", help="control socket of a running swtpm")
    add("--memory", default="1G", help="guest memory (1G)")
    add("--cpus", type=int, default=1, help="virtual processors (1)")
    add("--append", default="", metavar="OPTIONS", help="more kernel command line")
    add("--qemu", default="", metavar="ARGUMENTS", help="more QEMU arguments")
    add("--name", default="guest", help="the guest's host name")
    add("--verbose", action="store_true", help="show the kernel's messages")
    for option, value, text in (
        ("--file", "PATH[:NAME]", "copy a file or directory into the job's directory"),
        ("--forward", "[udp:]HERE:GUEST", "forward a loopback port of this machine to the guest"),
        ("--tap", "NAME", "another network card, on an existing tap interface"),
        ("--link", "listen:PATH|connect:PATH", "another network card, joined to another guest's"),
        ("--disk", "FILE|SIZE", "another virtio disk, as /dev/lab/disk0 and so on"),
        ("--nvme", "FILE|SIZE[,PROPERTY=VALUE…]", "an emulated NVMe drive: ms=64,mset=1"),
    ):
        add(option, action="append", default=[], metavar=value, help=f"{text} (repeatable)")
    return parser.parse_args()


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main() -> int:
    """Run one guest."""
    values = vars(arguments())
    command = values.pop("host")
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    options = GuestOptions(**{**values, **lists, "shell": values["shell"] or not values["job"]})

    def on_ready(guest: Guest, word: str) -> int:
        ended = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LAB_READY": word},
            check=False,
        )
        return ended.returncode

    return emulation.run(options, console=_write, on_ready=on_ready)


if __name__ == "__main__":
    layout.main(main)
