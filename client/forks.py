"""What was opened before a fork is the parent's: its threads and sockets aren't in the child."""

import os

from sealane.errors import UsageError


def check_process(process: int, what: str) -> None:
    """UsageError `client.forked` in a process that is forked from the one with this id.

    Without this a call in the child would wait for ever: what answers it runs in the parent.
    """
    if os.getpid() != process:
        raise UsageError(
            "client.forked",
            f"{what} was opened by process {process}, and this is its child {os.getpid()}: open it "
            "here, from its handle or anew",
        )
