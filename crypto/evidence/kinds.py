"""The kinds of evidence that a verifier reads: one module and one row each.

The policy says which of them count, and for which role.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509

from sealane.crypto.evidence import nvidia, snp, tdx
from sealane.crypto.evidence.card import CARD, CardVerifier
from sealane.crypto.evidence.collateral import Collateral
from sealane.crypto.evidence.hardware import HardwareVerifier
from sealane.crypto.evidence.software import SOFTWARE, SoftwareVerifier
from sealane.crypto.evidence.tpm2 import TPM2, Tpm2Verifier
from sealane.crypto.evidence.verifier import EvidenceVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """The operator's inputs for verifying: vendors' collateral, makers of TPMs and of cards."""

    collateral: Callable[[], Collateral] = Collateral
    tpm_roots: Sequence[x509.Certificate] = ()
    card_roots: Sequence[x509.Certificate] = ()


KINDS: Final[Mapping[str, Callable[[Trusted], EvidenceVerifier]]] = {
    SOFTWARE: lambda _: SoftwareVerifier(),
    TPM2: lambda trusted: Tpm2Verifier(trusted.tpm_roots),
    snp.EVIDENCE_TYPE: lambda trusted: HardwareVerifier(snp, trusted.collateral),
    tdx.EVIDENCE_TYPE: lambda trusted: HardwareVerifier(tdx, trusted.collateral),
    CARD: lambda trusted: CardVerifier(trusted.card_roots),
    nvidia.EVIDENCE_TYPE: lambda trusted: HardwareVerifier(nvidia, trusted.collateral),
}


def verifiers(trusted: Trusted) -> list[EvidenceVerifier]:
    """Return a verifier for every kind."""
    return [make(trusted) for make in KINDS.values()]
