"""Command lines that answer a mistake in one line."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Ends with code 2 and one line; `--help` has the usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and end."""
        self.exit(2, f"{self.prog}: {message} (--help lists what is allowed)\n")
