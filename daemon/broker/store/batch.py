"""Commits that wait at the same time are merged into one."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sealane.daemon.broker.store.contract import COMMIT_BYTES_MAX, COMMIT_CHANGES_MAX, Compare
from sealane.daemon.broker.store.rebinding import Rebinding
from sealane.errors import Error


@dataclass(slots=True)
class Commit:
    """One caller's commit; with a `rebinding` it is made alone."""

    compares: tuple[Compare, ...]
    puts: Mapping[str, bytes]
    deletes: tuple[str, ...]
    outcome: "asyncio.Future[int | None]"
    rebinding: Rebinding | None = None
    lost: int = 0
    """Tries that another broker's commit overtook."""

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return sum(map(len, self.puts.values()))

    def fail(self, error: Error) -> None:
        """Tell the caller that it failed, unless it has gone."""
        if not self.outcome.done():
            self.outcome.set_exception(type(error)(error.reason, error.args[0]))

    def answer(self, revision: int | None) -> None:
        """Tell the caller the outcome, unless it has gone."""
        if not self.outcome.done():
            self.outcome.set_result(revision)


@dataclass(slots=True)
class Batch:
    """Commits that are merged into one."""

    commits: list[Commit] = field(default_factory=list)
    compares: dict[str, Compare] = field(default_factory=dict)
    changes: dict[str, bytes | None] = field(default_factory=dict)
    size: int = 0

    def takes(self, commit: Commit) -> bool:
        """Return whether `commit` fits into the batch and is independent of its changes."""
        if commit.rebinding is not None or any(each.rebinding for each in self.commits):
            return False
        keys = {*commit.puts, *commit.deletes, *(c.key for c in commit.compares)}
        changed = {*commit.puts, *commit.deletes}
        return (
            not (keys & self.changes.keys())
            and not (changed & self.compares.keys())
            and len(self.changes) + len(changed) <= COMMIT_CHANGES_MAX
            and len(self.compares) + len(commit.compares) <= COMMIT_CHANGES_MAX
            and self.size + commit.size <= COMMIT_BYTES_MAX
        )

    def add(self, commit: Commit, *, puts: Mapping[str, bytes], deletes: Sequence[str]) -> None:
        """Add `commit` with these values; of its deletes only `deletes` change anything."""
        self.commits.append(commit)
        self.compares |= {compare.key: compare for compare in commit.compares}
        self.changes |= {**puts, **dict.fromkeys(deletes)}
        self.size += commit.size
