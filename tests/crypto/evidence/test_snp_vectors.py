"""Real SEV-SNP reports and their claims, each verified while its certificates are valid."""

import hashlib
import itertools

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.evidence import snp
from sealane.crypto.evidence.chain import parse_certificate, parse_certificates, verify_chain
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.collateral import Collateral, vendor_roots
from sealane.crypto.evidence.snp_report import ASK_GUID, VCEK_GUID, VLEK_GUID
from sealane.errors import VerificationError
from vendors.amd import certificate_table
from vendors.vectors import Committed, utc, vector

SETS = {
    # report, endorsement key, chain, a time of validity
    "genoa": ("genoa-v3-vcek/report.bin", "genoa-v3-vcek/vcek.pem", "genoa_ask_ark", "2026-01-01"),
    "milan": ("milan-v2-vcek/report.hex", "milan-v2-vcek/vcek.der", "milan_ask_ark", "2026-01-01"),
    "debug": (
        "milan-v2-debug/report.bin",
        "milan-v2-debug/vcek.der",
        "milan_ask_ark",
        "2026-01-01",
    ),
    "ahead": (
        "milan-v2-uncommitted/report.bin",
        "milan-v2-uncommitted/vcek.der",
        "milan_ask_ark",
        "2026-01-01",
    ),
    "vlek": ("milan-v3-vlek/report.bin", "milan-v3-vlek/vlek.der", "milan_asvk_ark", "2025-06-01"),
}


def verify(
    name: str,
    *,
    key: str | None = None,
    chain: str | None = None,
    now: str | None = None,
    report_data: bytes | None = None,
) -> Claims:
    report_path, key_path, chain_name, usual = SETS[name]
    report = vector(f"snp/{report_path}")
    end = b"-----END CERTIFICATE-----\n"
    signer = vector(f"snp/chains/{chain or chain_name}.pem").split(end)[0] + end
    guid = VLEK_GUID if name == "vlek" else VCEK_GUID
    endorsement_key = vector(f"snp/{key or key_path}")
    return snp.verify(
        report,
        binding=Committed(report_data=report_data or report[0x50:0x90]),
        collateral=Collateral(),
        now=utc(now or usual),
        endorsements=certificate_table((guid, endorsement_key), (ASK_GUID, signer)),
    )


def fault(name: str, **options: str) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(name, **options)
    return caught.value.reason.removeprefix("attestation.snp.")


@pytest.mark.parametrize("now", ["2025-01-25", "2026-01-01", "2032-01-23"])
def test_genoa_is_good_and_commits_to_its_runtime_data(now: str) -> None:
    digest = hashlib.sha256(vector("snp/genoa-v3-vcek/runtime-data.json")).digest()
    claims = verify("genoa", now=now, report_data=digest + bytes(32))
    assert (claims.product, claims.properties) == ("Genoa", {"report_version": 3, "vmpl": 0})
    expected = {"bootloader": 10, "tee": 0, "snp": 23, "microcode": 84}
    assert {component: claims.tcb[component] for component in expected} == expected
    unsafe = {n for n, safe in snp.SAFE_FLAGS.items() if claims.flags[n] != safe}
    assert unsafe == {"revocation_checked"}  # no list among the vectors


def test_milan_without_cpuid_says_so() -> None:
    claims = verify("milan")
    assert (claims.product, claims.properties["report_version"]) == ("Milan", 2)
    assert not claims.flags["debug"]


def test_debug_is_seen() -> None:
    assert verify("debug").flags["debug"]


def test_firmware_ahead_of_the_committed_is_seen() -> None:
    claims = verify("ahead")
    assert claims.flags["uncommitted"]
    assert claims.tcb["microcode"] == 0x73


def test_a_vlek_names_its_cloud_and_vmpl() -> None:
    claims = verify("vlek")
    assert claims.properties["vmpl"] == 1
    assert bytes.fromhex(claims.hardware_id.removeprefix("csp-id:")).startswith(b"CN=cc-us-east-2")
    assert claims.valid_until == utc("2025-12-10T22:14:21")


def test_a_vlek_expires() -> None:
    assert fault("vlek", now="2026-01-01") == "expired"


def test_a_vlek_needs_its_own_signer() -> None:
    assert fault("vlek", chain="milan_ask_ark") == "chain"


@pytest.mark.parametrize("encoding", ["raw", "der"])
def test_what_amd_did_not_sign_is_refused(encoding: str) -> None:
    key = f"bad-vcek/vcek-hwid-{encoding}.der"
    assert fault("milan", key=key, now="2025-01-01") in {"chain", "expired"}


@pytest.mark.parametrize(
    ("name", "other"), [*itertools.permutations(["milan", "debug", "ahead", "genoa"], 2)]
)
def test_a_report_with_another_sets_key_is_refused(name: str, other: str) -> None:
    assert fault(name, key=SETS[other][1]) in {"signature", "chain"}


def test_a_milan_key_below_genoa_is_refused() -> None:
    assert fault("milan", chain="genoa_ask_ark") == "chain"


def test_every_cut_and_flip_is_refused() -> None:
    report_path, key_path, chain, now = SETS["genoa"]
    report = vector(f"snp/{report_path}")
    end = b"-----END CERTIFICATE-----\n"
    signer = vector(f"snp/chains/{chain}.pem").split(end)[0] + end
    table = certificate_table((VCEK_GUID, vector(f"snp/{key_path}")), (ASK_GUID, signer))
    options = {
        "binding": Committed(report_data=report[0x50:0x90]),
        "collateral": Collateral(),
        "now": utc(now),
        "endorsements": table,
    }
    for length in range(0, len(report), 13):
        with pytest.raises(VerificationError):
            snp.verify(report[:length], **options)
    for place in range(0, len(report), 3):
        changed = bytearray(report)
        changed[place] ^= 1 << place % 8
        with pytest.raises(VerificationError):
            snp.verify(bytes(changed), **options)


def test_turins_certificates_are_read() -> None:
    key = parse_certificate(vector("snp/turin-certs-only/vcek.der"), kind="snp")
    signer, _ = parse_certificates(vector("snp/chains/turin_ask_ark.pem"), kind="snp")
    verify_chain(
        [key, signer],
        root=vendor_roots().amd["Turin"],
        revocation_lists={},
        kind="snp",
        now=utc("2026-01-01"),
    )
    assert snp.endorsed_tcb(key, "Turin") == {
        "fmc": 0,
        "bootloader": 0,
        "tee": 0,
        "snp": 0,
        "microcode": 9,
    }


def test_the_report_inside_azures_virtual_tpm_is_good() -> None:
    hcl = vector("tpm/az-snp-vtpm/hcl-report.bin")
    report = hcl[0x20 : 0x20 + 1184]
    key, signer, _ = parse_certificates(vector("tpm/az-snp-vtpm/vcek-and-chain.pem"), kind="snp")
    size = int.from_bytes(hcl[0x20 + 1184 + 16 : 0x20 + 1184 + 20], "little")
    runtime_data = hcl[0x20 + 1184 + 20 :][:size]
    committed = hashlib.sha256(runtime_data).digest() + bytes(32)
    table = certificate_table(
        (VCEK_GUID, key.public_bytes(Encoding.DER)), (ASK_GUID, signer.public_bytes(Encoding.DER))
    )
    claims = snp.verify(
        report,
        binding=Committed(report_data=committed),
        collateral=Collateral(),
        now=key.not_valid_before_utc,
        endorsements=table,
    )
    assert (claims.product, claims.flags["uncommitted"]) == ("Milan", True)
