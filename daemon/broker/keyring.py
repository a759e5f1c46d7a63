"""The key encryption keys that a broker has: one, or two while keys are wrapped again.

Which of them wraps new keys is in the store (`AuthorityRecord.key_id`), not in the configuration,
so that all brokers of a store change together. Each wrapped key is stored with the id of its key.
"""

from collections.abc import Collection, Sequence
from typing import Final

from sealane.crypto.keys import KeyWrapper
from sealane.errors import UnavailableError, VerificationError

UNNAMED: Final = b""
"""Stored in place of a key's id by versions that had only one key."""


class Keyring:
    """Key encryption keys by their ids."""

    def __init__(self, keys: Sequence[KeyWrapper]) -> None:
        self._keys = {key.key_id: key for key in keys}

    @property
    def ids(self) -> tuple[bytes, ...]:
        """The ids of all keys, sorted."""
        return tuple(sorted(self._keys))

    def key(self, key_id: bytes) -> KeyWrapper:
        """Return a key; UnavailableError `broker.key.missing`."""
        found = self._keys.get(key_id)
        if found is None:
            raise UnavailableError("broker.key.missing", missing(key_id, self.ids))
        return found

    def unwrap(
        self, wrapped: bytes, *, key_id: bytes, purpose: str, owner: str
    ) -> tuple[bytearray, bytes]:
        """Decrypt a wrapped key; return it, which the caller wipes, and the id of its wrapping key.

        UnavailableError `broker.key.missing`; VerificationError `key.wrap.invalid`. For a wrapped
        key that names none, each key is tried: only its own one decrypts it.
        """
        if key_id != UNNAMED:
            return self.key(key_id).unwrap(wrapped, purpose=purpose, owner=owner), key_id
        refused: VerificationError | None = None
        for each, key in self._keys.items():
            try:
                return key.unwrap(wrapped, purpose=purpose, owner=owner), each
            except VerificationError as error:
                refused = error
        assert refused is not None  # noqa: S101 - a keyring is never empty
        raise refused

    def replace(self, keys: Sequence[KeyWrapper]) -> None:
        """Have these keys from now on; of a key that is here already, the open one is kept."""
        before, self._keys = self._keys, {key.key_id: key for key in keys}
        for key_id, key in before.items():
            again = self._keys.get(key_id)
            if again is None:
                key.close()
            elif again is not key:
                again.close()
                self._keys[key_id] = key

    def drop(self, key_id: bytes) -> None:
        """Close and forget a key, if it is here and is not the only one."""
        if key_id in self._keys and len(self._keys) > 1:
            self._keys.pop(key_id).close()

    def close(self) -> None:
        """Close all keys."""
        for key in self._keys.values():
            key.close()


def missing(key_id: bytes, ids: Collection[bytes]) -> str:
    """Return the message for a key that the store needs and a broker doesn't have."""
    return (
        f"the store needs key encryption key {key_id.hex()}, and this broker has "
        f"{', '.join(each.hex() for each in ids)}: configure it as broker.key_file, broker.hsm or "
        "broker.next_key"
    )
