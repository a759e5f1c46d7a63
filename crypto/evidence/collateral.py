"""Data of vendors for verifying evidence: roots, certificates, revocation lists, TCB data.

An immutable snapshot, created by `sealane.crypto.evidence.collateral_loader` from an operator's
files. Verifiers fetch nothing.
"""

import datetime as dt
import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509

from sealane.crypto.evidence.chain import RevocationLists

AMD_PRODUCTS: Final = ("Milan", "Genoa", "Turin")


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorRoots:
    """Root certificates that all chains must end at; `amd` has one (ARK) per product."""

    amd: Mapping[str, x509.Certificate]
    intel: x509.Certificate
    nvidia: x509.Certificate


@functools.cache
def vendor_roots() -> VendorRoots:
    """Return the roots included in Sealane: AMD's KDS, Intel's PCS, NVIDIA's device identity."""
    folder = importlib.resources.files("sealane.crypto.evidence") / "roots"

    def load(name: str) -> x509.Certificate:
        return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())

    return VendorRoots(
        amd={product: load(f"amd-{product.lower()}") for product in AMD_PRODUCTS},
        intel=load("intel-sgx"),
        nvidia=load("nvidia-device-identity"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedDocument:
    """A verified JSON text signed by Intel: QE identity, or TCB information (`TcbInfo`).

    `text` is exactly what `signature` (ECDSA P-256, r ‖ s, 64 bytes) covers; `issuer_chain` is in
    PEM. It is valid from `issue_date` to `next_update`.
    """

    name: str
    text: str
    signature: bytes
    issuer_chain: str
    issue_date: dt.datetime
    next_update: dt.datetime
    tcb_evaluation_data_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TcbInfo(SignedDocument):
    """TCB information of one FMSPC (6 bytes) and PCEID (2 bytes)."""

    fmspc: bytes
    pce_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Collateral:
    """Collateral at one time, all of it verified except the endorsement keys.

    `amd_signers` are ASK and ASVK certificates, `amd_vceks` VCEK certificates by `snp.vcek_name`,
    `revocation_lists` are by `key_sha256` of their issuer, `tcb_infos` by FMSPC.
    """

    roots: VendorRoots = field(default_factory=vendor_roots)
    revocation_lists: RevocationLists = field(default_factory=dict)
    amd_signers: tuple[x509.Certificate, ...] = ()
    amd_vceks: Mapping[bytes, x509.Certificate] = field(default_factory=dict)
    tcb_infos: Mapping[bytes, TcbInfo] = field(default_factory=dict)
    qe_identity: SignedDocument | None = None

    @property
    def next_update(self) -> dt.datetime | None:
        """Return when the first list or document expires; None if there are none."""
        ends = [each.next_update_utc for each in self.revocation_lists.values()]
        ends += [each.next_update for each in self.tcb_infos.values()]
        ends += [self.qe_identity.next_update] if self.qe_identity is not None else []
        return min((end for end in ends if end is not None), default=None)
