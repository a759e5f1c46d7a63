"""Every error Sealane raises, in families by the reaction each calls for.

An error names the thing, what was found and what is allowed, and carries a stable reason id
(`noun.noun.fault`) that logs, metrics and gRPC status details share. It never holds a secret.
"""

import re
from typing import Any, ClassVar, Final, NewType

from sealane.reasons import ReasonId

ForeignReason = NewType("ForeignReason", str)
"""A reason id that another process, a peer or the engine gave; only `foreign_reason` makes one."""
Reason = ReasonId | ForeignReason

_FORM: Final = re.compile(r"[a-z0-9_]{1,32}(\.[a-z0-9_]{1,32}){1,3}")


def is_reason(text: str) -> bool:
    """Return whether `text` has the form of a reason id."""
    return _FORM.fullmatch(text) is not None


def foreign_reason(text: str) -> Reason:
    """Return `text` as the reason of an error; `peer.reason.malformed` if it can't be one.

    Reasons become labels of metrics: a peer must not invent what doesn't look like one.
    """
    if is_reason(text):
        return ForeignReason(text)
    return "peer.reason.malformed"


class Error(Exception):
    """Root of all Sealane errors.

    `reason` is the stable id; `exit_code` is what a command-line program ends with.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]} [{self.reason}]"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r}, {self.args[0]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes get errors, too: a data loader's workers send theirs to the trainer.
        return _restored, (type(self), self.args[0], self.__dict__)


def reason_of(error: BaseException, *, otherwise: Reason) -> Reason:
    """Return the reason id of an error, or `otherwise` of one that isn't Sealane's."""
    return error.reason if isinstance(error, Error) else otherwise


def _restored(kind: type[Error], message: str, attributes: dict[str, Any]) -> Error:
    error = kind.__new__(kind, message)
    error.__dict__.update(attributes)
    return error


class UsageError(Error, ValueError):
    """The caller asked for something that can't be: fix the call, the file or the option."""

    exit_code = 2


class VerificationError(Error):
    """Evidence, a certificate, a MAC or a tag is not what it must be: never use the data."""

    exit_code = 3


class SectorVerificationError(VerificationError):
    """A volume's sector is not what was written last. `lba` is its address (4096-byte sectors)."""

    def __init__(self, reason: Reason, message: str, *, lba: int) -> None:
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
