"""The ledgers in which gateways note what they seal, and the check that no IV was used twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

DIRECTORY: Final = "SEALANE_NONCE_LEDGERS"
"""Environment variable of daemons: where they write a ledger for each volume."""
_RECORD_BYTES: Final = 56  # key epoch 4, IV 12, SHA-256 of the plaintext 32, LBA 8


def sealed(ledgers: Path) -> list[bytes]:
    """Return volume, key epoch and IV of all that gateways sealed and might send."""
    found = []
    for path in ledgers.iterdir():
        content = path.read_bytes()
        records = (content[i : i + _RECORD_BYTES] for i in range(0, len(content), _RECORD_BYTES))
        found += [path.name.encode() + record[:16] for record in records]
    return found


def once_each(nonces: Sequence[bytes]) -> None:
    """Fail if there are none, or one of them twice."""
    assert nonces, "nothing was sealed"
    assert len(nonces) == len({*nonces}), "a nonce twice"
