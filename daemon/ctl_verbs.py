"""How verbs enter sealanectl's parser."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sealane.daemon.ctl_output import Command, Output

OfflineCommand = Callable[[argparse.Namespace, Output], None]


def verb(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    """Add a verb that calls the daemon."""
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.set_defaults(run=run)
    return parser


def named(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    """Add a verb about one resource."""
    parser = verb(verbs, name, run, text)
    parser.add_argument("name", metavar="NAME", help="resource name, as create prints it")
    return parser


def offline(
    verbs: Any, name: str, run: OfflineCommand, text: str, *, metavar: str = "FILE"
) -> argparse.ArgumentParser:
    """Add a verb about a file, which needs no daemon."""
    made: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    made.add_argument("file", type=Path, metavar=metavar)
    made.set_defaults(run=run, is_offline=True)
    return made
