"""What a job says of a message it sends, and hears of one that has ended."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sealane.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

    Bytes: TypeAlias = Buffer | npt.NDArray[Any]
    """Memory of a session's region: what `Session.empty` returns, and any contiguous view of it."""


_BLOCK_MAX: Final = 255
"""Packets of a block of a code, and blocks interleaved (docs/formats/ring-abi.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRepeat:
    """Lost packets are sent again: no overhead, but round trips of delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureCoded:
    """Every k packets travel with m of parity; up to m losses cost no time.

    `depth` blocks of k are interleaved: a burst of losses is shared by them.
    """

    k: int = 32
    m: int = 8
    depth: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError `session.post.reliability` for what is no code."""
        if min(self.k, self.m) < 1 or self.k + self.m > _BLOCK_MAX:
            raise UsageError(
                "session.post.reliability",
                f"a code ({self.k}, {self.m}); allowed: at least 1 each, {_BLOCK_MAX} together",
            )
        if not 1 <= self.depth <= _BLOCK_MAX:
            raise UsageError(
                "session.post.reliability",
                f"{self.depth} blocks interleaved; allowed: 1 to {_BLOCK_MAX}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """As the session's plan has it for the length: by what is known of the path's loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreliable:
    """Packets go out once: the send ends when all have left, the receiver sees what has landed.

    Such a receive ends by `ReceiveOperation.complete`, unless everything arrives.
    """


Reliability = SelectiveRepeat | ErasureCoded | Auto | Unreliable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message that the peer has, or for `Unreliable` one that has left."""

    message: int
    length: int
    duration_seconds: float
    """From the first transmission to the acknowledgement of the last byte."""
    is_partial: bool = False
    """The receiver ended its receive before all had arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message that has arrived in the region."""

    message: int
    offset: int
    length: int
    immediate: int | None
    is_partial: bool = False
    """It was ended by `complete` with chunks missing."""
    chunks: bytes | None = None
    """Of a partial one: a byte for each chunk of the buffer, 1 where it had landed.

    None if a later receive had its slot already."""
