"""The contract of a broker's store: ordered keys, one revision for all, compare and commit.

It is modelled on etcd's API. Each commit that changes something increases the store's revision by
one, and each entry carries the revision of its last change; 0 stands for "no such key". A commit is
atomic, and durable once it has returned.

Failures, the same for every store:

* UnavailableError `broker.store.failed`, `.locked`, `.timeout`: it can't be used now, or not by
  this process.
* UnavailableError `broker.store.compacted`: the history that a watch asks for is gone.
* UnavailableError `broker.store.fenced`: another process took this writer's place.
* VerificationError `broker.store.rolled_back`: it is older than it was.
* VerificationError `broker.store.malformed`: it is not a Sealane store.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sealane.errors import Error, UsageError

KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 1 << 18
COMMIT_BYTES_MAX: Final = 1 << 20
COMMIT_CHANGES_MAX: Final = 64
"""Changes, and compares, of one commit; a store allows one more of each for its state record."""
PAGE_ENTRIES_MAX: Final = 1000
STATE_KEY: Final = "!state"
"""Key of the state record (sealane.daemon.broker.store.state); sorts before all other keys."""
STATE_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A commit's change of a key; value None: the key was deleted."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Page:
    """Entries in order of their keys, as of one revision of the store."""

    entries: tuple[Entry, ...]
    revision: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class Compare:
    """Requires that the entry of `key` was last changed at `revision`; 0: that it doesn't exist."""

    key: str
    revision: int


class Store(Protocol):
    """A client of a store. Its coroutines may run concurrently."""

    async def get(self, key: str) -> Entry | None:
        """Return the entry of `key` as of the last commit that returned to any client."""
        ...

    async def range(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Page:
        """Return up to `limit` entries under `prefix` with keys after `after`."""
        ...

    async def revision(self) -> int:
        """Return the store's revision as of the last commit that returned to any client."""
        ...

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> int | None:
        """Make all changes if all compares hold; return the new revision.

        None: a compare failed, and nothing was changed. If the answer is lost, the outcome is
        determined before this returns. UnavailableError means that nothing was changed or, only
        with reason `broker.store.outcome_unknown`, that the outcome is unknown.
        """
        ...

    def watch(self, prefix: str, *, from_revision: int) -> AsyncIterator[tuple[Change, ...]]:
        """Yield all changes under `prefix` from that revision on, one commit at a time.

        No commit is missed or repeated, even if the connection breaks in between.
        """
        ...

    def scan(self) -> AsyncIterator[Page]:
        """Yield pages of all entries as of one revision, which each page names.

        UnavailableError `broker.store.compacted`: the history of that revision was compacted
        meanwhile; start over.
        """
        ...

    @property
    def failure(self) -> Error | None:
        """Reason why no later call of this client can succeed; None: calls can succeed."""
        ...

    async def close(self) -> None:
        """Release the client's resources; committed data stays."""
        ...


def check_key(key: str) -> None:
    """UsageError unless `key` is 1…512 visible ASCII characters, "/" among them."""
    if not 1 <= len(key) <= KEY_BYTES_MAX or not all("!" <= c <= "~" for c in key):
        raise UsageError(
            "broker.store.key", f"key {key[:80]!r}; allowed: 1…{KEY_BYTES_MAX} visible ASCII"
        )


def check_commit(
    compares: Sequence[Compare], puts: Mapping[str, bytes], deletes: Sequence[str]
) -> None:
    """UsageError unless a commit is within the limits that every store supports."""
    extra = STATE_KEY in puts
    keys = [*puts, *deletes]
    for key in [*keys, *(c.key for c in compares)]:
        check_key(key)
    if not keys or len(set(keys)) != len(keys) or len(keys) > COMMIT_CHANGES_MAX + extra:
        raise UsageError(
            "broker.store.commit",
            f"a commit of {len(keys)} changes; allowed: 1…{COMMIT_CHANGES_MAX}, each key once",
        )
    if len(compares) > COMMIT_CHANGES_MAX + extra:
        raise UsageError(
            "broker.store.commit",
            f"a commit with {len(compares)} compares; allowed: at most {COMMIT_CHANGES_MAX}",
        )
    for key, value in puts.items():
        if len(value) > VALUE_BYTES_MAX:
            raise UsageError(
                "broker.store.value",
                f"{key}: {len(value)} bytes; allowed: at most {VALUE_BYTES_MAX}",
            )
    total = sum(map(len, puts.values()))
    if total > COMMIT_BYTES_MAX + extra * STATE_BYTES_MAX:
        raise UsageError(
            "broker.store.commit", f"a commit of {total} bytes; allowed: at most {COMMIT_BYTES_MAX}"
        )


def check_page(prefix: str, after: str, limit: int) -> None:
    """UsageError unless a range has a prefix and start of visible ASCII and 1…1000 entries."""
    for key in (prefix, after):
        if key:
            check_key(key)
    if not 1 <= limit <= PAGE_ENTRIES_MAX:
        raise UsageError(
            "broker.store.page", f"a page of {limit} entries; allowed: 1…{PAGE_ENTRIES_MAX}"
        )


def end_of(prefix: str) -> str:
    """Return the first key after all keys under `prefix`; DEL sorts after visible characters."""
    return f"{prefix}\x7f"
