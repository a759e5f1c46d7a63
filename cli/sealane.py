"""`sealane`: programs to run by hand on one machine: the demo and the link lab."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import sealane
from sealane.cli.demo.options import DemoOptions
from sealane.daemon.runtime.arguments import OneLineParser, bounded, system_refused
from sealane.errors import Error

MESSAGES_DEFAULT = 150
MESSAGES_MAX = 1000
VOLUME_BYTES_MAX = 1 << 40
SIGNALLED = 128  # plus the signal's number, as in shells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; print an error as one line and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["lab"]:
        from sealane.cli import lab  # noqa: PLC0415 - the demo doesn't need it

        return lab.main(given[1:])
    options = parse(given)
    # Imported after parsing, so that `--version` and `--help` answer at once.
    from rich.console import Console  # noqa: PLC0415

    from sealane.cli.demo.run import StopSignal, run_demo  # noqa: PLC0415

    console = Console(stderr=True, highlight=False)
    stop = StopSignal()
    try:
        results = asyncio.run(run_demo(options, console, stop))
        sys.stdout.flush()
    except asyncio.CancelledError:
        console.print("sealane: interrupted; everything it started is stopped and removed")
        return SIGNALLED + stop.number
    except Error as error:
        print(f"sealane: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        return system_refused("sealane", error)
    return 0 if results.holds else 3


def parse(arguments: Sequence[str]) -> DemoOptions:
    """Read the command line; a mistake ends the program with one line and exit code 2."""
    parsed = command_line().parse_args(arguments)
    return DemoOptions(
        input=parsed.input,
        output=parsed.output,
        messages=parsed.messages,
        volume_bytes=parsed.volume_size,
        seed=parsed.seed,
        all_reduce=parsed.all_reduce,
        accelerator=parsed.accelerator,
    )


def command_line() -> OneLineParser:
    """Return the parser of the program's arguments."""
    parser = OneLineParser(prog="sealane", description=sealane.__doc__)
    parser.add_argument("--version", action="version", version=f"sealane {sealane.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="run the main job on this machine: a sealed volume, attacks, a long-haul session",
        description=(
            "Start broker, target, gateway and two fabrics as processes on this machine; write the "
            "input to a sealed volume and read it back; attack the volume; carry the input over an "
            "emulated long link. Takes about a minute. Exit code 0 if every check held, 3 if not."
        ),
    )
    demo.add_argument(
        "--input",
        type=Path,
        metavar="PATH",
        help="file to work on (default: the standard library's .py files as one archive)",
    )
    demo.add_argument(
        "--output",
        type=Path,
        metavar="DIRECTORY",
        default=Path("sealane-demo"),
        help="directory for completion-times.png and results.json (default: %(default)s)",
    )
    demo.add_argument(
        "--messages",
        type=bounded(1, MESSAGES_MAX),
        metavar="N",
        default=MESSAGES_DEFAULT,
        help=f"1 MiB messages timed per scheme, 1 to {MESSAGES_MAX} (default: %(default)s)",
    )
    demo.add_argument(
        "--volume-size",
        type=bounded(1 << 20, VOLUME_BYTES_MAX),
        metavar="BYTES",
        help="size of the volume (default: what the input needs)",
    )
    demo.add_argument(
        "--seed",
        type=bounded(0, (1 << 63) - 1),
        metavar="N",
        default=1,
        help="seed of the link's losses and of the sample (default: %(default)s)",
    )
    demo.add_argument(
        "--all-reduce",
        action="store_true",
        help="also all-reduce arrays of both fabrics' jobs in a ring, and compare with the model",
    )
    demo.add_argument(
        "--accelerator",
        action="store_true",
        help="also let an emulated accelerator card seal writes, and kill it in the middle of them",
    )
    # Only for --help: sealane.cli.lab reads its arguments.
    commands.add_parser("lab", help="hosts and long links in network namespaces", add_help=False)
    return parser
