"""Verifiers of vendors' evidence, as the verifier service uses them."""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sealane.crypto.evidence import media_types, nvidia, snp, tdx
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.collateral import Collateral
from sealane.crypto.evidence.verifier import EvidenceVerifier, Introduced, refuse_introduction


class _Verify(Protocol):
    def __call__(
        self,
        evidence: bytes,
        *,
        binding: Binding,
        collateral: Collateral,
        now: dt.datetime,
        endorsements: bytes,
    ) -> Claims: ...


@dataclass(frozen=True, slots=True)
class HardwareVerifier:
    """Verifier of one vendor's evidence; `current` returns the collateral for each call."""

    evidence_type: str
    media_type: str
    endorsements_media_type: str
    safe_flags: Mapping[str, bool]
    read: _Verify
    current: Callable[[], Collateral]

    def introduce(self, introduction: bytes, *, now: dt.datetime) -> Introduced:  # noqa: ARG002
        """Refuse an introduction: this type has none."""
        return refuse_introduction(introduction, evidence_type=self.evidence_type)

    def verify(
        self,
        evidence: bytes,
        *,
        binding: Binding,
        introduced: Introduced,  # noqa: ARG002
        endorsements: bytes,
        now: dt.datetime,
    ) -> Claims:
        """Return the claims of genuine evidence; VerificationError `attestation.<type>.<fault>`."""
        return self.read(
            evidence,
            binding=binding,
            collateral=self.current(),
            now=now,
            endorsements=endorsements,
        )


def hardware_verifiers(current: Callable[[], Collateral]) -> Sequence[EvidenceVerifier]:
    """Return the verifiers of SEV-SNP, TDX and NVIDIA; `current` returns the collateral."""
    return [
        HardwareVerifier(
            module.EVIDENCE_TYPE,
            media_type,
            endorsements_media_type,
            module.SAFE_FLAGS,
            module.verify,
            current,
        )
        for module, media_type, endorsements_media_type in (
            (snp, media_types.SNP_REPORT, media_types.SNP_CERTIFICATES),
            (tdx, media_types.TDX_QUOTE, ""),
            (nvidia, media_types.NVIDIA_EVIDENCE, ""),
        )
    ]
