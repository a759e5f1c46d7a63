"""What a man in the middle may do to PDUs: rules without input or output, to be composed.

A rule sees each PDU once and says what goes on instead: nothing, the same, more, or something
else, on the same link or another. Each counts what it did, so that a test can show that its attack
really happened.
"""

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from attacks.pdus import FABRICS, READ, WRITE, Kind, Pdu, Way

Match = Callable[[Pdu], bool]


def is_command(*opcodes: int) -> Match:
    """Match I/O commands with one of `opcodes`."""
    return lambda pdu: bool(
        pdu.kind == Kind.COMMAND and pdu.opcode in opcodes and pdu.opcode != FABRICS
    )


def is_io_connect(pdu: Pdu) -> bool:
    """Match the Connect of an I/O queue, which brings a ticket."""
    is_connect = pdu.kind == Kind.COMMAND and pdu.opcode == FABRICS and len(pdu.data) >= 1024
    return bool(is_connect and int.from_bytes(pdu.header[50:52], "little"))


def is_response(*opcodes: int) -> Match:
    """Match completions of commands with one of `opcodes`."""
    return lambda pdu: bool(
        pdu.kind == Kind.RESPONSE and bool(pdu.entry) and pdu.entry[0] in opcodes
    )


def is_read_data(pdu: Pdu) -> bool:
    """Match data on its way to the gateway."""
    return bool(pdu.kind == Kind.C2H_DATA and bool(pdu.entry) and pdu.entry[0] == READ)


def is_write_data(pdu: Pdu) -> bool:
    """Match blocks on their way to the target, in a capsule or behind an R2T."""
    if pdu.kind == Kind.COMMAND:
        return bool(pdu.opcode == WRITE and bool(pdu.data))
    return bool(pdu.kind == Kind.H2C_DATA)


def goes(way: Way) -> Match:
    """Match one direction."""
    return lambda pdu: pdu.way is way


def every(*matches: Match) -> Match:
    """Match what all match."""
    return lambda pdu: all(match(pdu) for match in matches)


def at_lba(lba: int) -> Match:
    """Match PDUs of commands that start at `lba`."""
    return lambda pdu: len(pdu.entry) == 64 and int.from_bytes(pdu.entry[40:48], "little") == lba


@dataclass(slots=True, kw_only=True)
class Rule(abc.ABC):
    """Base: acts on the first `times` PDUs that match, lets everything else pass."""

    match: Match
    times: int = 1
    made: int = 0

    def __call__(self, pdu: Pdu) -> list[Pdu]:
        """Say what goes on instead of `pdu`."""
        if self.made >= self.times or not self.match(pdu):
            return [pdu]
        self.made += 1
        return self.act(pdu)

    @abc.abstractmethod
    def act(self, pdu: Pdu) -> list[Pdu]:
        """Do it."""


@dataclass(slots=True, kw_only=True)
class Drop(Rule):
    """Swallow."""

    def act(self, pdu: Pdu) -> list[Pdu]:  # noqa: ARG002 - swallowed unseen
        return []


@dataclass(slots=True, kw_only=True)
class Rewrite(Rule):
    """Change in place."""

    change: Callable[[Pdu], object]

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.change(pdu)
        return [pdu]


@dataclass(slots=True, kw_only=True)
class Replace(Rule):
    """Send something else, made from the original."""

    make: Callable[[Pdu], Iterable[Pdu]]

    def act(self, pdu: Pdu) -> list[Pdu]:
        return list(self.make(pdu))


@dataclass(slots=True, kw_only=True)
class Duplicate(Rule):
    """Send twice."""

    def act(self, pdu: Pdu) -> list[Pdu]:
        return [pdu, pdu.copy()]


@dataclass(slots=True, kw_only=True)
class Hold(Rule):
    """Keep back; the test sends `take()` when it likes."""

    held: list[Pdu] = field(default_factory=list)

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.held.append(pdu)
        return []

    def take(self) -> list[Pdu]:
        """Give what was kept back."""
        taken, self.held = self.held, []
        return taken


@dataclass(slots=True, kw_only=True)
class Record(Rule):
    """Let pass and keep copies."""

    copies: list[Pdu] = field(default_factory=list)

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.copies.append(pdu.copy())
        return [pdu]


@dataclass(slots=True, kw_only=True)
class Gather(Rule):
    """Keep back `count` PDUs, then send what `make` makes of them: reorder, splice, exchange."""

    count: int = 2
    make: Callable[[list[Pdu]], Iterable[Pdu]]
    kept: list[Pdu] = field(default_factory=list)

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.kept.append(pdu)
        if len(self.kept) < self.count:
            self.made -= 1  # Not yet.
            return []
        kept, self.kept = self.kept, []
        return list(self.make(kept))
