"""Every error Sealane raises, in families by the reaction each calls for.

An error names the thing, what was found and what is allowed, and carries a stable reason id
(`noun.noun.fault`) that logs, metrics and gRPC status details share. It never holds a secret.
"""

from typing import ClassVar


class Error(Exception):
    """Root of all Sealane errors.

    `reason` is the stable id; `exit_code` is what a command-line program ends with.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]} [{self.reason}]"


class UsageError(Error, ValueError):
    """The caller asked for something that can't be: mend the call, the file or the option."""

    exit_code = 2


class VerificationError(Error):
    """Evidence, a certificate, a MAC or a tag is not what it must be: never use the data."""

    exit_code = 3


class SectorVerificationError(VerificationError):
    """A volume's sector is not what was written last. `lba` is its address (4096-byte sectors)."""

    def __init__(self, reason: str, message: str, *, lba: int) -> None:
        super().__init__(reason, message)
        self.lba = lba


class ProtocolError(Error):
    """The peer broke the rules of its protocol: answer with its code and close."""

    exit_code = 3


class UnavailableError(Error):
    """A daemon, a peer or a resource can't be reached or is used up: try again or elsewhere."""

    exit_code = 4


class LeaseError(UnavailableError):
    """No counters can be had, or those at hand are used up: nothing may be sealed."""


class SessionError(UnavailableError):
    """A message of a session did not arrive, or nobody knows: it may have to be sent again."""
