"""The bytes of a fuzz input as numbers; zero when they are used up."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Script:
    """What is left of an input."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return self._at >= len(self._content)

    def take(self, count: int) -> bytes:
        """At most `count` bytes."""
        taken = self._content[self._at : self._at + count]
        self._at += count
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._content))

    def number(self, count: int) -> int:
        """A number of `count` bytes."""
        return int.from_bytes(self.take(count), "little")

    def byte(self) -> int:
        """One byte."""
        return self.number(1)

    def choice(self, among: Sequence[T]) -> T:
        """One of these."""
        return among[self.byte() % len(among)]

    def patched(self, page: bytes) -> bytes:
        """Change a page at up to seven places."""
        made = bytearray(page)
        for _ in range(self.byte() % 8):
            at, count = self.number(2), self.byte() % 33
            part = self.take(count)[: max(0, len(made) - at)]
            made[at : at + len(part)] = part
        return bytes(made)
