"""Actions of a man in the middle on PDUs, as composable rules without I/O.

A rule gets each PDU once and returns the PDUs to forward instead: none, the same, more or others,
on the same link or another. Each rule counts its actions, so that a test can prove that its attack
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
    """Match the Connect of an I/O queue, which carries a ticket."""
    is_connect = pdu.kind == Kind.COMMAND and pdu.opcode == FABRICS and len(pdu.data) >= 1024
    return bool(is_connect and int.from_bytes(pdu.header[50:52], "little"))


def is_response(*opcodes: int) -> Match:
    """Match completions of commands with one of `opcodes`."""
    return lambda pdu: bool(
        pdu.kind == Kind.RESPONSE and bool(pdu.entry) and pdu.entry[0] in opcodes
    )


def is_read_data(pdu: Pdu) -> bool:
    """Match data sent to the gateway."""
    return bool(pdu.kind == Kind.C2H_DATA and bool(pdu.entry) and pdu.entry[0] == READ)


def is_write_data(pdu: Pdu) -> bool:
    """Match blocks sent to the target, in a capsule or after an R2T."""
    if pdu.kind == Kind.COMMAND:
        return bool(pdu.opcode == WRITE and bool(pdu.data))
    return bool(pdu.kind == Kind.H2C_DATA)


def goes(way: Way) -> Match:
    """Match PDUs in one direction."""
    return lambda pdu: pdu.way is way


def every(*matches: Match) -> Match:
    """Match PDUs that all of the given conditions match."""
    return lambda pdu: all(match(pdu) for match in matches)


def at_lba(lba: int) -> Match:
    """Match PDUs of commands that start at `lba`."""
    return lambda pdu: len(pdu.entry) == 64 and int.from_bytes(pdu.entry[40:48], "little") == lba


@dataclass(slots=True, kw_only=True)
class Rule(abc.ABC):
    """Base class: acts on the first `times` matching PDUs and passes everything else."""

    match: Match
    times: int = 1
    made: int = 0

    def __call__(self, pdu: Pdu) -> list[Pdu]:
        """Return the PDUs to forward instead of `pdu`."""
        if self.made >= self.times or not self.match(pdu):
            return [pdu]
        self.made += 1
        return self.act(pdu)

    @abc.abstractmethod
    def act(self, pdu: Pdu) -> list[Pdu]:
        """Return the replacement for a matching PDU."""


@dataclass(slots=True, kw_only=True)
class Drop(Rule):
    """Drops PDUs."""

    def act(self, pdu: Pdu) -> list[Pdu]:  # noqa: ARG002 - dropped unseen
        return []


@dataclass(slots=True, kw_only=True)
class Rewrite(Rule):
    """Changes PDUs in place."""

    change: Callable[[Pdu], object]

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.change(pdu)
        return [pdu]


@dataclass(slots=True, kw_only=True)
class Replace(Rule):
    """Sends other PDUs, made from the original."""

    make: Callable[[Pdu], Iterable[Pdu]]

    def act(self, pdu: Pdu) -> list[Pdu]:
        return list(self.make(pdu))


@dataclass(slots=True, kw_only=True)
class Duplicate(Rule):
    """Sends PDUs twice."""

    def act(self, pdu: Pdu) -> list[Pdu]:
        return [pdu, pdu.copy()]


@dataclass(slots=True, kw_only=True)
class Hold(Rule):
    """Withholds PDUs; the test can inject those of `take()` later."""

    held: list[Pdu] = field(default_factory=list)

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.held.append(pdu)
        return []

    def take(self) -> list[Pdu]:
        """Return and clear the withheld PDUs."""
        taken, self.held = self.held, []
        return taken


@dataclass(slots=True, kw_only=True)
class Record(Rule):
    """Passes PDUs and keeps copies."""

    copies: list[Pdu] = field(default_factory=list)

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.copies.append(pdu.copy())
        return [pdu]


@dataclass(slots=True, kw_only=True)
class Gather(Rule):
    """Withholds `count` PDUs, then sends `make` of them: to reorder, splice or exchange."""

    count: int = 2
    make: Callable[[list[Pdu]], Iterable[Pdu]]
    kept: list[Pdu] = field(default_factory=list)

    def act(self, pdu: Pdu) -> list[Pdu]:
        self.kept.append(pdu)
        if len(self.kept) < self.count:
            self.made -= 1  # Not complete yet.
            return []
        kept, self.kept = self.kept, []
        return list(self.make(kept))
