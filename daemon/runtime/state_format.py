"""The format of what a daemon keeps on disk: whether this release can read it (upgrade.md)."""

import re
from pathlib import Path
from typing import Final

from sealane.daemon.runtime.files import read_bounded, unusable
from sealane.errors import UsageError

FORMAT_NAME: Final = "format"
"""File in a state directory. Without it the format is 1."""
FORMAT: Final = 1
"""Newest format of state directories that this release reads; it writes nothing newer."""
NEWER: Final = "start the release that wrote it, or a later one"
"""What to do about files of a newer format."""
_TEXT: Final = re.compile(rb"[1-9][0-9]{0,8}\n?")


def check_format(state_dir: Path) -> None:
    """Raise UsageError `directory.format` if a later release wrote the state directory.

    Errors of `unusable` if its format can't be read.
    """
    path = state_dir / FORMAT_NAME
    try:
        content = read_bounded(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(path, error) from error
    if _TEXT.fullmatch(content) is None:
        raise UsageError("directory.format", f"{path}: not the number of a format")
    if int(content) > FORMAT:
        raise UsageError(
            "directory.format",
            f"{state_dir}: state of format {int(content)}, and this release reads up to {FORMAT}: "
            f"{NEWER}",
        )
