"""Interface between the verifier service and the module for one type of evidence."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from sealane.crypto.evidence.claims import Binding, Claims
from sealane.errors import VerificationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """Result of a node's introduction.

    `activation` is returned to the node with the challenge; `context` is kept with the challenge
    until the evidence arrives. Only the verifier of that type understands them: for `tpm2` the
    credential blob, and the expected TPM.
    """

    activation: bytes = b""
    context: object = None


NOT_INTRODUCED: Final = Introduced()


class EvidenceVerifier(Protocol):
    """Verifier of one type of evidence. Called from several threads; keeps no state between calls.

    `media_type` is the type of its item in the evidence collection.
    """

    @property
    def evidence_type(self) -> str:
        """Name of the type: `software`, `snp`, `tdx`, `tpm2`, `nvidia-gpu` and so on."""

    @property
    def media_type(self) -> str:
        """Media type of an item of this type."""

    @property
    def endorsements_media_type(self) -> str:
        """Media type of the item "collateral" for it; empty if this type takes none."""

    @property
    def safe_flags(self) -> Mapping[str, bool]:
        """Required values of flags, unless a policy says otherwise by name; others only inform."""

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
        """Return the claims of genuine evidence; VerificationError `attestation.<type>.<fault>`.

        `endorsements` is the item "collateral" of the collection, untrusted, empty if there is
        none. `now` is the verifier's time, UTC.
        """


def refuse_introduction(introduction: bytes, *, evidence_type: str) -> Introduced:
    """Implement `introduce` for a type that has no introduction."""
    if introduction:
        raise VerificationError(
            "attestation.introduction.malformed", f"{evidence_type} evidence takes no introduction"
        )
    return NOT_INTRODUCED
