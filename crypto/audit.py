"""The audit log's format: one line of canonical JSON per record, chained by hash.

A record contains its number, its time and the SHA-256 of the previous line, so no record can be
changed, removed or inserted without changing all later ones. A checkpoint is a record with the
broker's signature over its place in the chain, which authenticates all lines before it. Truncation
of the end can only be detected with a head that is kept elsewhere. Records hold no secrets: callers
pass names, ids, digests and numbers.

A log consists of segments, files that are cut at some size or age. The first record of each but the
first is signed, too. It names the segment before it and where the log now begins: the record before
the first one that is kept. So a log whose oldest segments were retired differs from one that lost
its beginning otherwise.
"""

import base64
import binascii
import datetime as dt
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.anchors import Verifying
from sealane.crypto.encoding import JSON, canonical_json, fields, parse_canonical_json
from sealane.errors import UsageError, VerificationError

LINE_BYTES_MAX: Final = 8192
CHECKPOINT: Final = "audit.checkpoint"
SEGMENT: Final = "audit.segment"

_SEQUENCE_MAX: Final = 2**64 - 1
_TEXT_CHARACTERS_MAX: Final = 512
_ITEMS_MAX: Final = 64
# Fits even in the worst case: a line of 64 items, each with a name and this many characters.
_SHORT_CHARACTERS_MAX: Final = 48
_SHORT_ITEMS_MAX: Final = 1
_KIND: Final = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_MEMBERS: Final = frozenset(
    {"detail", "kind", "outcome", "previous", "reason", "sequence", "subject", "time"}
)

Outcome = Literal["granted", "refused", "done", "failed"]
Detail = str | bytes | int | bool | list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """End of a chain: the number of its last record and SHA-256 of that line."""

    sequence: int
    digest: bytes


GENESIS: Final = Head(sequence=0, digest=bytes(32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One recorded event. `reason` is a stable id, empty for what was granted."""

    sequence: int
    time: dt.datetime
    kind: str
    subject: str
    outcome: str
    reason: str
    detail: Mapping[str, object]
    previous: bytes

    @classmethod
    def decode(cls, line: bytes) -> "Record":
        """Parse one line without its newline; VerificationError `audit.record.malformed`."""
        reason: Final = "audit.record.malformed"
        values = parse_canonical_json(
            line, bytes_max=LINE_BYTES_MAX, what="an audit record", reason=reason
        )
        malformed = VerificationError(reason, "a line of the audit log is not a record")
        sequence, detail = values.get("sequence"), values.get("detail")
        if (
            values.keys() != _MEMBERS
            or not isinstance(sequence, int)
            or not 1 <= sequence <= _SEQUENCE_MAX
            or not isinstance(detail, dict)
        ):
            raise malformed
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        try:
            time = dt.datetime.fromisoformat(texts["time"])
            # Forwarding puts the kind into a message's header.
            if time.tzinfo is None or _KIND.fullmatch(texts["kind"]) is None:
                raise malformed
            return cls(
                sequence=sequence,
                time=time,
                kind=texts["kind"],
                subject=texts["subject"],
                outcome=texts["outcome"],
                reason=texts["reason"],
                detail=detail,
                previous=bytes.fromhex(texts["previous"]),
            )
        except (KeyError, ValueError) as error:
            raise malformed from error


class Chain:
    """Creates the lines that follow `head`."""

    def __init__(self, head: Head = GENESIS) -> None:
        self.head = head

    def append(
        self,
        kind: str,
        *,
        subject: str,
        outcome: Outcome,
        reason: str,
        detail: Mapping[str, Detail],
        now: dt.datetime,
    ) -> bytes:
        """Return the next record's line with its newline, and make it the head.

        Texts are cut to 512 characters, and anything but printable ASCII is replaced by `?`,
        because a stranger may have sent them. Bytes are written in hexadecimal. If a line would
        still be too long, each item of `detail` is shortened further, so long texts can't prevent a
        record.
        """
        if _KIND.fullmatch(kind) is None or len(detail) > _ITEMS_MAX:
            raise UsageError(
                "audit.record.malformed",
                f"{kind!r} can't be an audit record's kind, or has more than {_ITEMS_MAX} details",
            )
        record: dict[str, JSON] = {
            "detail": {name: _plain(value) for name, value in detail.items()},
            "kind": kind,
            "outcome": outcome,
            "previous": self.head.digest.hex(),
            "reason": reason,
            "sequence": self.head.sequence + 1,
            "subject": _text(subject),
            "time": now.astimezone(dt.UTC).isoformat(timespec="microseconds"),
        }
        line = canonical_json(record)
        if len(line) > LINE_BYTES_MAX:
            shorter = {name: _shortened(_plain(value)) for name, value in detail.items()}
            line = canonical_json(record | {"detail": shorter})
        if len(line) > LINE_BYTES_MAX:
            raise UsageError(
                "audit.record.size",
                f"the audit record {kind} has {len(line)} bytes; allowed: {LINE_BYTES_MAX}",
            )
        self.head = _after(self.head, line)
        return line + b"\n"

    def follow(self, line: bytes) -> Head:
        """Adopt a line that was read back; VerificationError `audit.chain.broken`."""
        record = Record.decode(line)
        _check_follows(record, self.head)
        self.head = _after(self.head, line)
        return self.head

    def segment(
        self,
        key: ec.EllipticCurvePrivateKey,
        *,
        former: str,
        beginning: Head,
        now: dt.datetime,
    ) -> bytes:
        """Return the signed first record of the segment after the one named `former`.

        The log then begins after the record `beginning`: `GENESIS` unless segments were retired.
        """
        signed = _segmented(self.head, former, beginning)
        return self.append(
            SEGMENT,
            subject="broker",
            outcome="done",
            reason="",
            detail={
                "former": former,
                "retired_digest": beginning.digest,
                "retired_sequence": beginning.sequence,
                "signature": base64.b64encode(key.sign(signed, ec.ECDSA(SHA256()))).decode(),
            },
            now=now,
        )

    def checkpoint(self, key: ec.EllipticCurvePrivateKey, *, now: dt.datetime) -> bytes:
        """Return a checkpoint over all lines so far, signed with the broker's key."""
        signature = key.sign(_checkpointed(self.head), ec.ECDSA(SHA256()))
        return self.append(
            CHECKPOINT,
            subject="broker",
            outcome="done",
            reason="",
            detail={"signature": base64.b64encode(signature).decode()},
            now=now,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStart:
    """First record of a segment: `before` it, the `former` segment, where the log then began."""

    before: Head
    former: str
    beginning: Head

    @classmethod
    def of(cls, record: Record, *, signer: Verifying | None) -> "SegmentStart":
        """Return what the record says, checked with `signer` unless that is None.

        VerificationError `audit.record.malformed` or `audit.checkpoint.signature`.
        """
        detail = record.detail
        former, sequence = detail.get("former"), detail.get("retired_sequence")
        digest = detail.get("retired_digest")
        malformed = VerificationError(
            "audit.record.malformed",
            f"record {record.sequence} of the audit log does not begin a segment",
        )
        if (
            record.kind != SEGMENT
            or not isinstance(former, str)
            or not isinstance(sequence, int)
            or not 0 <= sequence < record.sequence
            or not isinstance(digest, str)
        ):
            raise malformed
        try:
            beginning = Head(sequence=sequence, digest=bytes.fromhex(digest))
        except ValueError as error:
            raise malformed from error
        before = Head(sequence=record.sequence - 1, digest=record.previous)
        if signer is not None:
            _check_signature(record, _segmented(before, former, beginning), signer)
        return cls(before=before, former=former, beginning=beginning)


class ChainReader:
    """Checks successive lines, from the first record of a log on."""

    def __init__(self, signer: Verifying | None) -> None:
        """Check checkpoints with `signer`; without one they are counted as unsigned."""
        self._signer = signer
        self._is_begun = False
        self._is_retired = True
        self.beginning = GENESIS
        """The record before the first one read."""
        self.head = GENESIS
        self.signed_sequence = 0

    def read(self, line: bytes) -> Record:
        """Check the next line, without its newline, and return it.

        VerificationError `audit.record.malformed`, `audit.chain.broken` or
        `audit.checkpoint.signature`, with the number of the record.
        """
        record = Record.decode(line)
        if not self._is_begun:
            self._begin(record)
        _check_follows(record, self.head)
        if record.kind == SEGMENT:
            start = SegmentStart.of(record, signer=self._signer)
            self._is_retired |= start.beginning == self.beginning
        if record.kind == CHECKPOINT and self._signer is not None:
            _check_signature(record, _checkpointed(self.head), self._signer)
        if record.kind in {CHECKPOINT, SEGMENT} and self._signer is not None:
            self.signed_sequence = self.head.sequence
        self.head = _after(self.head, line)
        return record

    def require_beginning(self) -> None:
        """Raise VerificationError `audit.beginning.missing` unless the whole log was read.

        A log may begin after record 1 only where one of its segments says that what came before was
        retired. Call it after the last line.
        """
        if not self._is_retired:
            raise VerificationError(
                "audit.beginning.missing",
                f"the audit log begins with record {self.beginning.sequence + 1}, and none of its "
                "records says that those before were retired",
            )

    def require(self, head: Head) -> None:
        """Raise VerificationError `audit.truncated` unless the log ends at `head`.

        Call it once as many records have been read as `head` counts.
        """
        if self.head != head:
            raise VerificationError(
                "audit.truncated",
                f"the audit log ends at record {self.head.sequence}; {head.sequence} records were "
                "acknowledged, or different ones",
            )

    def _begin(self, record: Record) -> None:
        self._is_begun = True
        if record.sequence > 1:
            self.beginning = Head(sequence=record.sequence - 1, digest=record.previous)
            self.head = self.beginning
            self._is_retired = False


def verify_log(lines: Iterable[bytes], *, signer: Verifying | None) -> ChainReader:
    """Check a whole log and return the reader at its end."""
    reader = ChainReader(signer)
    for line in lines:
        reader.read(line)
    reader.require_beginning()
    return reader


def _check_follows(record: Record, head: Head) -> None:
    if record.sequence != head.sequence + 1 or record.previous != head.digest:
        raise VerificationError(
            "audit.chain.broken",
            f"record {head.sequence + 1} of the audit log does not follow the one before it: a "
            "record was changed, removed or inserted",
        )


def _after(head: Head, line: bytes) -> Head:
    return Head(sequence=head.sequence + 1, digest=hashlib.sha256(line).digest())


def _check_signature(record: Record, signed: bytes, signer: Verifying) -> None:
    try:
        signature = base64.b64decode(str(record.detail.get("signature")), validate=True)
        signer.verify(signature, signed, ec.ECDSA(SHA256()))
    except (InvalidSignature, binascii.Error) as error:
        raise VerificationError(
            "audit.checkpoint.signature",
            f"checkpoint {record.sequence} of the audit log is not signed by this broker",
        ) from error


def _segmented(head: Head, former: str, beginning: Head) -> bytes:
    return fields(
        "sealane audit segment v1",
        head.sequence.to_bytes(8, "big"),
        head.digest,
        former.encode(),
        beginning.sequence.to_bytes(8, "big"),
        beginning.digest,
    )


def _checkpointed(head: Head) -> bytes:
    return fields("sealane audit checkpoint v1", head.sequence.to_bytes(8, "big"), head.digest)


def _plain(value: Detail) -> JSON:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_text(item) for item in value[:_ITEMS_MAX]]
    return _text(value) if isinstance(value, str) else value


def _shortened(value: JSON) -> JSON:
    if isinstance(value, str):
        return value[:_SHORT_CHARACTERS_MAX]
    if isinstance(value, list):
        return [_shortened(item) for item in value[:_SHORT_ITEMS_MAX]]
    return value


def _text(text: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in text[:_TEXT_CHARACTERS_MAX])
