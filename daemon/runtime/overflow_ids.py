"""The ids by which the kernel names users and groups that a user namespace doesn't map."""

from pathlib import Path
from typing import Final

_DEFAULT: Final = 65_534


def overflow_ids() -> tuple[int, int]:
    """Return the uid and the gid that stand for all those not mapped here."""
    return _number("overflowuid"), _number("overflowgid")


def _number(name: str) -> int:
    try:
        return int(Path("/proc/sys/kernel", name).read_text())
    except (OSError, ValueError):  # the unit hides /proc/sys; nobody changes the numbers
        return _DEFAULT
