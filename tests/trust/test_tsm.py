"""The `tsm` driver over made-up hardware, through the verifiers of the service."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.collateral import Collateral, VendorRoots, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.crypto.evidence.hardware import hardware_verifiers
from sealane.crypto.evidence.verifier import NOT_INTRODUCED
from sealane.daemon.evidence.tsm import TsmDriver
from sealane.errors import VerificationError
from vendors.amd import amd
from vendors.authority import NOW
from vendors.intel import intel
from vendors.tsm import ImitationTree


def runtime_data(evidence_type: str, *, nonce: bytes = bytes(32)) -> RuntimeData:
    return RuntimeData(
        nonce=nonce,
        audience="spiffe://sealane/broker/b",
        node="n",
        role="gateway",
        incarnation=bytes(16),
        tls_public_key=b"tls",
        kem_public_key=bytes(32),
        verifier_key_sha256=bytes(32),
        evidence_type=evidence_type,
    )


def collateral() -> Collateral:
    roots = VendorRoots(
        amd={"Genoa": amd("Genoa").ark.certificate},
        intel=intel().root.certificate,
        nvidia=vendor_roots().nvidia,
    )
    bundle: Mapping[str, bytes] = {"bundle": intel().collateral()}
    return load_collateral(bundle, roots=roots, high_water={}, now=NOW).collateral


def imitation(folder: Path, provider: str) -> ImitationTree:
    if provider == "sev_guest":
        genoa = amd("Genoa")
        return ImitationTree(
            folder,
            provider,
            sign=lambda data: genoa.report(report_data=data),
            table=genoa.table(),
        )
    return ImitationTree(folder, provider, sign=lambda data: intel().quote(report_data=data))


@pytest.mark.parametrize("provider", ["sev_guest", "tdx_guest"])
def test_report_of_the_machine_speaks_for_its_runtime_data(tmp_path: Path, provider: str) -> None:
    driver = TsmDriver(imitation(tmp_path, provider))
    data = runtime_data(driver.evidence_type)
    endorsements = asyncio.run(driver.endorsements())
    evidence = asyncio.run(driver.collect(data, activation=b""))
    known = collateral()
    verifier = {v.media_type: v for v in hardware_verifiers(lambda: known)}[driver.media_type]
    assert verifier.evidence_type == driver.evidence_type

    def verify(answered: RuntimeData) -> Claims:
        return verifier.verify(
            evidence,
            binding=answered.binding(),
            introduced=NOT_INTRODUCED,
            endorsements=endorsements,
            now=NOW,
        )

    assert verify(data).evidence_type == driver.evidence_type
    with pytest.raises(VerificationError, match="report_data"):
        verify(runtime_data(driver.evidence_type, nonce=b"\1" * 32))
