"""Sealane's errors over gRPC: status code, text, and the reason id in the trailers.

One table for both directions, used by all servicers (daemon) and callers (daemon, client). The
reason id is in the trailing metadata `sealane-reason`; the text never contains a secret.
"""

from typing import Final

import grpc

from sealane.errors import (
    Error,
    LeaseError,
    ProtocolError,
    Reason,
    UnavailableError,
    UsageError,
    VerificationError,
    foreign_reason,
    is_reason,
)
from sealane.reasons import ReasonId

REASON_KEY: Final = "sealane-reason"
_TEXT_MAX: Final = 1000  # characters: trailers are limited, and a log line is for people

# Parts of gRPC's texts for a handshake that fails on the peer's certificate: chain or time, and
# name.
_BAD_CERTIFICATE: Final = ("certificate_verify_failed", "hostname verification check failed")

_CODE_OF_FAMILY: Final[tuple[tuple[type[Error], grpc.StatusCode], ...]] = (
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (VerificationError, grpc.StatusCode.PERMISSION_DENIED),
    (ProtocolError, grpc.StatusCode.ABORTED),
    (LeaseError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (Error, grpc.StatusCode.INTERNAL),
)

# Codes that AIP-193 requires instead of the family's, by the last word of the reason id.
_CODE_OF_FAULT: Final = {
    "not_found": grpc.StatusCode.NOT_FOUND,
    "exists": grpc.StatusCode.ALREADY_EXISTS,
    "state": grpc.StatusCode.FAILED_PRECONDITION,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "limit": grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_FAMILY_OF_CODE: Final[dict[grpc.StatusCode, type[Error]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.OUT_OF_RANGE: UsageError,
    grpc.StatusCode.NOT_FOUND: UsageError,
    grpc.StatusCode.ALREADY_EXISTS: UsageError,
    grpc.StatusCode.FAILED_PRECONDITION: UsageError,
    grpc.StatusCode.UNIMPLEMENTED: UsageError,
    grpc.StatusCode.PERMISSION_DENIED: VerificationError,
    grpc.StatusCode.UNAUTHENTICATED: VerificationError,
    grpc.StatusCode.DATA_LOSS: VerificationError,
    grpc.StatusCode.ABORTED: ProtocolError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
}

# Of a peer that gives no reason id.
_REASON_OF_CODE: Final[dict[grpc.StatusCode, ReasonId]] = {
    grpc.StatusCode.OK: "peer.unknown",
    grpc.StatusCode.CANCELLED: "peer.cancelled",
    grpc.StatusCode.UNKNOWN: "peer.unknown",
    grpc.StatusCode.INVALID_ARGUMENT: "peer.invalid_argument",
    grpc.StatusCode.DEADLINE_EXCEEDED: "peer.deadline_exceeded",
    grpc.StatusCode.NOT_FOUND: "peer.not_found",
    grpc.StatusCode.ALREADY_EXISTS: "peer.already_exists",
    grpc.StatusCode.PERMISSION_DENIED: "peer.permission_denied",
    grpc.StatusCode.UNAUTHENTICATED: "peer.unauthenticated",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "peer.resource_exhausted",
    grpc.StatusCode.FAILED_PRECONDITION: "peer.failed_precondition",
    grpc.StatusCode.ABORTED: "peer.aborted",
    grpc.StatusCode.UNIMPLEMENTED: "peer.unimplemented",
    grpc.StatusCode.OUT_OF_RANGE: "peer.out_of_range",
    grpc.StatusCode.INTERNAL: "peer.internal",
    grpc.StatusCode.UNAVAILABLE: "peer.unreachable",
    grpc.StatusCode.DATA_LOSS: "peer.data_loss",
}


def status_of(error: Error) -> grpc.StatusCode:
    """Return the status code that a servicer answers `error` with."""
    if isinstance(error, UsageError | UnavailableError | VerificationError):
        code = _CODE_OF_FAULT.get(error.reason.rpartition(".")[2])
        if code is not None:
            return code
    return next(code for family, code in _CODE_OF_FAMILY if isinstance(error, family))


def one_line(error: Error) -> str:
    """Return the text of `error` for sending: one line of limited length."""
    return _first_line(str(error.args[0]))


def error_of(error: grpc.aio.AioRpcError, *, peer: str) -> Error:
    """Return the error for a failed call to `peer`, with the peer's reason id if there is one."""
    reason: Reason | None = None
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UsageError(
            "peer.unimplemented", f"{peer} does not run the role that offers this call"
        )
    for key, value in error.trailing_metadata() or ():
        if key == REASON_KEY and isinstance(value, str) and is_reason(value):
            reason = foreign_reason(value)
    code = error.code()
    if reason is None:
        details = (error.details() or "").lower()
        if code is grpc.StatusCode.UNAVAILABLE and any(s in details for s in _BAD_CERTIFICATE):
            return VerificationError(
                "peer.certificate",
                f"{peer}: its certificate has expired, is not issued by the trust anchor, or is "
                "not the newest one of that node and role",
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError("peer.deadline_exceeded", f"{peer} did not answer in time")
        if code is grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(
                "peer.unreachable", f"{peer} can't be reached: {_first_line(error.details())}"
            )
        reason = _REASON_OF_CODE[code]
    family = _FAMILY_OF_CODE.get(code, Error)
    if family is UnavailableError and reason.startswith("lease."):
        family = LeaseError
    return family(reason, _first_line(error.details()) or f"{peer} answered {code.name}")


def _first_line(text: str | None) -> str:
    line = (text or "").partition("\n")[0]
    return line if len(line) <= _TEXT_MAX else line[: _TEXT_MAX - 1] + "…"
