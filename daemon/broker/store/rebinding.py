"""What a broker needs to bind all records by another key in one commit, while others commit too."""

from collections.abc import Mapping

from sealane.daemon.broker.store.record_keys import NamedKeys
from sealane.daemon.broker.store.state import SetHash, State


class Rebinding:
    """Digests of all entries under the next record key, and their sum.

    They come from a scan, and from the changes that the memory has applied since before it. A scan
    may be ahead of the memory or behind it: `fill` is told which revision it shows.
    """

    def __init__(self, named: NamedKeys) -> None:
        self.named = named
        self.hashes = SetHash(named.present)
        self.digests: dict[str, int] = {}
        self._total = 0
        # Key to revision and digest of its last change; until `fill`.
        self._changes: dict[str, tuple[int, int | None]] = {}
        # Number to tag of the states that the memory has had; until `fill`.
        self._states: dict[int, bytes] = {}
        self._is_filled = False

    def move(self, state: State) -> None:
        """Follow the memory to that state."""
        if not self._is_filled:
            self._states[state.number] = state.tag

    def was_at(self, state: State) -> bool:
        """Return whether the memory has had that state since the first one that was followed."""
        return self._states.get(state.number) == state.tag

    def change(self, changes: Mapping[str, bytes | None], revision: int) -> None:
        """Follow a commit that the memory has applied."""
        for key, value in changes.items():
            digest = None if value is None else self.hashes.digest(key, value)
            if self._is_filled:
                self._put(key, digest)
            else:
                self._changes[key] = revision, digest

    def fill(self, digests: dict[str, int], *, revision: int) -> None:
        """Begin with all entries as of that revision, which the memory has reached."""
        self.digests, self._total = digests, sum(digests.values())
        for key, (changed, digest) in self._changes.items():
            if changed > revision:
                self._put(key, digest)
        self._changes.clear()
        self._states.clear()
        self._is_filled = True

    def next(
        self, before: State, changes: Mapping[str, bytes | None]
    ) -> tuple[dict[str, int], State, bytes]:
        """Return the digests of what is put, the state after the changes, and its record."""
        added = {k: self.hashes.digest(k, v) for k, v in changes.items() if v is not None}
        removed = [self.digests[key] for key in changes if key in self.digests]
        after, sealed = self.hashes.rebound(
            before,
            total=self._total - sum(removed) + sum(added.values()),
            count=len(self.digests) + len(added) - len(removed),
        )
        return added, after, sealed

    def _put(self, key: str, digest: int | None) -> None:
        self._total -= self.digests.pop(key, 0)
        if digest is not None:
            self.digests[key] = digest
            self._total += digest
