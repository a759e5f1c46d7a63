"""Secondary evidence of an accelerator card, asked through its socket.

Over a Unix socket nothing shows that who signs is who receives: whoever controls the host could
pass the question on to a genuine card and keep the keys. A card says so itself (`protected_bus`),
and a policy refuses it unless it allows that by name.
"""

import asyncio
import secrets
from typing import Final

from sealane import _native
from sealane.crypto.evidence.card import CARD, MEDIA_TYPE, check_statement, parse_statement
from sealane.crypto.evidence.cmw import Item
from sealane.errors import UnavailableError, VerificationError

NONCE_BYTES: Final = 32


class CardSource:
    """A card at a Unix socket. Each call makes a new connection."""

    evidence_type = CARD

    def __init__(self, label: str, socket: str) -> None:
        self.label = label
        self.socket = socket

    async def collect(self, nonce: bytes) -> Item:
        """Return the item that answers `nonce`; UnavailableError `evidence.secondary.failed`."""
        try:
            evidence = await asyncio.to_thread(
                lambda: _native.Accelerator(self.socket).evidence(nonce)
            )
        except OSError as error:
            raise UnavailableError(
                "evidence.secondary.failed",
                f"enrolment.secondary {self.label}, {self.socket}: {error}",
            ) from error
        return Item(MEDIA_TYPE, evidence)

    def connect(self, accepted: Item) -> _native.Accelerator:
        """Connect to the card that gave the evidence `accepted`, and probe it; blocks for seconds.

        As `check`; OSError also if it works wrongly.
        """
        card = _native.Accelerator(self.socket)
        self.check(card, accepted)
        card.probe()
        return card

    def check(self, card: _native.Accelerator, accepted: Item) -> None:
        """Let a connected card show that it gave the evidence `accepted`; may block for a second.

        VerificationError `attestation.card.…` if it is another one; OSError if it doesn't answer.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        statement = parse_statement(card.evidence(nonce))
        check_statement(statement, nonce=nonce)
        known = parse_statement(accepted.value)
        if statement.identity != known.identity:
            raise VerificationError(
                "attestation.card.changed",
                f"{self.socket}: another card answers than the one that was attested",
            )
