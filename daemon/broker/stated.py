"""What a node states of itself when it attests: for operators, proved by nothing."""

import datetime as dt
from dataclasses import dataclass
from typing import Final

from sealane.errors import UsageError
from sealane.protocol.v1 import attestation_pb2

VERSION_CHARACTERS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A node's version (empty: not stated), and how far its clock is ahead of the broker's, in ms.

    The time of the call counts as behind.
    """

    version: str = ""
    clock_skew_ms: int | None = None


def stated_in(request: attestation_pb2.AttestRequest, *, now: dt.datetime) -> Stated:
    """Return what a request states; UsageError `attestation.stated.malformed`."""
    version = request.version
    if len(version) > VERSION_CHARACTERS_MAX or not (version.isascii() and version.isprintable()):
        raise UsageError(
            "attestation.stated.malformed",
            f"a version of {len(version)} characters; allowed: {VERSION_CHARACTERS_MAX}, printable "
            "ASCII",
        )
    if not request.HasField("send_time"):
        return Stated(version=version)
    try:
        ahead = request.send_time.ToDatetime(tzinfo=dt.UTC) - now
    except (ValueError, OverflowError) as error:
        raise UsageError(
            "attestation.stated.malformed", "send_time is no time from year 1 to 9999"
        ) from error
    return Stated(version=version, clock_skew_ms=round(ahead / dt.timedelta(milliseconds=1)))
