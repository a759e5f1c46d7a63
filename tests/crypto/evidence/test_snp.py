"""The SEV-SNP verifier with synthetic AMDs: every check, every product, every truncation."""

import datetime as dt
import struct
import subprocess
import sys
import uuid

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from sealane.crypto.evidence import snp, snp_report
from sealane.crypto.evidence.chain import key_sha256, parse_certificate, verify_chain
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.collateral import Collateral, VendorRoots, vendor_roots
from sealane.crypto.evidence.snp_report import ASK_GUID, VCEK_GUID, VLEK_GUID
from sealane.errors import VerificationError
from vendors.amd import (
    CSP_ID,
    TCB,
    Amd,
    amd,
    certificate_table,
    sign,
    tcb_version,
    with_serial_zero,
)
from vendors.authority import END, NOW, START, Authority, p256, p384, rsa_key

BINDING = Binding(
    runtime_data=b"runtime", nonce=bytes(32), tls_public_key=b"t", kem_public_key=b"k"
)
PRODUCTS = ("Milan", "Genoa", "Turin")
ORDER_P384 = int(
    "ffffffffffffffffffffffffffffffffffffffffffffffff"
    "c7634d81f4372ddf581a0db248b0a77aecec196accc52973",
    16,
)


@pytest.fixture(scope="module")
def vendor() -> Amd:
    return amd("Genoa")


def collateral(vendor: Amd, *certificates: Authority, **fields: object) -> Collateral:
    others = vendor_roots()
    roots = VendorRoots(
        amd={vendor.product: vendor.ark.certificate}, intel=others.intel, nvidia=others.nvidia
    )
    known = [each.certificate for each in certificates]
    vceks = [each for each in known if "SEV-VCEK" in each.subject.rfc4514_string()]
    return Collateral(
        roots=roots,
        amd_signers=tuple(each for each in known if each not in vceks),
        amd_vceks={snp.vcek_name(*snp.parse_vcek(each)): each for each in vceks},
        **fields,
    )


def verify(
    vendor: Amd,
    report: bytes | None = None,
    *,
    table: bytes | None = None,
    known: Collateral | None = None,
    now: dt.datetime = NOW,
) -> Claims:
    if report is None:
        report = vendor.report(report_data=BINDING.report_data)
    return snp.verify(
        report,
        binding=BINDING,
        collateral=known or collateral(vendor),
        now=now,
        endorsements=vendor.table() if table is None else table,
    )


def refused(fault: str, *arguments: object, **options: object) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(*arguments, **options)
    assert caught.value.reason == f"attestation.snp.{fault}"


def report(vendor: Amd, **changes: object) -> bytes:
    return vendor.report(**{"report_data": BINDING.report_data} | changes)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_genuine_report_gives_its_claims(product: str, version: int) -> None:
    made = amd(product)
    claims = verify(made, report(made, version=version, vmpl=1, guest_svn=9))
    assert claims.evidence_type == "snp"
    assert claims.product == product
    assert claims.hardware_id == f"chip-id:{made.chip_id.hex()}"
    components = set(TCB) - (set() if product == "Turin" else {"fmc"})
    assert claims.tcb == {c: TCB[c] for c in components} | {"guest_svn": 9}
    assert claims.properties == {"report_version": version, "vmpl": 1}
    assert claims.measurements["measurement"] == bytes([0xAA]) * 48
    assert claims.measurements["host_data"] == bytes([0xBB]) * 32
    assert claims.measurements["launch_mit_vector"][0] == (version == 5)
    safe = {name: claims.flags[name] for name in snp.SAFE_FLAGS}
    assert safe == dict(snp.SAFE_FLAGS) | {"revocation_checked": False}
    assert claims.valid_until == END


def test_version_2_takes_its_product_from_the_chain(vendor: Amd) -> None:
    claims = verify(vendor, report(vendor, version=2))
    assert (claims.product, claims.properties["report_version"]) == ("Genoa", 2)


def test_turin_has_no_version_2() -> None:
    made = amd("Turin")
    refused("chain", made, report(made, version=2))


def test_a_vlek_names_its_provider(vendor: Amd) -> None:
    leased = report(vendor, key=vendor.vlek, flags=1 << 2, chip_id=bytes(64))
    claims = verify(vendor, leased, table=vendor.vlek_table())
    assert claims.hardware_id == f"csp-id:{CSP_ID.encode().hex()}"


@pytest.mark.parametrize("length", [0, 200])
def test_a_provider_has_a_name_of_bounded_length(vendor: Amd, length: int) -> None:
    long = b"\x16\x81\xc8" + b"x" * 200 if length else b"\x16\0"
    key = vendor.asvk.issue(
        "SEV-VLEK",
        p384(),
        extensions=[
            (e.oid.dotted_string, long if e.oid.dotted_string.endswith(".1.5") else e.value.value)
            for e in vendor.vlek.certificate.extensions
            if e.oid.dotted_string.startswith("1.3.6.1.4.1.3704")
        ],
    )
    table = certificate_table((VLEK_GUID, key.der), (ASK_GUID, vendor.asvk.der))
    refused("certificate", vendor, report(vendor, key=key, flags=1 << 2), table=table)


@pytest.mark.parametrize(
    ("bit", "flag"),
    [*((b, n) for n, b in snp_report.POLICY_BITS.items())],
)
def test_policy_bits_become_flags(vendor: Amd, bit: int, flag: str) -> None:
    base = verify(vendor, report(vendor, policy=1 << 17)).flags
    assert not base[flag]
    changed = verify(vendor, report(vendor, policy=1 << 17 | 1 << bit)).flags
    assert {name for name in base if base[name] != changed[name]} == {flag}


@pytest.mark.parametrize(
    ("bit", "flag"),
    [*((b, n) for n, b in snp_report.PLATFORM_BITS.items())],
)
def test_platform_bits_become_flags(vendor: Amd, bit: int, flag: str) -> None:
    base = verify(vendor, report(vendor, platform_info=0)).flags
    changed = verify(vendor, report(vendor, platform_info=1 << bit)).flags
    assert {name for name in base if base[name] != changed[name]} == {flag}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("which", ["committed", "launch", "current"])
def test_the_lowest_of_the_four_tcbs_counts(product: str, which: str) -> None:
    made = amd(product)
    for component in set(verify(made, report(made)).tcb) - {"guest_svn"}:
        lower = tcb_version(product, TCB | {component: TCB[component] - 1})
        claims = verify(made, report(made, **{which: lower}))
        assert claims.tcb[component] == TCB[component] - 1
        assert claims.flags["uncommitted"] == (which != "launch")


def test_a_higher_current_tcb_raises_nothing_but_the_flag(vendor: Amd) -> None:
    ahead = tcb_version("Genoa", TCB | {"microcode": 201})
    claims = verify(vendor, report(vendor, current=ahead))
    assert claims.tcb["microcode"] == 200
    assert claims.flags["uncommitted"]


def test_turin_reads_its_own_byte_order() -> None:
    made = amd("Turin")
    # Bytes 0 to 3 in Milan's order would be another TCB, with zeros where Turin has numbers.
    assert verify(made, report(made)).tcb["bootloader"] == TCB["bootloader"]
    shuffled = tcb_version("Milan")
    refused("malformed", made, report(made, committed=shuffled))


@pytest.mark.parametrize("length", [0, 1, 0x29F, 0x49F, 0x4A1, 5000])
def test_another_length_is_refused(vendor: Amd, length: int) -> None:
    refused("malformed", vendor, report(vendor).ljust(length, b"\0")[:length])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"version": 6},
        {"algorithm": 0},
        {"algorithm": 2},
        {"policy": 1 << 16},
        {"policy": 1 << 17 | 1 << 26},
        {"policy": 1 << 17 | 1 << 63},
        {"platform_info": 1 << 6},
        {"platform_info": 1 << 8},
        {"flags": 1 << 5},
        {"flags": 1 << 31},
        {"vmpl": 4},
        {"vmpl": 0xFFFFFFFF},
        {"cpuid": (0x19, 0x20, 0)},
        {"cpuid": (0x17, 0x01, 0)},
        {"cpuid": (0x1A, 0x12, 0)},
        {"committed": bytes([4, 2, 1, 0, 0, 0, 23, 200])},
    ],
    ids=str,
)
def test_a_malformed_field_is_refused(vendor: Amd, changes: dict[str, object]) -> None:
    refused("malformed", vendor, report(vendor, **changes))


@pytest.mark.parametrize(
    ("model", "family", "product"),
    [(0x0F, 0x19, "Milan"), (0xA0, 0x19, "Genoa"), (0xAF, 0x19, "Genoa"), (0x11, 0x1A, "Turin")],
)
def test_the_edges_of_each_product_are_its_own(model: int, family: int, product: str) -> None:
    made = amd(product)
    assert verify(made, report(made, cpuid=(family, model, 0))).product == product


RESERVED = [0x4C, 0x18B, 0x19F, 0x1EB, 0x1EF, 0x1F8, 0x207, 0x208, 0x29F, 0x330, 0x49F]


@pytest.mark.parametrize("place", RESERVED, ids=hex)
def test_reserved_bytes_are_zero(vendor: Amd, place: int) -> None:
    changed = bytearray(report(vendor))
    changed[place] = 1
    if place < 0x2A0:
        changed = bytearray(sign(bytes(changed[:0x2A0]), vendor.vcek.key))
    refused("malformed", vendor, bytes(changed))


def test_version_2_has_no_cpuid(vendor: Amd) -> None:
    changed = bytearray(report(vendor, version=2)[:0x2A0])
    changed[0x188] = 0x19
    refused("malformed", vendor, sign(bytes(changed), vendor.vcek.key))


@pytest.mark.parametrize("flags", [7 << 2, 2 << 2, 2])
def test_unsigned_and_masked_reports_are_refused(vendor: Amd, flags: int) -> None:
    refused("unsigned", vendor, report(vendor, flags=flags))


def test_a_flip_of_any_signed_byte_is_refused(vendor: Amd) -> None:
    good = report(vendor)
    for place in range(snp_report.SIGNED_BYTES):
        changed = bytearray(good)
        changed[place] ^= 1 << place % 8
        with pytest.raises(VerificationError):
            verify(vendor, bytes(changed))


def test_a_flip_of_the_signature_is_refused(vendor: Amd) -> None:
    good = report(vendor)
    for place in range(0x2A0, 0x330, 7):
        changed = bytearray(good)
        changed[place] ^= 1
        refused("signature", vendor, bytes(changed))


def test_the_other_ecdsa_signature_of_a_report_is_the_same_report(vendor: Amd) -> None:
    good = report(vendor)
    s = int.from_bytes(good[0x2E8:0x330], "little")
    other = good[:0x2E8] + (ORDER_P384 - s).to_bytes(72, "little") + good[0x330:]
    assert verify(vendor, other) == verify(vendor, good)
    above = good[:0x2E8] + (ORDER_P384 + s).to_bytes(72, "little") + good[0x330:]
    refused("signature", vendor, above)
    assert encode_dss_signature(1, s)  # values above the order are still encoded


def test_runtime_data_is_committed_to(vendor: Amd) -> None:
    for other in (bytes(64), BINDING.report_data[:32] + bytes(32), BINDING.report_data[::-1]):
        refused("report_data", vendor, report(vendor, report_data=other))


def test_a_report_of_another_chips_key_is_refused(vendor: Amd) -> None:
    other = vendor.endorse(hwid=bytes([9]) * 64)
    refused("signature", vendor, table=vendor.table(key=other))
    # Even if that key signed it, it isn't this chip's.
    refused("chip_mismatch", vendor, report(vendor, key=other), table=vendor.table(key=other))


def test_an_endorsed_report_without_chip_is_refused(vendor: Amd) -> None:
    key = vendor.endorse(hwid=bytes(64))
    refused(
        "chip_mismatch",
        vendor,
        report(vendor, key=key, chip_id=bytes(64)),
        table=vendor.table(key=key),
    )


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("shape", ["raw", "octet string"])
def test_hwid_is_read_in_both_encodings(product: str, shape: str) -> None:
    made = amd(product)
    raw = made.chip_id[: 8 if product == "Turin" else 64]
    key = made.endorse(hwid=raw if shape == "raw" else bytes([4, len(raw)]) + raw)
    assert verify(made, report(made, key=key), table=made.table(key=key)).hardware_id.endswith(
        made.chip_id.hex()
    )


@pytest.mark.parametrize("length", [0, 8, 63, 65, 66])
def test_hwid_of_another_length_is_refused(vendor: Amd, length: int) -> None:
    key = vendor.endorse(hwid=vendor.chip_id.ljust(66, b"\0")[:length])
    refused("certificate", vendor, report(vendor, key=key), table=vendor.table(key=key))


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_key_stands_for_exactly_the_reported_tcb(product: str) -> None:
    made = amd(product)
    for component in set(verify(made, report(made)).tcb) - {"guest_svn"}:
        for step in (-1, 1):
            key = made.endorse(tcb=TCB | {component: TCB[component] + step})
            refused("tcb_mismatch", made, report(made, key=key), table=made.table(key=key))


def test_a_key_without_its_tcb_is_refused(vendor: Amd) -> None:
    key = vendor.endorse(leave_out=("1.3.6.1.4.1.3704.1.3.8",))
    refused("certificate", vendor, report(vendor, key=key), table=vendor.table(key=key))


def test_another_products_chain_is_refused(vendor: Amd) -> None:
    milan = amd("Milan")
    refused("chain", vendor, report(vendor, key=milan.vcek), table=milan.table())
    refused("chain", vendor, table=vendor.table(signer=milan.ask))
    # A Milan report that claims to be Genoa's, signed under Milan's root.
    known = Collateral(roots=vendor_roots())
    refused("chain", vendor, known=known)


def test_a_product_without_root_is_refused(vendor: Amd) -> None:
    refused("chain", vendor, known=collateral(amd("Milan")))


def test_each_kind_of_key_has_its_own_signer(vendor: Amd) -> None:
    by_asvk = vendor.endorse(signer=vendor.asvk)
    table = vendor.table(key=by_asvk, signer=vendor.asvk)
    refused("chain", vendor, report(vendor, key=by_asvk), table=table)
    leased = report(vendor, key=vendor.vlek, flags=1 << 2)
    refused(
        "chain",
        vendor,
        leased,
        table=certificate_table((VLEK_GUID, vendor.vlek.der), (ASK_GUID, vendor.ask.der)),
    )


def test_a_made_up_root_in_the_table_is_not_trusted(vendor: Amd) -> None:
    forger = Amd("Genoa")
    ark = uuid.UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae")
    table = certificate_table(
        (VCEK_GUID, forger.vcek.der), (ASK_GUID, forger.ask.der), (ark, forger.ark.der)
    )
    refused("chain", vendor, report(forger), table=table)


def test_a_key_on_another_curve_is_refused(vendor: Amd) -> None:
    key = vendor.endorse(key=p256())
    refused("certificate", vendor, report(vendor, key=key), table=vendor.table(key=key))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("which", ["vcek", "ask"])
def test_certificates_are_valid_at_the_time_given(vendor: Amd, which: str, late: bool) -> None:
    window = {"end": NOW - dt.timedelta(days=1)} if late else {"start": NOW + dt.timedelta(days=1)}
    if which == "vcek":
        table = vendor.table(key=vendor.endorse(key=vendor.vcek.key, **window))
    else:
        options = {"is_authority": True, "path_length": 0} | window
        signer = vendor.ark.issue("SEV-Genoa", vendor.ask.key, **options)
        table = vendor.table(signer=signer)
    refused("expired", vendor, table=table)


def test_the_root_is_valid_at_the_time_given(vendor: Amd) -> None:
    window = {"start": START - dt.timedelta(days=9), "end": END + dt.timedelta(days=9)}
    options = {"is_authority": True, "path_length": 0} | window
    signer = vendor.ark.issue("SEV-Genoa", vendor.ask.key, **options)
    table = vendor.table(key=vendor.endorse(key=vendor.vcek.key, **window), signer=signer)
    assert verify(vendor, table=table, now=END).valid_until == END
    refused("expired", vendor, table=table, now=END + dt.timedelta(seconds=1))
    refused("expired", vendor, table=table, now=START - dt.timedelta(seconds=1))


def test_claims_end_with_what_ends_first(vendor: Amd) -> None:
    soon = NOW + dt.timedelta(days=3)
    key = vendor.endorse(end=soon)
    claims = verify(vendor, report(vendor, key=key), table=vendor.table(key=key))
    assert claims.valid_until == soon


def lists(vendor: Amd, *serials: int, **options: object) -> Collateral:
    made = vendor.ark.revoke(*serials, **options)
    return collateral(vendor, revocation_lists={key_sha256(vendor.ark.certificate): made})


def test_a_revoked_signing_key_is_refused(vendor: Amd) -> None:
    assert verify(vendor, known=lists(vendor, 4711)).flags["revocation_checked"]
    refused("revoked", vendor, known=lists(vendor, vendor.ask.certificate.serial_number))


@pytest.mark.parametrize("days", [-1, 1])
def test_a_revocation_list_out_of_its_time_is_refused(vendor: Amd, days: int) -> None:
    edge = NOW + dt.timedelta(days=days)
    window = {"end": edge} if days < 0 else {"start": edge}
    refused("collateral_expired", vendor, known=lists(vendor, **window))
    # This never makes a revoked key valid.
    serial = vendor.ask.certificate.serial_number
    refused("revoked", vendor, known=lists(vendor, serial, **window))


def test_a_list_ends_the_claims_too(vendor: Amd) -> None:
    soon = NOW + dt.timedelta(days=2)
    assert verify(vendor, known=lists(vendor, end=soon)).valid_until == soon


def test_what_the_table_lacks_comes_from_the_collateral() -> None:
    for product in PRODUCTS:
        made = amd(product)
        older = made.endorse(tcb=TCB | {"microcode": 199})
        strange = made.endorse(hwid=bytes([1]) * (8 if product == "Turin" else 64))
        known = collateral(made, older, strange, made.vcek, made.asvk, made.ask)
        for version in (3,) if product == "Turin" else (2, 3):
            claims = verify(made, report(made, version=version), table=b"", known=known)
            assert claims.product == product
        leased = report(made, key=made.vlek, flags=1 << 2)
        table = certificate_table((VLEK_GUID, made.vlek.der))
        assert verify(made, leased, table=table, known=known).hardware_id.startswith("csp-id:")
        refused("collateral_missing", made, leased, table=b"", known=known)


@pytest.mark.parametrize("left_out", ["vcek", "ask"])
def test_missing_collateral_is_named(vendor: Amd, left_out: str) -> None:
    known = collateral(vendor, vendor.ask if left_out == "vcek" else vendor.vcek)
    refused("collateral_missing", vendor, table=b"", known=known)


def test_the_issuer_must_be_an_authority(vendor: Amd) -> None:
    for options in (
        {"is_authority": False, "may_sign": True},
        {"is_authority": True, "may_sign": False},
    ):
        signer = vendor.ark.issue("SEV-Genoa", vendor.ask.key, **options)
        refused("chain", vendor, table=vendor.table(signer=signer))


def test_an_extension_nobody_understands_must_not_be_critical(vendor: Amd) -> None:
    oid = "1.3.6.1.4.1.3704.1.3.1"
    key = vendor.endorse(critical=[oid])
    refused("chain", vendor, report(vendor, key=key), table=vendor.table(key=key))


def test_serial_number_zero_is_read(vendor: Amd) -> None:
    key = vendor.endorse(serial=1)
    encoded = with_serial_zero(key, vendor.ask)
    assert parse_certificate(encoded, kind="snp").serial_number == 0
    table = certificate_table((VCEK_GUID, encoded), (ASK_GUID, vendor.ask.der))
    assert verify(vendor, report(vendor, key=key), table=table).product == "Genoa"


def test_serial_number_zero_gives_no_warning(vendor: Amd) -> None:
    encoded = with_serial_zero(vendor.endorse(serial=1), vendor.ask)
    program = (
        "import sys; from sealane.crypto.evidence.chain import parse_certificate; "
        "parse_certificate(bytes.fromhex(sys.argv[1]), kind='snp')"
    )
    command = [sys.executable, "-W", "error", "-c", program, encoded.hex()]
    subprocess.run(command, check=True, timeout=60)


def test_certificates_may_be_pem(vendor: Amd) -> None:
    table = certificate_table((VCEK_GUID, vendor.vcek.pem), (ASK_GUID, vendor.ask.pem + b"\0\0"))
    assert verify(vendor, table=table).product == "Genoa"


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\x30", b"-----BEGIN CERTIFICATE-----\n", bytes(9000), b"-----" * 20000],
    ids=len,
)
def test_what_is_no_certificate_is_refused(vendor: Amd, encoded: bytes) -> None:
    table = certificate_table((VCEK_GUID, encoded), (ASK_GUID, vendor.ask.der))
    with pytest.raises(VerificationError, match=r"attestation\.snp\.(certificate|table)"):
        verify(vendor, table=table)


def test_two_certificates_where_one_belongs_are_refused(vendor: Amd) -> None:
    table = certificate_table((VCEK_GUID, vendor.vcek.pem + vendor.ask.pem))
    refused("certificate", vendor, table=table)


def test_a_certificate_of_more_than_eight_kilobytes_is_refused(vendor: Amd) -> None:
    big = vendor.ask.issue("SEV-VCEK", p384(), extensions=[("1.2.3.4", bytes(8192))])
    table = certificate_table((VCEK_GUID, big.der), (ASK_GUID, vendor.ask.der))
    with pytest.raises(VerificationError, match="a certificate of"):
        verify(vendor, table=table)


def test_text_between_certificates_is_refused(vendor: Amd) -> None:
    table = certificate_table((VCEK_GUID, vendor.vcek.pem + b"x"), (ASK_GUID, vendor.ask.der))
    refused("certificate", vendor, table=table)


def test_a_table_cut_anywhere_is_refused(vendor: Amd) -> None:
    table = vendor.table()
    for length in [*range(1, 100), *range(100, len(table), 97)]:
        with pytest.raises(VerificationError):
            verify(vendor, table=table[:length])


@pytest.mark.parametrize(
    "table",
    [
        VCEK_GUID.bytes + struct.pack("<II", 0, 0) + VCEK_GUID.bytes + bytes(32),
        VCEK_GUID.bytes + struct.pack("<II", 49, 0) + bytes(24),
        VCEK_GUID.bytes + struct.pack("<II", 40, 9) + bytes(24),
        VCEK_GUID.bytes + struct.pack("<II", 0, 0xFFFFFFFF) + bytes(24),
        b"".join(bytes([i + 1]) * 16 + bytes(8) for i in range(16)) + bytes(24),
        bytes(snp_report.TABLE_BYTES_MAX + 1),
    ],
    ids=["twice", "offset", "length", "huge", "seventeen", "long"],
)
def test_a_malformed_table_is_refused(vendor: Amd, table: bytes) -> None:
    refused("table", vendor, table=table)


def test_a_full_table_and_one_of_zeros_are_read(vendor: Amd) -> None:
    others = [(uuid.UUID(bytes=bytes([i + 1]) * 16), b"") for i in range(13)]
    table = certificate_table((VCEK_GUID, vendor.vcek.der), (ASK_GUID, vendor.ask.der), *others)
    assert verify(vendor, table=table).product == "Genoa"
    known = collateral(vendor, vendor.ask, vendor.vcek)
    assert verify(vendor, table=bytes(4096), known=known).product == "Genoa"


def test_a_longer_chain_than_the_authority_allows_is_refused(vendor: Amd) -> None:
    below = vendor.ask.issue("SEV-Genoa", rsa_key(), is_authority=True)
    leaf = below.issue("SEV-VCEK", p384())
    chain = [each.certificate for each in (leaf, below, vendor.ask)]
    options = {"root": vendor.ark.certificate, "revocation_lists": {}, "kind": "snp", "now": NOW}
    with pytest.raises(VerificationError, match=r"longer .*\[attestation\.snp\.chain\]"):
        verify_chain(chain, **options)
