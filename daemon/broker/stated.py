"""What a node states of itself when it attests: for operators, proved by nothing."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sealane.crypto.anchors import ANCHORS_MAX, DIGEST_BYTES
from sealane.daemon.broker.records import NodeRecord, StatedRecord, Stored
from sealane.errors import UsageError
from sealane.protocol.v1 import attestation_pb2

VERSION_CHARACTERS_MAX: Final = 64
LISTENERS_MAX: Final = 8
PURPOSE_CHARACTERS_MAX: Final = 32
ADDRESS_CHARACTERS_MAX: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A node's version (empty: not stated), and how far its clock is ahead of the broker's, in ms.

    The time of the call counts as behind. `addresses` are those of its listeners, by purpose.
    `trusted` are the digests of the authorities that its role accepts certificates of,
    `certified_by` that of the one whose certificate it shows.
    """

    version: str = ""
    clock_skew_ms: int | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    trusted: tuple[bytes, ...] = ()
    certified_by: bytes = b""


def stated_in(request: attestation_pb2.AttestRequest, *, now: dt.datetime) -> Stated:
    """Return what a request states; UsageError `attestation.stated.malformed`."""
    version = request.version
    if not _is_plain(version, VERSION_CHARACTERS_MAX):
        raise UsageError(
            "attestation.stated.malformed",
            f"a version of {len(version)} characters; allowed: {VERSION_CHARACTERS_MAX}, printable "
            "ASCII",
        )
    addresses = dict(request.addresses)
    if len(addresses) > LISTENERS_MAX or not all(
        _is_plain(purpose, PURPOSE_CHARACTERS_MAX) and _is_plain(address, ADDRESS_CHARACTERS_MAX)
        for purpose, address in addresses.items()
    ):
        raise UsageError(
            "attestation.stated.malformed",
            f"{len(addresses)} addresses; allowed: {LISTENERS_MAX}, with purposes of "
            f"{PURPOSE_CHARACTERS_MAX} and addresses of {ADDRESS_CHARACTERS_MAX} characters, "
            "printable ASCII",
        )
    trusted = (*request.trusted_authorities,)
    certified_by = request.certifying_authority
    if (
        len(trusted) > ANCHORS_MAX
        or any(len(each) != DIGEST_BYTES for each in trusted)
        or len(certified_by) not in {0, DIGEST_BYTES}
    ):
        raise UsageError(
            "attestation.stated.malformed",
            f"{len(trusted)} trusted authorities; allowed: {ANCHORS_MAX}, each a SHA-256, and "
            "one of them or none that certifies",
        )
    if not request.HasField("send_time"):
        return Stated(
            version=version, addresses=addresses, trusted=trusted, certified_by=certified_by
        )
    try:
        ahead = request.send_time.ToDatetime(tzinfo=dt.UTC) - now
    except (ValueError, OverflowError) as error:
        raise UsageError(
            "attestation.stated.malformed", "send_time is no time from year 1 to 9999"
        ) from error
    return Stated(
        version=version,
        clock_skew_ms=round(ahead / dt.timedelta(milliseconds=1)),
        addresses=addresses,
        trusted=trusted,
        certified_by=certified_by,
    )


def stated_by(record: NodeRecord, said: Stored[StatedRecord] | None) -> Stated:
    """Return what a node stated; nothing if a broker of an earlier version attested it last."""
    if said is None or said.record.incarnation != record.incarnation:
        return Stated()
    return Stated(
        version=said.record.version,
        clock_skew_ms=said.record.clock_skew_ms,
        trusted=said.record.trusted,
        certified_by=said.record.certified_by,
    )


def _is_plain(text: str, characters_max: int) -> bool:
    return len(text) <= characters_max and text.isascii() and text.isprintable()
