"""What a broker needs to bind all records by another key in one commit, while others commit too."""

from collections.abc import Mapping

from sealane.daemon.broker.store.record_keys import NamedKeys
from sealane.daemon.broker.store.state import SetHash


class Rebinding:
    """Digests of all entries under the next record key.

    They come from a scan, and from the changes that the memory has applied since before it. A scan
    may be ahead of the memory or behind it: `fill` is told which revision it shows.
    """

    def __init__(self, named: NamedKeys) -> None:
        self.named = named
        self.hashes = SetHash(named.present)
        self._digests: dict[str, int] = {}
        # Key to revision and digest of its last change; until `fill`.
        self._changes: dict[str, tuple[int, int | None]] = {}
        self._is_filled = False

    def change(self, changes: Mapping[str, bytes | None], revision: int) -> None:
        """Follow a commit that the memory has applied."""
        for key, value in changes.items():
            digest = None if value is None else self.hashes.digest(key, value)
            if self._is_filled:
                _put(self._digests, key, digest)
            else:
                self._changes[key] = revision, digest

    def fill(self, digests: dict[str, int], *, revision: int) -> None:
        """Begin with all entries as of that revision, which the memory has reached."""
        self._digests = digests
        for key, (changed, digest) in self._changes.items():
            if changed > revision:
                _put(self._digests, key, digest)
        self._changes.clear()
        self._is_filled = True

    def after(self, changes: Mapping[str, bytes | None]) -> dict[str, int]:
        """Return the digests of all entries after these changes."""
        digests = dict(self._digests)
        for key, value in changes.items():
            _put(digests, key, None if value is None else self.hashes.digest(key, value))
        return digests


def _put(digests: dict[str, int], key: str, digest: int | None) -> None:
    if digest is None:
        digests.pop(key, None)
    else:
        digests[key] = digest
