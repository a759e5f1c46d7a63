"""Schedules: sends and receives of each rank of a ring (Patarasuk and Yuan, 2009)."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Arrival(Enum):
    """Use of received elements."""

    COMBINE = "combine"
    FINISH = "finish"
    """Combine for the last time: all ranks' elements are then included."""
    STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send elements `start` to `end` to the next rank after `after` messages have arrived."""

    start: int
    end: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Receive elements `start` to `end` from the previous rank."""

    start: int
    end: int
    arrival: Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One collective operation of one rank; messages in their order on the ring."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]

    def in_bytes(
        self, itemsize: int
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, bool]]]:
        """Return the schedule in bytes for the ring simulator, given the size of an element."""
        sends = [(one.start * itemsize, one.end * itemsize, one.after) for one in self.sends]
        receives = [
            (one.start * itemsize, one.end * itemsize, one.arrival is not Arrival.STORE)
            for one in self.receives
        ]
        return sends, receives


def all_reduce(rank: int, size: int, length: int, piece: int) -> Schedule:
    """Reduce-scatter, then all-gather: each rank sends 2 (size - 1) / size of the elements."""
    cut = Cut(size, length, piece)
    for step in range(size - 1):
        is_last = step == size - 2
        arrival = Arrival.FINISH if is_last else Arrival.COMBINE
        cut.step((rank - step) % size, (rank - step - 1) % size, arrival)
    for step in range(size - 1):
        cut.step((rank + 1 - step) % size, (rank - step) % size, Arrival.STORE)
    return cut.schedule()


def reduce_scatter(rank: int, size: int, length: int, piece: int) -> Schedule:
    """Combine `size` segments of `length` elements; rank r gets the r-th."""
    cut = Cut(size, length * size, piece)
    for step in range(size - 1):
        arrival = Arrival.FINISH if step == size - 2 else Arrival.COMBINE
        cut.step((rank - step - 1) % size, (rank - step - 2) % size, arrival)
    return cut.schedule()


def all_gather(rank: int, size: int, length: int, piece: int) -> Schedule:
    """Collect `length` elements of each rank at all ranks, by rank."""
    cut = Cut(size, length * size, piece)
    for step in range(size - 1):
        cut.step((rank - step) % size, (rank - step - 1) % size, Arrival.STORE)
    return cut.schedule()


def broadcast(rank: int, size: int, length: int, piece: int, root: int) -> Schedule:
    """Pass the root's elements from rank to rank."""
    cut = Cut(1, length, piece)
    distance = (rank - root) % size
    if distance > 0:
        cut.receive(0, Arrival.STORE)
    if distance < size - 1:
        cut.send(0, waits=distance > 0)
    return cut.schedule()


class Cut:
    """Elements in `segments` parts of nearly equal size, each cut into pieces of at most `piece`.

    A rank sends in each step what it received in the step before, piece by piece, so a piece is
    forwarded while the next one is in flight.
    """

    def __init__(self, segments: int, length: int, piece: int) -> None:
        self._bounds = [length * index // segments for index in range(segments + 1)]
        self._piece = piece
        self._sends: list[Send] = []
        self._receives: list[Receive] = []
        self._previous = 0
        """Messages received before the latest step."""

    def step(self, sent: int, received: int, arrival: Arrival) -> None:
        """Send one segment and receive another."""
        self.send(sent, waits=bool(self._receives))
        self.receive(received, arrival)

    def send(self, segment: int, *, waits: bool) -> None:
        """Send a segment; with `waits` it is the one that was received last."""
        for index, (start, end) in enumerate(self._pieces(segment)):
            after = self._previous + index + 1 if waits else 0
            self._sends.append(Send(start=start, end=end, after=after))

    def receive(self, segment: int, arrival: Arrival) -> None:
        """Receive a segment."""
        self._previous = len(self._receives)
        for start, end in self._pieces(segment):
            self._receives.append(Receive(start=start, end=end, arrival=arrival))

    def schedule(self) -> Schedule:
        """Return the schedule."""
        return Schedule(sends=tuple(self._sends), receives=tuple(self._receives))

    def _pieces(self, segment: int) -> Iterator[tuple[int, int]]:
        start, end = self._bounds[segment], self._bounds[segment + 1]
        for at in range(start, end, self._piece):
            yield at, min(at + self._piece, end)
