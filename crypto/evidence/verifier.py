"""What the verifier service asks of the module for one type of evidence."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from sealane.crypto.evidence.claims import Binding, Claims
from sealane.errors import VerificationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """What came of a node's introduction.

    `activation` goes back to the node with the challenge; `context` stays with the challenge until
    the evidence comes. Both mean something to the verifier of that type only: for `tpm2` the
    credential blob, and what it expects of the TPM that could open it.
    """

    activation: bytes = b""
    context: object = None


NOT_INTRODUCED: Final = Introduced()


class EvidenceVerifier(Protocol):
    """Reads one type of evidence. Used from several threads at once: keeps no state between calls.

    `media_type` is the type of its item in the evidence collection.
    """

    @property
    def evidence_type(self) -> str:
        """The name of the type: `software`, `snp`, `tdx`, `tpm2`, `nvidia-gpu` and so on."""

    @property
    def media_type(self) -> str:
        """The media type of an item of this type."""

    @property
    def endorsements_media_type(self) -> str:
        """The media type of the item "collateral" beside it; empty if this type takes none."""

    @property
    def safe_flags(self) -> Mapping[str, bool]:
        """What flags must be unless the policy says otherwise by name; the others only inform."""

    def introduce(self, introduction: bytes, *, now: dt.datetime) -> Introduced:
        """Prepare a challenge; VerificationError if the introduction isn't of this type."""

    def verify(
        self,
        evidence: bytes,
        *,
        binding: Binding,
        introduced: Introduced,
        endorsements: bytes,
        now: dt.datetime,
    ) -> Claims:
        """Return what genuine evidence says; VerificationError `attestation.<type>.<fault>`.

        `endorsements` is the item "collateral" of the collection, untrusted, empty if there is
        none. `now` is the verifier's time, UTC.
        """


def refuse_introduction(introduction: bytes, *, evidence_type: str) -> Introduced:
    """Be the `introduce` of a type that has no introduction."""
    if introduction:
        raise VerificationError(
            "attestation.introduction.malformed", f"{evidence_type} evidence takes no introduction"
        )
    return NOT_INTRODUCED
