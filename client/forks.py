"""Forks: what a process opened is unusable in its children, which lack its threads."""

import os

from sealane.errors import UsageError


def check_process(process: int, what: str) -> None:
    """Raise UsageError `client.forked` in a process other than the one with this id.

    Without this check a call in a forked child would wait forever for a thread of the parent.
    """
    if os.getpid() != process:
        raise UsageError(
            "client.forked",
            f"{what} was opened by process {process}, and this is its child {os.getpid()}: open it "
            "here, by its handle or as the parent did",
        )
