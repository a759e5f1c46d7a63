"""What verifiers need besides evidence: vendors' roots, certificates, revocation lists, TCB data.

A snapshot that never changes; `sealane.crypto.evidence.collateral_cache` makes them from what an
operator supplies. Verifiers fetch nothing.
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
    """The certificates at which every chain must end; `amd` has one (ARK) by product."""

    amd: Mapping[str, x509.Certificate]
    intel: x509.Certificate
    nvidia: x509.Certificate


@functools.cache
def vendor_roots() -> VendorRoots:
    """Return the roots that come with Sealane: AMD's KDS, Intel's PCS, NVIDIA's device identity."""
    folder = importlib.resources.files("sealane.crypto.evidence") / "roots"

    def load(name: str) -> x509.Certificate:
        return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())

    return VendorRoots(
        amd={product: load(f"amd-{product.lower()}") for product in AMD_PRODUCTS},
        intel=load("intel-sgx"),
        nvidia=load("nvidia-device-identity"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IntelCollateral:
    """TCB information of one FMSPC with QE identity, issuer chains and revocation lists.

    `encoded` is the JSON that Intel's quote verification library and dcap-qvl exchange, with the
    signed texts as Intel signed them. It ends at `next_update`.
    """

    fmspc: bytes
    encoded: str
    tcb_evaluation_data_number: int
    next_update: dt.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Collateral:
    """One state of the cache.

    `amd_certificates` are signing keys (ASK, ASVK) and endorsement keys (VCEK, VLEK),
    `revocation_lists` are by `key_sha256` of their issuer, `intel` is by FMSPC (6 bytes).
    """

    roots: VendorRoots = field(default_factory=vendor_roots)
    amd_certificates: tuple[x509.Certificate, ...] = ()
    revocation_lists: RevocationLists = field(default_factory=dict)
    intel: Mapping[bytes, IntelCollateral] = field(default_factory=dict)
