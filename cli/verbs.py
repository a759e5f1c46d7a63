"""Helpers that add verbs to sealanectl's parser."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sealane.cli.names import PREFIX_MIN, Find
from sealane.cli.output import Command, Output
from sealane.errors import UsageError

WATCH_SECONDS: Final = 2.0
WATCH_SECONDS_MIN: Final = 0.1
WATCH_SECONDS_MAX: Final = 86_400
NAMED: Final = "resource name, as list prints it"
CALLED: Final = (
    f"name, {PREFIX_MIN} or more characters that an id begins with, or display name, as list "
    "prints them"
)

OfflineCommand = Callable[[argparse.Namespace, Output], None]


def verb(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    """Add a verb that calls the daemon."""
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=sentence(text))
    parser.set_defaults(run=run)
    return parser


def sentence(text: str) -> str:
    """Return a help text as the sentence that describes the verb in its own `--help`."""
    return f"{text[0].upper()}{text[1:]}."


def named(
    verbs: Any, name: str, run: Command, text: str, *, find: Find | None = None
) -> argparse.ArgumentParser:
    """Add a verb about one resource, which `find` finds by what the operator calls it."""
    parser = verb(verbs, name, run, text)
    finds(parser, "name", find, metavar="NAME", help=CALLED if find else NAMED)
    return parser


def finds(
    parser: argparse.ArgumentParser, argument: str, find: Find | None, *, metavar: str, **more: Any
) -> None:
    """Add an argument that names a resource."""
    parser.add_argument(argument, metavar=metavar, **more)
    if find is not None:
        parser.set_defaults(finds=(argument, find))


def watched(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--watch` to a verb that shows a state."""
    parser.add_argument(
        "--watch",
        dest="every",
        nargs="?",
        type=pause,
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"show it again at this interval, until interrupted (default: {WATCH_SECONDS:g})",
    )
    return parser


def pause(text: str) -> float:
    """Return an interval in seconds; ArgumentTypeError says what is allowed."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not WATCH_SECONDS_MIN <= seconds <= WATCH_SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: {WATCH_SECONDS_MIN} to {WATCH_SECONDS_MAX} seconds"
        )
    return seconds


def destructive(parser: argparse.ArgumentParser) -> None:
    """Add `--yes` to a verb that asks for confirmation."""
    parser.add_argument(
        "--yes",
        action="store_true",
        help="don't ask for confirmation; required where standard input is not a terminal",
    )


def confirm(options: argparse.Namespace, consequence: str) -> None:
    """Return if the operator agrees to `consequence`, a sentence that says what will happen.

    UsageError `confirmation.refused` if not, `confirmation.missing` without a terminal to ask at.
    """
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "confirmation.missing",
            f"{consequence} Nothing was done: standard input is not a terminal, so nobody can "
            "confirm this; --yes does it without asking",
        )
    print(f"{consequence} Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise UsageError("confirmation.refused", "nothing was done")


def offline(
    verbs: Any, name: str, run: OfflineCommand, text: str, *, file: str, metavar: str = "FILE"
) -> argparse.ArgumentParser:
    """Add a verb that reads a file and needs no daemon; `file` is the help text of the file."""
    made: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=sentence(text))
    made.add_argument("file", type=Path, metavar=metavar, help=file)
    made.set_defaults(run=run, is_offline=True)
    return made
