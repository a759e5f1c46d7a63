"""The authority's record: made, read, and opened with the key encryption keys of a broker."""

import asyncio
import secrets
from collections.abc import Collection, Iterable
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from sealane.crypto.certificates import CertificateAuthority
from sealane.crypto.exchange import wipe
from sealane.crypto.keys import KEY_BYTES, KeyWrapper
from sealane.daemon.broker.keyring import UNNAMED, Keyring, missing
from sealane.daemon.broker.records import AuthorityRecord, Stored
from sealane.daemon.broker.store.contract import Compare, Entry
from sealane.daemon.broker.store.record_keys import NamedKeys
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import UsageError, VerificationError

AUTHORITY_KEY: Final = "authority"
"""Key of the authority's record in the store."""
BROKER_KEY: Final = "broker key"
RECORD_KEY: Final = "record key"
"""Purposes of the two keys wrapped in it."""
OWNER: Final = "broker"


def new_authority(wrapping: KeyWrapper, node: str) -> tuple[AuthorityRecord, bytes]:
    """Return a new authority and its key for the MACs of records."""
    made, wrapped = new_signer(wrapping, node)
    record_key, wrapped_record_key = new_record_key(wrapping)
    record = AuthorityRecord(
        wrapped_key=wrapped,
        certificate=made.certificate.public_bytes(serialization.Encoding.DER),
        wrapped_record_key=wrapped_record_key,
    )
    return record, record_key


def new_signer(wrapping: KeyWrapper, node: str) -> tuple[CertificateAuthority, bytes]:
    """Return a new key and certificate of an authority, and its key wrapped."""
    made = CertificateAuthority.create(broker=node, now=utc_now())
    key = made.private_bytes()
    try:
        return made, wrapping.wrap(key, purpose=BROKER_KEY, owner=OWNER)
    finally:
        wipe(key)


def new_record_key(wrapping: KeyWrapper, number: int = 0) -> tuple[bytes, bytes]:
    """Return a new key for the MACs of records, and the same wrapped as the key of that number."""
    key = secrets.token_bytes(KEY_BYTES)
    return key, wrapping.wrap(key, purpose=RECORD_KEY, owner=_record_key_owner(number))


def _record_key_owner(number: int) -> str:
    """Return the owner that a record key is wrapped for, which binds its number.

    Otherwise who can write to the store could name a replaced key as the one that follows.
    """
    return f"{OWNER} {number}" if number else OWNER


def authority_entry(record: AuthorityRecord) -> dict[str, bytes]:
    """Return the put for the authority's record, which its wrapping protects instead of a MAC."""
    return {AUTHORITY_KEY: record.model_dump_json().encode()}


def same_authority(stored: Stored[AuthorityRecord]) -> Compare:
    """Return the compare for a commit: the authority's record is unchanged since it was read."""
    return Compare(AUTHORITY_KEY, stored.revision)


def rewrapped_authority(
    record: AuthorityRecord, keys: Keyring, *, key_id: bytes
) -> AuthorityRecord:
    """Return `record` with its keys wrapped under the key `key_id`, and the one before noted."""
    wrapping = keys.key(key_id)

    def again(wrapped: bytes, purpose: str, owner: str = OWNER) -> tuple[bytes, bytes]:
        secret, previous = keys.unwrap(wrapped, key_id=record.key_id, purpose=purpose, owner=owner)
        try:
            return wrapping.wrap(secret, purpose=purpose, owner=owner), previous
        finally:
            wipe(secret)

    key, _ = again(record.wrapped_key, BROKER_KEY)
    number = record.record_key_number
    record_key, previous = again(record.wrapped_record_key, RECORD_KEY, _record_key_owner(number))
    succession = record.succession
    if succession is not None and succession.wrapped_key:
        other, _ = again(succession.wrapped_key, BROKER_KEY)
        succession = succession.model_copy(update={"wrapped_key": other})
    return record.model_copy(
        update={
            "wrapped_key": key,
            "wrapped_record_key": record_key,
            "succession": succession,
            "key_id": key_id,
            "previous_key_id": previous,
        }
    )


def parse_authority(entry: Entry) -> AuthorityRecord:
    """Parse a stored authority; VerificationError `broker.store.malformed`."""
    try:
        return AuthorityRecord.model_validate_json(entry.value)
    except ValidationError as error:
        raise VerificationError(
            "broker.store.malformed", "the stored authority can't be read"
        ) from error


def check_has(ids: Collection[bytes], needed: Iterable[bytes]) -> None:
    """UsageError `broker.key.missing` unless the keys `ids` include all that the store needs."""
    for key_id in needed:
        if key_id != UNNAMED and key_id not in ids:
            raise UsageError("broker.key.missing", missing(key_id, ids))


def opened_authority(
    record: AuthorityRecord, keys: Keyring
) -> tuple[CertificateAuthority, NamedKeys, bytes]:
    """Return the authority, the keys for the MACs of records, and the id of their wrapping key."""
    authority, key_id = opened_signer(
        record.wrapped_key, record.certificate, keys, key_id=record.key_id
    )
    return authority, opened_record_keys(record, keys), key_id


def opened_record_keys(record: AuthorityRecord, keys: Keyring) -> NamedKeys:
    """Return the keys for the MACs of records; errors of `Keyring.unwrap`."""

    def opened(wrapped: bytes, number: int) -> bytes:
        owner = _record_key_owner(number)
        return bytes(keys.unwrap(wrapped, key_id=record.key_id, purpose=RECORD_KEY, owner=owner)[0])

    before, number = record.wrapped_previous_record_key, record.record_key_number
    return NamedKeys(
        present=opened(record.wrapped_record_key, number),
        previous=opened(before, number - 1) if before else None,
        number=number,
    )


class AuthorityNaming:
    """The authority's record as that which names the record keys (`KeyNaming`)."""

    key: Final = AUTHORITY_KEY

    def __init__(self, keys: Keyring) -> None:
        self._keys = keys

    async def named(self, value: bytes) -> NamedKeys:
        """See `KeyNaming`; VerificationError `broker.store.malformed`, `key.wrap.invalid`."""
        record = parse_authority(Entry(AUTHORITY_KEY, value, 0))
        return await asyncio.to_thread(opened_record_keys, record, self._keys)

    def names_previous(self, value: bytes) -> bool:
        """See `KeyNaming`."""
        return bool(parse_authority(Entry(AUTHORITY_KEY, value, 0)).wrapped_previous_record_key)


def opened_signer(
    wrapped: bytes, certificate: bytes, keys: Keyring, *, key_id: bytes
) -> tuple[CertificateAuthority, bytes]:
    """Return an authority with its key, and the id of the key that this is wrapped under."""
    encoded, found = keys.unwrap(wrapped, key_id=key_id, purpose=BROKER_KEY, owner=OWNER)
    key = serialization.load_der_private_key(bytes(encoded), password=None)
    wipe(encoded)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise VerificationError("broker.store.malformed", "the stored broker key is not on P-256")
    return CertificateAuthority(key, x509.load_der_x509_certificate(certificate)), found
