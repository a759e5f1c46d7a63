"""Loading collateral: only signed by vendors, only while valid, and never older than before."""

import datetime as dt
import json
from collections.abc import Mapping

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.evidence import snp
from sealane.crypto.evidence.chain import key_sha256, verify_revocation_list
from sealane.crypto.evidence.collateral import VendorRoots, vendor_roots
from sealane.crypto.evidence.collateral_loader import ITEM_BYTES_MAX, Loaded, load_collateral
from sealane.errors import VerificationError
from vendors.amd import TCB, Amd, amd
from vendors.authority import END, NOW, Authority, p256, p384, root, rsa_key
from vendors.intel import FMSPC, Intel, intel

FMSPC_2 = bytes.fromhex("90c06f000000")


@pytest.fixture(scope="module")
def vendor() -> Intel:
    return intel()


@pytest.fixture(scope="module")
def genoa() -> Amd:
    return amd("Genoa")


def load(
    items: Mapping[str, bytes],
    *,
    high_water: Mapping[str, int] | None = None,
    now: dt.datetime = NOW,
) -> Loaded:
    roots = VendorRoots(
        amd={"Genoa": amd("Genoa").ark.certificate},
        intel=intel().root.certificate,
        nvidia=vendor_roots().nvidia,
    )
    return load_collateral(items, roots=roots, high_water=high_water or {}, now=now)


def refusals(loaded: Loaded) -> list[tuple[str, str]]:
    return [
        (item, error.reason.removeprefix("attestation.collateral."))
        for item, error in loaded.refused
    ]


def der(revocation_list: x509.CertificateRevocationList) -> bytes:
    return revocation_list.public_bytes(Encoding.DER)


def test_amds_certificates_are_found_by_chip_and_tcb(genoa: Amd) -> None:
    loaded = load(
        {
            "1-vcek.der": genoa.vcek.der,
            "2-chain.pem": genoa.ask.pem + genoa.ark.pem,
            "3-asvk.der": genoa.asvk.der,
            "4-list.crl": der(genoa.ark.revoke(number=7)),
        }
    )
    assert not loaded.refused
    known = loaded.collateral
    assert set(known.amd_signers) == {genoa.ask.certificate, genoa.asvk.certificate}
    tcb = {name: TCB[name] for name in ("bootloader", "tee", "snp", "microcode")}
    name = snp.vcek_name("Genoa", genoa.chip_id, tcb)
    assert dict(known.amd_vceks) == {name: genoa.vcek.certificate}
    issuer = key_sha256(genoa.ark.certificate)
    assert set(known.revocation_lists) == {issuer}
    assert loaded.high_water[f"revocation-list/{issuer.hex()}/number"] == 7


def test_intels_bundle_is_taken_apart(vendor: Intel) -> None:
    loaded = load({"bundle.json": vendor.collateral()})
    assert not loaded.refused
    known = loaded.collateral
    assert set(known.tcb_infos) == {FMSPC}
    assert known.tcb_infos[FMSPC].tcb_evaluation_data_number == 17
    assert known.qe_identity is not None
    assert len(known.revocation_lists) == 2


def test_a_bundle_may_hold_the_chain_of_the_quote_it_was_fetched_for(vendor: Intel) -> None:
    bundle = json.loads(vendor.collateral()) | {"pck_certificate_chain": "whatever"}
    assert not load({"bundle.json": json.dumps(bundle).encode()}).refused


def test_a_certificate_of_nobody_is_refused(genoa: Amd) -> None:
    stranger = root("ARK-Genoa", rsa_key())
    signer = stranger.issue("SEV-Genoa", rsa_key(), is_authority=True)
    unknown = root("ARK-Unknown", rsa_key())
    loaded = load({"a": signer.der, "b": unknown.der, "c": stranger.der})
    assert refusals(loaded) == [("a", "chain"), ("c", "chain"), ("b", "chain")]
    assert not loaded.collateral.amd_signers
    assert genoa.ark.certificate != stranger.certificate


def test_a_leaf_of_another_vendor_is_of_no_use(vendor: Intel) -> None:
    loaded = load({"a": vendor.pck_authority.der, "b": vendor.pck.der})
    assert refusals(loaded) == [("b", "malformed")]


def test_a_vcek_without_its_fields_is_refused(genoa: Amd) -> None:
    empty = genoa.ask.issue("SEV-VCEK", p384())
    loaded = load({"a": genoa.ask.der, "b": empty.der, "c": genoa.asvk.der, "d": genoa.vlek.der})
    assert [(item, error.reason) for item, error in loaded.refused] == [
        ("b", "attestation.snp.certificate"),
        ("d", "attestation.snp.certificate"),
    ]


@pytest.mark.parametrize(
    "encoded",
    [b"", b"{", b"[]", b"{}", b"\x30\x03", b"-----BEGIN", b"{" * 5000, bytes(ITEM_BYTES_MAX + 1)],
    ids=["empty", "open", "array", "object", "der", "pem", "deep", "long"],
)
def test_what_is_no_collateral_is_refused(encoded: bytes) -> None:
    ((item, fault),) = refusals(load({"a": encoded}))
    assert (item, fault in {"malformed", "certificate"}) == ("a", True)


def test_an_item_is_bounded(vendor: Intel) -> None:
    encoded = vendor.collateral()
    assert not load({"a": encoded.ljust(ITEM_BYTES_MAX)}).refused
    assert refusals(load({"a": encoded.ljust(ITEM_BYTES_MAX + 1)})) == [("a", "malformed")]


def test_a_signature_has_one_length(vendor: Intel) -> None:
    bundle = json.loads(vendor.collateral())
    bundle["tcb_info_signature"] += "00"
    assert refusals(load({"a": json.dumps(bundle).encode()})) == [("a", "signature")]


def test_one_bad_item_does_not_cost_the_others(vendor: Intel, genoa: Amd) -> None:
    loaded = load({"a": b"nonsense", "b": vendor.collateral(), "c": genoa.ask.der})
    assert refusals(loaded) == [("a", "certificate")]
    assert loaded.collateral.tcb_infos
    assert loaded.collateral.amd_signers


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"extra": "x"}, "malformed"),
        ({"tcb_info": 7}, "malformed"),
        ({"tcb_info_signature": "zz"}, "malformed"),
        ({"tcb_info_signature": "00" * 63}, "signature"),
        ({"tcb_info_signature": "01" * 64}, "signature"),
        ({"qe_identity_signature": "01" * 64}, "signature"),
        ({"root_ca_crl": ""}, "revocation_list"),
        ({"pck_crl": "3000"}, "revocation_list"),
        ({"tcb_info_issuer_chain": ""}, "certificate"),
    ],
    ids=str,
)
def test_a_bundle_is_checked_in_every_part(
    vendor: Intel, changes: dict[str, object], fault: str
) -> None:
    bundle = json.loads(vendor.collateral()) | changes
    assert ("a", fault) in refusals(load({"a": json.dumps(bundle).encode()}))


@pytest.mark.parametrize("name", ["tcb_info", "qe_identity"])
def test_a_changed_document_is_refused(vendor: Intel, name: str) -> None:
    bundle = json.loads(vendor.collateral())
    bundle[name] = bundle[name].replace("OutOfDate", "UpToDate", 1)
    loaded = load({"a": json.dumps(bundle).encode()})
    assert refusals(loaded) == [("a", "signature")]
    assert not loaded.collateral.tcb_infos


def tcb_signers(vendor: Intel) -> Mapping[str, Authority]:
    return {
        # The holder of a PCK has a chain to Intel's root, too, and its issuer a key directly below.
        "pck": vendor.pck,
        "authority": vendor.pck_authority,
        "other name": vendor.root.issue("Intel SGX Other", p256(), is_listed=True),
        "stranger": root("Intel SGX Root CA", p256()).issue("Intel SGX TCB Signing", p256()),
    }


@pytest.mark.parametrize("who", ["pck", "authority", "other name", "stranger"])
def test_only_intels_tcb_signer_signs_documents(vendor: Intel, who: str) -> None:
    bundle = vendor.collateral(tcb_signer=tcb_signers(vendor)[who])
    assert ("a", "chain") in refusals(load({"a": bundle}))


def test_a_documents_chain_is_signer_and_root(vendor: Intel) -> None:
    bundle = json.loads(vendor.collateral())
    bundle["tcb_info_issuer_chain"] = vendor.tcb_signer.pem.decode()
    assert refusals(load({"a": json.dumps(bundle).encode()})) == [("a", "chain")]


def test_a_revoked_tcb_signer_is_refused(vendor: Intel) -> None:
    serial = vendor.tcb_signer.certificate.serial_number
    assert refusals(load({"a": vendor.collateral(root_revoked=[serial])})) == [("a", "revoked")]


def test_documents_need_intels_list_of_signers(vendor: Intel) -> None:
    bundle = json.loads(vendor.collateral())
    bundle["root_ca_crl"] = bundle["pck_crl"]
    loaded = load({"a": json.dumps(bundle).encode()})
    assert refusals(loaded) == [("a", "revocation_list")]


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("tcb_info", {"id": "SGX"}, "malformed"),
        ("tcb_info", {"version": 2}, "malformed"),
        ("tcb_info", {"fmspc": "00"}, "malformed"),
        ("tcb_info", {"fmspc": 5}, "malformed"),
        ("tcb_info", {"pceId": "000000"}, "malformed"),
        ("tcb_info", {"tcbEvaluationDataNumber": "17"}, "malformed"),
        ("tcb_info", {"tcbEvaluationDataNumber": True}, "malformed"),
        ("tcb_info", {"issueDate": "2026-11-21"}, "malformed"),
        ("tcb_info", {"issueDate": "2026-13-41T00:00:00Z"}, "malformed"),
        ("tcb_info", {"nextUpdate": "2026-11-21T11:59:59Z"}, "expired"),
        ("tcb_info", {"issueDate": "2026-11-21T12:00:01Z"}, "expired"),
        ("qe_identity", {"id": "QE"}, "malformed"),
        ("qe_identity", {"version": 3}, "malformed"),
        ("qe_identity", {"nextUpdate": "2026-11-21T11:59:59Z"}, "expired"),
        ("qe_identity", {"issueDate": "2026-11-21T12:00:01Z"}, "expired"),
    ],
)
def test_documents_are_for_tdx_and_current(
    vendor: Intel, name: str, changes: dict[str, object], fault: str
) -> None:
    document = getattr(vendor, name)(**changes)
    loaded = load({"a": vendor.collateral(**{name: document})})
    assert refusals(loaded) == [("a", fault)]
    assert not loaded.high_water.keys() & {"qe-identity/issued"}


def test_lists_out_of_their_time_are_refused(vendor: Intel, genoa: Amd) -> None:
    late = der(genoa.ark.revoke(end=NOW - dt.timedelta(seconds=1)))
    early = der(genoa.ark.revoke(start=NOW + dt.timedelta(seconds=1)))
    loaded = load({"a": late, "b": early})
    assert refusals(loaded) == [("a", "collateral_expired"), ("b", "collateral_expired")]
    assert not loaded.high_water


def test_a_list_that_the_issuer_did_not_sign_is_refused(genoa: Amd) -> None:
    forged = der(root("ARK-Genoa", rsa_key()).revoke(number=99))
    foreign = der(root("ARK-Other", rsa_key()).revoke())
    loaded = load({"a": forged, "b": foreign, "c": der(genoa.ark.revoke(number=5))})
    assert refusals(loaded) == [("a", "revocation_list"), ("b", "chain")]
    # Forged collateral can't displace genuine collateral.
    (number,) = (v for k, v in loaded.high_water.items() if k.endswith("/number"))
    assert number == 5


def test_a_list_is_of_the_issuer_it_names(genoa: Amd) -> None:
    renamed = root("ARK-Other", genoa.ark.key)
    with pytest.raises(VerificationError, match="is not signed by"):
        verify_revocation_list(genoa.ark.revoke(), issuer=renamed.certificate)


def test_the_newest_of_several_counts(vendor: Intel) -> None:
    older = vendor.collateral(number=3)
    newer = vendor.collateral(
        number=4,
        tcb_info=vendor.tcb_info(tcbEvaluationDataNumber=18, issueDate="2026-11-20T00:00:00Z"),
        qe_identity=vendor.qe_identity(
            tcbEvaluationDataNumber=18, issueDate="2026-11-20T00:00:00Z"
        ),
    )
    for items in ({"a": older, "b": newer}, {"a": newer, "b": older}):
        loaded = load(items)
        assert not loaded.refused
        assert loaded.collateral.tcb_infos[FMSPC].tcb_evaluation_data_number == 18
        assert loaded.high_water["qe-identity/evaluation"] == 18


def test_platforms_share_what_is_not_theirs(vendor: Intel) -> None:
    other = vendor.collateral(tcb_info=vendor.tcb_info(fmspc=FMSPC_2.hex()), number=2)
    loaded = load({"a": vendor.collateral(), "b": other})
    assert not loaded.refused
    assert set(loaded.collateral.tcb_infos) == {FMSPC, FMSPC_2}


@pytest.mark.parametrize(
    ("older", "lost"),
    [
        ({"tcb_info": {"tcbEvaluationDataNumber": 16}}, "tcb_infos"),
        ({"tcb_info": {"issueDate": "2026-11-17T00:00:00Z"}}, "tcb_infos"),
        ({"qe_identity": {"tcbEvaluationDataNumber": 16}}, "qe_identity"),
        ({"qe_identity": {"issueDate": "2026-11-17T00:00:00Z"}}, "qe_identity"),
    ],
)
def test_an_older_document_is_refused_ever_after(
    vendor: Intel, older: dict[str, dict[str, object]], lost: str
) -> None:
    first = load({"a": vendor.collateral()})
    documents = {name: getattr(vendor, name)(**changes) for name, changes in older.items()}
    again = load({"b": vendor.collateral(**documents)}, high_water=first.high_water)
    assert refusals(again) == [("b", "rolled_back")]
    assert not getattr(again.collateral, lost)
    assert again.high_water == first.high_water


@pytest.mark.parametrize("changes", [{"number": 4}, {"start": NOW - dt.timedelta(days=366)}])
def test_an_older_list_is_refused_ever_after(genoa: Amd, changes: dict[str, object]) -> None:
    serial = genoa.ask.certificate.serial_number
    first = load({"a": der(genoa.ark.revoke(serial, number=5))})
    again = load(
        {"b": der(genoa.ark.revoke(**{"number": 5} | changes))}, high_water=first.high_water
    )
    assert refusals(again) == [("b", "rolled_back")]
    assert not again.collateral.revocation_lists
    assert again.high_water == first.high_water


def test_the_same_and_newer_are_taken_again(vendor: Intel) -> None:
    first = load({"a": vendor.collateral(number=5)})
    same = load({"a": vendor.collateral(number=5)}, high_water=first.high_water)
    newer = load({"a": vendor.collateral(number=6)}, high_water=same.high_water)
    assert not same.refused
    assert not newer.refused
    assert same.high_water == first.high_water != newer.high_water
    assert END > NOW


def test_vendor_roots_are_the_ones_that_are_known() -> None:
    """Compares SHA-256 of the certificates with values pinned by others."""
    roots = vendor_roots()
    found = {
        name: certificate.fingerprint(hashes.SHA256()).hex()
        for name, certificate in {**roots.amd, "intel": roots.intel, "nvidia": roots.nvidia}.items()
    }
    assert found == {
        "Milan": "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd",
        "Genoa": "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1",
        "Turin": "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a",
        "intel": "44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3",
        "nvidia": "102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48",
    }
    for certificate in (*roots.amd.values(), roots.intel, roots.nvidia):
        certificate.verify_directly_issued_by(certificate)
