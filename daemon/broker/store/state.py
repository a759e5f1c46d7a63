"""The state record, which binds all records of a store, and the keyed set hash in it.

The hash of a set of entries is the sum modulo 2^256 of a pseudorandom function (HMAC-SHA256 under a
key that only brokers have) of each key with its value, so one change updates it in constant time.
The sum itself never leaves the process. With two sums an adversary would learn the difference of
two values, and from enough differences could look for a combination that cancels out (a generalised
birthday attack). The store only holds a tag: HMAC over the number of the state, the number of
entries, the tag of the previous state, and the sum.

The tag of the previous state makes the states a chain: two histories that have diverged never meet
again.
"""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sealane.crypto.encoding import fields
from sealane.daemon.broker.store.contract import STATE_BYTES_MAX, STATE_KEY
from sealane.errors import VerificationError

_TAG_BYTES: Final = 32
_MODULUS: Final = 1 << (8 * _TAG_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """An entry as a broker remembers it: the revision of its last change, and its value's hash."""

    revision: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One state of a store. `total` is secret: it is never logged, sent or stored."""

    number: int
    count: int
    total: int
    tag: bytes
    revision: int


class _StateRecord(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )

    number: Annotated[int, Field(ge=1)]
    count: Annotated[int, Field(ge=0)]
    previous: bytes


class SetHash:
    """The keyed hash under two keys derived from the brokers' record key."""

    def __init__(self, record_key: bytes) -> None:
        self._entry_key = hmac.digest(record_key, b"sealane store entry v1", "sha256")
        self._state_key = hmac.digest(record_key, b"sealane store state v1", "sha256")

    def digest(self, key: str, value: bytes) -> int:
        """Return the entry's contribution to the sum."""
        message = fields("sealane store entry v1", key.encode("ascii"), value)
        return int.from_bytes(hmac.digest(self._entry_key, message, "sha256"), "big")

    def first(self, entries: Mapping[str, bytes]) -> bytes:
        """Return the state record of a new store that holds exactly `entries`."""
        total = sum(self.digest(key, value) for key, value in entries.items()) % _MODULUS
        record = _StateRecord(number=1, count=len(entries), previous=bytes(_TAG_BYTES))
        return self._sealed(record, total)

    def next(
        self, before: State, *, removed: Iterable[Known], added: Iterable[int], growth: int
    ) -> tuple[State, bytes]:
        """Return the state after `before`, at revision 0, and its record.

        `removed` are entries replaced or deleted, `added` the digests of what was put, `growth` the
        change in the number of entries.
        """
        total = (before.total - sum(k.digest for k in removed) + sum(added)) % _MODULUS
        record = _StateRecord(
            number=before.number + 1, count=before.count + growth, previous=before.tag
        )
        sealed = self._sealed(record, total)
        return _state(record, sealed, total, revision=0), sealed

    def rebound(self, before: State, *, total: int, count: int) -> tuple[State, bytes]:
        """Return the state after `before`, which was bound by another key, and its record.

        `total` is the sum of the digests of all `count` entries.
        """
        total %= _MODULUS
        record = _StateRecord(number=before.number + 1, count=count, previous=before.tag)
        sealed = self._sealed(record, total)
        return _state(record, sealed, total, revision=0), sealed

    def check(self, sealed: bytes, entries: Iterable[Known], *, revision: int) -> State:
        """Return the state in the record `sealed`, which must be the state of `entries`.

        VerificationError `broker.store.rolled_back`: brokers never left this set of records.
        """
        digests = [known.digest for known in entries]
        total = sum(digests) % _MODULUS
        record = _parsed(sealed)
        if record is None or not hmac.compare_digest(sealed, self._sealed(record, total)):
            counted = "" if record is None else f"; at the last change there were {record.count}"
            raise VerificationError(
                "broker.store.rolled_back",
                f"the store's {len(digests)} records are not what its brokers left{counted}: a "
                "record was added, removed or replaced by an older one",
            )
        return _state(record, sealed, total, revision=revision)

    def state_of(self, entries: Mapping[str, bytes], *, revision: int) -> State:
        """Return the state of a whole copy of a store, its state record included.

        VerificationError `broker.store.rolled_back`: brokers never left this set of records.
        """
        sealed = entries.get(STATE_KEY)
        if sealed is None:
            raise without_state(len(entries))
        known = (
            Known(revision=revision, digest=self.digest(key, value))
            for key, value in entries.items()
            if key != STATE_KEY
        )
        return self.check(sealed, known, revision=revision)

    def _sealed(self, record: _StateRecord, total: int) -> bytes:
        content = record.model_dump_json().encode()
        message = fields("sealane store state v1", content, total.to_bytes(_TAG_BYTES, "big"))
        return hmac.digest(self._state_key, message, "sha256") + content


def without_state(count: int) -> VerificationError:
    """Return the error for a store that has records but no state record."""
    return VerificationError(
        "broker.store.rolled_back",
        f"the store has {count} records but no state record: it was removed, or the store is of "
        "an earlier version",
    )


def _parsed(sealed: bytes) -> _StateRecord | None:
    if len(sealed) > STATE_BYTES_MAX:
        return None
    try:
        return _StateRecord.model_validate_json(sealed[_TAG_BYTES:])
    except ValidationError:
        return None


def _state(record: _StateRecord, sealed: bytes, total: int, *, revision: int) -> State:
    return State(
        number=record.number,
        count=record.count,
        total=total,
        tag=sealed[:_TAG_BYTES],
        revision=revision,
    )
