"""Verifiers of vendors' evidence, one module a vendor, as the verifier service uses them."""

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.collateral import Collateral
from sealane.crypto.evidence.verifier import Introduced, refuse_introduction


class VendorModule(Protocol):
    """A module that reads one vendor's evidence: `snp`, `tdx`, `nvidia`."""

    @property
    def EVIDENCE_TYPE(self) -> str:  # noqa: N802 - a module's constant
        """The name of the type."""

    @property
    def MEDIA_TYPE(self) -> str:  # noqa: N802
        """The media type of an item of this type."""

    @property
    def ENDORSEMENTS_MEDIA_TYPE(self) -> str:  # noqa: N802
        """The media type of the item "collateral" beside it; empty if this type takes none."""

    @property
    def SAFE_FLAGS(self) -> Mapping[str, bool]:  # noqa: N802
        """Required values of flags, unless the policy names other ones."""

    def verify(
        self,
        evidence: bytes,
        *,
        binding: Binding,
        collateral: Collateral,
        now: dt.datetime,
        endorsements: bytes,
    ) -> Claims:
        """Return the claims of genuine evidence; VerificationError `attestation.<type>.<fault>`."""


@dataclass(frozen=True, slots=True)
class HardwareVerifier:
    """Verifier of one vendor's evidence; `current` returns the collateral for each call."""

    module: VendorModule
    current: Callable[[], Collateral]

    @property
    def evidence_type(self) -> str:
        """The name of the type."""
        return self.module.EVIDENCE_TYPE

    @property
    def media_type(self) -> str:
        """The media type of an item of this type."""
        return self.module.MEDIA_TYPE

    @property
    def endorsements_media_type(self) -> str:
        """The media type of the item "collateral" beside it; empty if this type takes none."""
        return self.module.ENDORSEMENTS_MEDIA_TYPE

    @property
    def safe_flags(self) -> Mapping[str, bool]:
        """Required values of flags, unless the policy names other ones."""
        return self.module.SAFE_FLAGS

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
        return self.module.verify(
            evidence,
            binding=binding,
            collateral=self.current(),
            now=now,
            endorsements=endorsements,
        )
