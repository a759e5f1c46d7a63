"""Command lines that answer a mistake in one line."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Ends with code 2 and one line; `--help` has the usage."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is no text before anything is made of it."""
        given = sys.argv[1:] if args is None else args
        for argument in given:
            if any("\ud800" <= c <= "\udfff" for c in argument):
                self.error(f"argument {argument!r}: not UTF-8")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and end."""
        self.exit(2, f"{self.prog}: {message} (--help lists what is allowed)\n")
