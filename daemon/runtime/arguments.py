"""Parsers of command lines that report a mistake in one line."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line and exits with code 2; `--help` has the usage.

    A parser with `fill` gets its arguments from `fill(parser)` when it first parses, so that other
    subcommands don't wait for its imports.
    """

    def __init__(
        self, *, fill: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._fill = fill

    def complete(self) -> None:
        """Get the arguments now: for who reads the parser, rather than parses with it."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments, after refusing those that are not UTF-8."""
        given = sys.argv[1:] if args is None else args
        for argument in given:
            if any("\ud800" <= c <= "\udfff" for c in argument):
                self.error(f"argument {argument!r}: not UTF-8")
        self.complete()
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit."""
        self.exit(2, f"{self.prog}: {message} (--help lists what is allowed)\n")


class bounded:  # noqa: N801 - reads as a type in add_argument
    """An integer within bounds, which the error message names."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum

    def __call__(self, text: str) -> int:
        """Read and check the number."""
        try:
            value = int(text)
        except ValueError:
            value = self._minimum - 1
        if not self._minimum <= value <= self._maximum:
            raise argparse.ArgumentTypeError(
                f"found {text!r}, allowed: {self._minimum} to {self._maximum}"
            )
        return value


def system_refused(program: str, error: OSError) -> int:
    """Print an error of the operating system, unless it is a broken pipe; return the exit code.

    Discards the rest of standard output, so that the interpreter doesn't fail to write it at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {where}{error.strerror or error}", file=sys.stderr)
    return 1
