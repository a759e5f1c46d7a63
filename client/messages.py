"""Options of a message, and the results of one that has ended."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sealane.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

    Bytes: TypeAlias = Buffer | npt.NDArray[Any]
    """Memory of a session's region: an array of `Session.empty`, or any contiguous view of it."""


_BLOCK_MAX: Final = 255
"""Most packets of a code's block, and most interleaved blocks (docs/formats/ring-abi.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRepeat:
    """Retransmits lost packets: no overhead, but a loss costs round trips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureCoded:
    """Sends m packets of parity with every k packets; up to m losses of these cost no time.

    `depth` blocks of k are interleaved, so a burst of losses is spread over them.
    """

    k: int = 32
    m: int = 8
    depth: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError `session.post.reliability` for numbers out of range."""
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
    """Chooses a scheme from the session's plan, by the length and the known loss of the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreliable:
    """Sends each packet once; the send ends when all have left.

    The receiver sees what has landed; its receive ends by `ReceiveOperation.complete`, unless
    everything arrives.
    """


Reliability = SelectiveRepeat | ErasureCoded | Auto | Unreliable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message that the peer has received, or with `Unreliable` one that has left."""

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
    """Chunks are missing: `complete` ended it early, or a stream ended with gaps."""
    chunks: bytes | None = None
    """Of a partial message: a byte for each chunk of the buffer, 1 if all of it had landed.

    None if a later receive had already taken the slot."""
