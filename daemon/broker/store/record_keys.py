"""The keys for the MACs of records, as one broker has them, and who names them.

All brokers of a store use one record key. While it is being replaced there are two: everything new
is under the present one, and what is still under the one before is accepted until a record says
that nothing is (sealane.daemon.broker.record_key_rotation).
"""

import hmac
from dataclasses import dataclass
from typing import Final, Protocol

from sealane.crypto.encoding import fields
from sealane.errors import UnavailableError, VerificationError

MAC_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKeys:
    """Record keys that a store names: the present one, and during a replacement the one before.

    `number` is that of the present one; it increases by one with each replacement.
    """

    present: bytes
    previous: bytes | None = None
    number: int = 0


class KeyNaming(Protocol):
    """Reads which record keys a store names; its record is protected by its wrapping, not a MAC."""

    @property
    def key(self) -> str:
        """Key of the record that names them."""

    async def named(self, value: bytes) -> NamedKeys:
        """Return the keys that this value of the record names.

        VerificationError if it can't be opened; UnavailableError `broker.key.missing`.
        """

    def names_previous(self, value: bytes) -> bool:
        """Return whether this value still names the key before the present one."""


@dataclass(frozen=True, slots=True)
class FixedKey:
    """The naming of a store whose record key is known and never replaced."""

    record_key: bytes
    key: str = "authority"

    async def named(self, _value: bytes) -> NamedKeys:
        """See `KeyNaming`."""
        return NamedKeys(present=self.record_key)

    def names_previous(self, _value: bytes) -> bool:
        """See `KeyNaming`."""
        return False


class RecordKeys:
    """Makes and checks the MACs of records; those who share the object see each replacement."""

    def __init__(self, named: NamedKeys) -> None:
        self.named = named
        self._was_replaced = False

    def replace(self, named: NamedKeys) -> None:
        """Use these keys from now on."""
        self._was_replaced |= named.present != self.named.present
        self.named = named

    def forget_previous(self) -> None:
        """Accept nothing under the key before the present one any longer."""
        self.named = NamedKeys(present=self.named.present, number=self.named.number)

    def sealed(self, key: str, content: bytes) -> bytes:
        """Return the value to store for a record at `key`."""
        return _mac(self.named.present, key, content) + content

    def is_present(self, key: str, value: bytes) -> bool:
        """Return whether the value at `key` is under the present key."""
        return _is_under(self.named.present, key, value)

    def opened(self, key: str, value: bytes) -> bytes:
        """Return the content of the record at `key`.

        VerificationError `broker.store.record.forged`: its MAC is under no key in use.
        """
        previous = self.named.previous
        if not self.is_present(key, value) and not (
            previous is not None and _is_under(previous, key, value)
        ):
            raise VerificationError(
                "broker.store.record.forged",
                f"{key}: not written by a broker of this authority, or under a record key that was "
                "replaced",
            )
        return value[MAC_BYTES:]

    def renewed(self, key: str, value: bytes) -> bytes:
        """Return a value that this process made, under the present key.

        UnavailableError `broker.store.contended`: it was made under a key that is gone by now.
        """
        if not self._was_replaced or self.is_present(key, value):
            return value
        try:
            return self.sealed(key, self.opened(key, value))
        except VerificationError:
            raise UnavailableError(
                "broker.store.contended",
                f"{key}: the record key was replaced while the change waited: try again",
            ) from None


def _is_under(record_key: bytes, key: str, value: bytes) -> bool:
    return hmac.compare_digest(value[:MAC_BYTES], _mac(record_key, key, value[MAC_BYTES:]))


def _mac(record_key: bytes, key: str, content: bytes) -> bytes:
    message = fields("sealane record v1", key.encode(), content)
    return hmac.digest(record_key, message, "sha256")
