"""The bytes of a fuzz input as numbers; zeros when they are used up."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Script:
    """The unread rest of an input."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left."""
        return self._at >= len(self._content)

    def take(self, count: int) -> bytes:
        """Return at most `count` bytes."""
        taken = self._content[self._at : self._at + count]
        self._at += count
        return taken

    def rest(self) -> bytes:
        """Return the rest."""
        return self.take(len(self._content))

    def number(self, count: int) -> int:
        """Return a number of `count` bytes."""
        return int.from_bytes(self.take(count), "little")

    def byte(self) -> int:
        """Return one byte."""
        return self.number(1)

    def choice(self, among: Sequence[T]) -> T:
        """Return one of the choices."""
        return among[self.byte() % len(among)]

    def patched(self, page: bytes) -> bytes:
        """Return a page changed at up to seven positions."""
        made = bytearray(page)
        for _ in range(self.byte() % 8):
            at, count = self.number(2), self.byte() % 33
            part = self.take(count)[: max(0, len(made) - at)]
            made[at : at + len(part)] = part
        return bytes(made)
