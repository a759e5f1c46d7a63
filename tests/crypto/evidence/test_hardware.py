"""The vendors' verifiers, used as by the verifier service."""

import pytest

from sealane.crypto.evidence.claims import Binding
from sealane.crypto.evidence.collateral import Collateral, VendorRoots, vendor_roots
from sealane.crypto.evidence.kinds import KINDS, Trusted, verifiers
from sealane.crypto.evidence.verifier import NOT_INTRODUCED
from sealane.errors import VerificationError
from vendors.amd import amd
from vendors.authority import NOW

BINDING = Binding(runtime_data=b"r", nonce=bytes(32), tls_public_key=b"t", kem_public_key=b"k")
HARDWARE = [KINDS[name](Trusted()) for name in ("snp", "tdx", "nvidia")]


def test_each_vendor_has_a_type_and_a_media_type_of_its_own() -> None:
    made = verifiers(Trusted())
    assert [each.evidence_type for each in made] == [*KINDS]
    assert len({each.media_type for each in made}) == len(KINDS)


def test_nobody_is_introduced() -> None:
    for each in HARDWARE:
        assert each.introduce(b"", now=NOW) == NOT_INTRODUCED
        with pytest.raises(VerificationError, match=r"attestation\.introduction\.malformed"):
            each.introduce(b"x", now=NOW)


def test_what_is_no_evidence_is_refused_by_its_type() -> None:
    for each in HARDWARE:
        for evidence in (b"", b"x", bytes(1184), bytes(100_000)):
            with pytest.raises(VerificationError) as caught:
                each.verify(
                    evidence,
                    binding=BINDING,
                    introduced=NOT_INTRODUCED,
                    endorsements=b"",
                    now=NOW,
                )
            assert caught.value.reason.startswith(f"attestation.{each.evidence_type}.")


def test_collateral_is_asked_for_at_each_call() -> None:
    vendor, others = amd("Genoa"), vendor_roots()
    roots = VendorRoots(
        amd={"Genoa": vendor.ark.certificate}, intel=others.intel, nvidia=others.nvidia
    )
    current = Collateral()
    verifier = KINDS["snp"](Trusted(collateral=lambda: current))
    arguments = {
        "binding": BINDING,
        "introduced": NOT_INTRODUCED,
        "endorsements": vendor.table(),
        "now": NOW,
    }
    report = vendor.report(report_data=BINDING.report_data)
    with pytest.raises(VerificationError, match=r"attestation\.snp\.chain"):
        verifier.verify(report, **arguments)
    current = Collateral(roots=roots)
    claims = verifier.verify(report, **arguments)
    assert set(verifier.safe_flags) <= set(claims.flags)
