"""Check of IVs seen on the wire: each is used for one ciphertext at one position."""

import hashlib
import itertools
from dataclasses import dataclass, field

from attacks.pdus import BLOCK, DATA, WRITE, Kind, Pdu, Way

WRITE_IF = 0x81
_IV = slice(DATA + 16, DATA + 28)
_SEALED = slice(0, DATA + 16)  # ciphertext and tag
_KEY_EPOCH = slice(DATA + 44, DATA + 48)


@dataclass(frozen=True, order=True)
class Iv:
    """An IV, as granted by the broker."""

    broker_instance: int
    start_epoch: int
    counter: int

    @classmethod
    def of(cls, field_bytes: bytes) -> "Iv":
        """Decode the 12 bytes of a sector's metadata."""
        number = int.from_bytes(field_bytes, "big")
        return cls(number >> 80, number >> 56 & 0xFF_FFFF, number & (1 << 56) - 1)


@dataclass(slots=True)
class Ledger:
    """A rule that passes every PDU and records every sealed sector sent to the target.

    Two ciphertexts under one IV and key reveal the XOR of their plaintexts and allow forgery. IVs
    are granted per volume, across all of its keys, so a ledger serves one volume.
    """

    uses: dict[Iv, set[tuple[int, bytes, bytes]]] = field(default_factory=dict)
    sectors_seen: int = 0
    _partial: dict[tuple[int, int], bytearray] = field(default_factory=dict)

    def __call__(self, pdu: Pdu) -> list[Pdu]:
        """Record the sectors of `pdu`."""
        if pdu.way is Way.TO_TARGET and pdu.entry and pdu.entry[0] in (WRITE, WRITE_IF):
            if pdu.kind == Kind.COMMAND and pdu.data:
                self._note(pdu.entry, pdu.data)
            elif pdu.kind == Kind.H2C_DATA:
                buffer = self._partial.setdefault((pdu.link, pdu.cid), bytearray())
                buffer += pdu.data
                if len(buffer) >= int.from_bytes(pdu.entry[32:36], "little"):
                    self._note(pdu.entry, self._partial.pop((pdu.link, pdu.cid)))
            elif pdu.kind == Kind.COMMAND:
                self._partial.pop((pdu.link, pdu.cid), None)
        return [pdu]

    def _note(self, entry: bytes, data: bytearray) -> None:
        first = int.from_bytes(entry[40:48], "little")
        for index in range(len(data) // BLOCK):
            block = data[index * BLOCK : (index + 1) * BLOCK]
            use = (
                first + index,
                bytes(block[_KEY_EPOCH]),
                hashlib.sha256(block[_SEALED]).digest(),
            )
            self.uses.setdefault(Iv.of(bytes(block[_IV])), set()).add(use)
            self.sectors_seen += 1

    @property
    def repeats(self) -> list[Iv]:
        """Return IVs used for two ciphertexts or at two positions."""
        return [iv for iv, uses in self.uses.items() if len(uses) > 1]

    @property
    def overlaps(self) -> list[Iv]:
        """Return IVs whose 256 counters overlap those of the next."""
        ordered = sorted(self.uses)
        return [
            one
            for one, two in itertools.pairwise(ordered)
            if (one.broker_instance, one.start_epoch) == (two.broker_instance, two.start_epoch)
            and two.counter - one.counter < 256
        ]
