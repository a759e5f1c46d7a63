"""Takes snapshots of the brokers' store while calls go on, and decodes their content.

A snapshot holds all records as of one revision, checked against their state record like at a start.
Keys in it are wrapped by the key encryption key, which is not in it.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final

from sealane.crypto.certificates import CertificateAuthority
from sealane.crypto.snapshot import (
    CONTENT_BYTES_MAX,
    PART_BYTES_MAX,
    Header,
    anchor_digest,
    digest_of,
    sealed_snapshot,
)
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.authority import AUTHORITY_KEY, opened_signer, parse_authority
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import KEY_BYTES_MAX, VALUE_BYTES_MAX, Entry, check_key
from sealane.daemon.broker.store.sqlite import SCHEMA_VERSION
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UsageError, VerificationError

RECIPIENT_BYTES: Final = 32
RECORDS_BYTES_MAX: Final = CONTENT_BYTES_MAX - (CONTENT_BYTES_MAX >> 10)
"""Leaves room for the tags of parts, which are more than half full."""
_ENTRY: Final = struct.Struct(">HI")  # bytes of key and value


class Snapshots:
    """Takes snapshots at a broker, for its operator."""

    def __init__(self, registry: Registry, *, node: str, audit: Audit, metrics: Metrics) -> None:
        self._registry = registry
        self._node = node
        self._audit = audit
        self._metrics = metrics

    async def take(self, recipient: bytes) -> AsyncIterator[bytes]:
        """Yield a snapshot's bytes, sealed to `recipient`, an X25519 public key.

        It is in the audit log before the first byte leaves. UsageError `broker.snapshot.recipient`,
        `broker.snapshot.size`; VerificationError `key.kem.invalid`;
        VerificationError `broker.store.rolled_back`: the records are not what brokers left.
        """
        if len(recipient) != RECIPIENT_BYTES:
            raise UsageError(
                "broker.snapshot.recipient",
                f"a recipient of {len(recipient)} bytes; allowed: {RECIPIENT_BYTES}",
            )
        entries, state = await self._registry.store.copy()
        await asyncio.to_thread(_check_size, entries)
        # Not the one that signs now: a step of a replacement may lie in between.
        authority = await asyncio.to_thread(self._authority_in, entries)
        now = utc_now()
        header = Header(
            anchor_sha256=anchor_digest(authority.certificate),
            recipient_sha256=digest_of(recipient),
            node=self._node,
            created=int(now.timestamp()),
            revision=state.revision,
            state_number=state.number,
            record_count=state.count,
            schema=SCHEMA_VERSION,
        )
        parts = sealed_snapshot(
            header,
            _pieces(entries),
            recipient=recipient,
            signing_key=authority.signing_key,
        )
        # Sealed to the recipient, so that a key that can't be sealed to is refused before.
        first = next(parts)
        await self._audit.record(
            "broker.snapshot",
            subject="operator",
            outcome="done",
            revision=state.revision,
            records=state.count,
            recipient=bytes.fromhex(header.recipient_sha256),
        )
        get_logger().info("broker_snapshot", revision=state.revision, records=state.count)
        yield first
        for part in parts:
            yield part
        self._metrics.broker.snapshots.inc()
        self._metrics.broker.last_snapshot.set(now.timestamp())

    def _authority_in(self, entries: Mapping[str, bytes]) -> CertificateAuthority:
        """Open the authority of copied records; errors of `parse_authority`, `opened_signer`."""
        record = parse_authority(Entry(AUTHORITY_KEY, entries[AUTHORITY_KEY], 0))
        authority, _ = opened_signer(
            record.wrapped_key, record.certificate, self._registry.keys, key_id=record.key_id
        )
        return authority


def _check_size(entries: Mapping[str, bytes]) -> None:
    size = sum(_ENTRY.size + len(key) + len(value) for key, value in entries.items())
    if size > RECORDS_BYTES_MAX:
        raise UsageError(
            "broker.snapshot.size",
            f"the store has {size} bytes of records; allowed in a snapshot: {RECORDS_BYTES_MAX}",
        )


def _pieces(entries: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the encoded entries in pieces of at most PART_BYTES_MAX."""
    piece = bytearray()
    for key, value in entries.items():
        encoded = _ENTRY.pack(len(key), len(value)) + key.encode("ascii") + value
        if len(piece) + len(encoded) > PART_BYTES_MAX:
            yield bytes(piece)
            piece.clear()
        piece += encoded
    yield bytes(piece)


def decoded(content: bytes) -> dict[str, bytes]:
    """Return the entries of a snapshot's content; VerificationError `broker.snapshot.damaged`."""
    entries: dict[str, bytes] = {}
    position = 0
    while position < len(content):
        if len(content) - position < _ENTRY.size:
            raise _malformed()
        key_bytes, value_bytes = _ENTRY.unpack_from(content, position)
        position += _ENTRY.size
        is_long = key_bytes > KEY_BYTES_MAX or value_bytes > VALUE_BYTES_MAX
        if is_long or len(content) - position < key_bytes + value_bytes:
            raise _malformed()
        key = content[position : position + key_bytes].decode("ascii", errors="replace")
        position += key_bytes
        try:
            check_key(key)
        except UsageError as error:
            raise _malformed() from error
        if key in entries:
            raise _malformed()
        entries[key] = content[position : position + value_bytes]
        position += value_bytes
    return entries


def _malformed() -> VerificationError:
    return VerificationError(
        "broker.snapshot.damaged", "the snapshot's content is not a list of records"
    )
