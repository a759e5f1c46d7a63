"""Helpers that add verbs to sealanectl's parser."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sealane.cli.output import Command, Output
from sealane.errors import UsageError

OfflineCommand = Callable[[argparse.Namespace, Output], None]


def verb(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    """Add a verb that calls the daemon."""
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=sentence(text))
    parser.set_defaults(run=run)
    return parser


def sentence(text: str) -> str:
    """Return a help text as the sentence that describes the verb in its own `--help`."""
    return f"{text[0].upper()}{text[1:]}."


def named(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    """Add a verb about one resource."""
    parser = verb(verbs, name, run, text)
    parser.add_argument("name", metavar="NAME", help="resource name, as list prints it")
    return parser


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
