"""The TDX verifier with a synthetic Intel: every check, both parsers, every truncation."""

import datetime as dt
import json
import struct

import dcap_qvl
import pytest

from sealane.crypto.evidence import tdx, tdx_quote
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.collateral import Collateral, VendorRoots, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.errors import VerificationError
from vendors.authority import END, NOW, p256, root
from vendors.intel import (
    FMSPC,
    PCE_SVN,
    PPID,
    SEPT_VE_DISABLE,
    TEE_TCB_SVN,
    Intel,
    Quote,
    intel,
    level,
    tcb,
)

BINDING = Binding(
    runtime_data=b"runtime", nonce=bytes(32), tls_public_key=b"t", kem_public_key=b"k"
)
ORDER_P256 = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@pytest.fixture(scope="module")
def vendor() -> Intel:
    return intel()


def roots(vendor: Intel) -> VendorRoots:
    others = vendor_roots()
    return VendorRoots(amd=others.amd, intel=vendor.root.certificate, nvidia=others.nvidia)


def collateral(vendor: Intel, **options: object) -> Collateral:
    loaded = load_collateral(
        {"bundle": vendor.collateral(**options)}, roots=roots(vendor), high_water={}, now=NOW
    )
    assert not loaded.refused
    return loaded.collateral


def quote(made: Intel, **changes: object) -> bytes:
    return made.quote(**{"report_data": BINDING.report_data} | changes)


def verify(
    vendor: Intel,
    evidence: bytes | None = None,
    *,
    known: Collateral | None = None,
    now: dt.datetime = NOW,
) -> Claims:
    return tdx.verify(
        quote(vendor) if evidence is None else evidence,
        binding=BINDING,
        collateral=known or collateral(vendor),
        now=now,
    )


def refused(fault: str, *arguments: object, **options: object) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(*arguments, **options)
    assert caught.value.reason == f"attestation.tdx.{fault}", caught.value


@pytest.mark.parametrize(("version", "body_type"), [(4, 2), (5, 2), (5, 3)])
def test_a_genuine_quote_gives_its_claims(vendor: Intel, version: int, body_type: int) -> None:
    claims = verify(vendor, quote(vendor, version=version, body_type=body_type))
    assert (claims.evidence_type, claims.product) == ("tdx", "TDX")
    assert claims.hardware_id == f"ppid:{PPID.hex()}"
    assert claims.properties == {"quote_version": version}
    assert claims.measurements["mrtd"] == bytes([0xA1]) * 48
    assert claims.measurements["rtmr2"] == bytes([0xB2]) * 48
    assert claims.measurements["fmspc"] == FMSPC
    assert claims.tcb == {
        "tdx_module": TEE_TCB_SVN[0],
        "pce_svn": PCE_SVN,
        "qe_svn": 6,
        "tcb_evaluation_data_number": 17,
    }
    assert (claims.tcb_status, claims.advisories) == ("UpToDate", ())
    assert {n: claims.flags[n] for n in tdx.SAFE_FLAGS} == dict(tdx.SAFE_FLAGS)


def test_the_runtime_data_is_committed_to(vendor: Intel) -> None:
    for other in (bytes(64), BINDING.report_data[:32] + bytes(32)):
        refused("report_data", vendor, quote(vendor, report_data=other))


@pytest.mark.parametrize(("bit", "flag"), [(30, "pks"), (31, "kl"), (63, "perfmon")])
def test_attributes_become_flags(vendor: Intel, bit: int, flag: str) -> None:
    base = verify(vendor).flags
    changed = verify(vendor, quote(vendor, td_attributes=SEPT_VE_DISABLE | 1 << bit)).flags
    assert {name for name in base if base[name] != changed[name]} == {flag}


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        (SEPT_VE_DISABLE | 1, "debug"),
        (0, "sept_ve"),
        (SEPT_VE_DISABLE | 1 << 29, "service_td"),
        (SEPT_VE_DISABLE | 2, "malformed"),
        (SEPT_VE_DISABLE | 1 << 8, "malformed"),
        (SEPT_VE_DISABLE | 1 << 32, "malformed"),
        (SEPT_VE_DISABLE | 1 << 62, "malformed"),
    ],
)
def test_attributes_that_nobody_accepts_are_refused(
    vendor: Intel, attributes: int, fault: str
) -> None:
    refused(fault, vendor, quote(vendor, td_attributes=attributes))


def test_a_service_td_is_refused(vendor: Intel) -> None:
    refused("service_td", vendor, quote(vendor, mrservicetd=bytes([1]) * 48))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"version": 3, "body_type": 2}, "malformed"),
        ({"version": 6}, "malformed"),
        ({"key_type": 3}, "malformed"),
        ({"vendor": bytes(16)}, "malformed"),
        ({"body_type": 1}, "malformed"),
        ({"body_type": 4}, "malformed"),
        ({"tee_type": 0}, "tee_type"),
        ({"qe_data": bytes(1025)}, "malformed"),
    ],
    ids=str,
)
def test_another_kind_of_quote_is_refused(
    vendor: Intel, changes: dict[str, object], fault: str
) -> None:
    refused(fault, vendor, quote(vendor, **changes))


def test_zeros_may_follow_and_nothing_else(vendor: Intel) -> None:
    good = quote(vendor)
    assert verify(vendor, good + bytes(3065)) == verify(vendor, good)
    assert verify(vendor, good + bytes(tdx_quote.TRAILING_ZEROS_MAX)).product == "TDX"
    refused("malformed", vendor, good + bytes(tdx_quote.TRAILING_ZEROS_MAX + 1))
    refused("malformed", vendor, good + bytes(38) + b"\1")
    refused("malformed", vendor, good + b"\1")


def test_a_quote_cut_anywhere_is_refused(vendor: Intel) -> None:
    good, known = quote(vendor), collateral(vendor)
    for length in range(len(good)):
        with pytest.raises(VerificationError):
            verify(vendor, good[:length], known=known)


def test_both_parsers_agree_on_every_flip(vendor: Intel) -> None:
    good, known = quote(vendor), collateral(vendor)
    signed = len(Quote(report_data=BINDING.report_data).signed())
    accepted = []
    for place in range(0, len(good), 2):
        changed = bytearray(good)
        changed[place] ^= 1 << place % 8
        try:
            claims = verify(vendor, bytes(changed), known=known)
        except VerificationError:
            continue
        # Unsigned bytes may change: the quote's claims stay the same.
        assert place >= signed
        assert claims == verify(vendor, good, known=known)
        accepted.append(place)
    assert len(accepted) < len(good) // 20


def test_the_engine_refuses_whatever_the_parser_refuses(vendor: Intel) -> None:
    """This parser is stricter only about bits and bytes that the engine doesn't read."""
    good = quote(vendor)
    for place in range(0, len(good) - 2000, 3):
        changed = bytearray(good)
        changed[place] ^= 0x80
        try:
            ours = tdx_quote.parse_quote(bytes(changed))
        except VerificationError:
            continue
        theirs = dcap_qvl.parse_quote(bytes(changed))
        assert theirs.header.version == ours.version
        assert bytes(theirs.report.mr_td) == ours.body["mrtd"]
        assert bytes(theirs.report.report_data) == ours.body["report_data"]
        assert bytes(theirs.report.mr_service_td) == ours.body["mrservicetd"]


def test_parsers_that_disagree_are_refused(vendor: Intel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mrtd", "rtmr3", "td_attributes", "mrservicetd", "tee_tcb_svn_2", "report_data"):
        with monkeypatch.context() as patched:
            honest = tdx.parse_quote

            def misread(encoded: bytes, name: str = name, honest=honest) -> tdx_quote.Quote:
                found = honest(encoded)
                found.body[name] = bytes(len(found.body[name]) - 1) + b"\1"
                if name == "td_attributes":
                    found.body[name] = (SEPT_VE_DISABLE | 1 << 30).to_bytes(8, "little")
                if name == "mrservicetd":
                    del found.body[name]
                return found

            patched.setattr(tdx, "parse_quote", misread)
            refused("ambiguous", vendor)


class PanicException(BaseException):
    pass


@pytest.mark.parametrize(
    ("function", "fault"),
    [("parse_pck_extension_from_pem", "certificate"), ("QuoteVerifier", "refused")],
)
def test_a_panic_of_the_engine_is_a_refusal(
    vendor: Intel, function: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Verifier:
        def verify_with_policy(self, *_: object) -> None:
            raise PanicException("index out of bounds")

    def panic(*arguments: object) -> Verifier:
        if function == "QuoteVerifier":
            return Verifier()
        raise PanicException("index out of bounds")

    monkeypatch.setattr(dcap_qvl, function, panic)
    refused(fault, vendor)


def test_an_interrupt_is_none(vendor: Intel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcap_qvl, "parse_pck_extension_from_pem", interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify(vendor)


def test_the_other_ecdsa_signature_of_a_quote_is_the_same_quote(vendor: Intel) -> None:
    good = quote(vendor)
    start = len(Quote().signed()) + 4 + 32
    s = int.from_bytes(good[start : start + 32], "big")
    other = good[:start] + (ORDER_P256 - s).to_bytes(32, "big") + good[start + 32 :]
    assert verify(vendor, other) == verify(vendor, good)
    # A replay key over the whole quote would treat these as two.
    assert tdx_quote.parse_quote(other).signed == tdx_quote.parse_quote(good).signed


def auth_start() -> int:
    return len(Quote().signed()) + 4


@pytest.mark.parametrize(
    ("offset", "fault"),
    [
        (0, "signature"),  # the attestation key's signature
        (64, "quoting_enclave"),  # the attestation key, which the quoting enclave vouches for
        (64 + 64 + 6 + 384, "signature"),  # the PCK's signature
        (64 + 64 + 6 + 384 + 64 + 2, "quoting_enclave"),  # the quoting enclave's data
        (64 + 64 + 6, "signature"),  # the quoting enclave's report
    ],
)
def test_each_signature_is_checked(vendor: Intel, offset: int, fault: str) -> None:
    changed = bytearray(quote(vendor))
    changed[auth_start() + offset] ^= 1
    refused(fault, vendor, bytes(changed))


def test_the_types_of_certification_data_are_fixed(vendor: Intel) -> None:
    outer = auth_start() + 128
    inner = outer + 6 + 384 + 64 + 2 + 32
    for place in (outer, inner):
        changed = bytearray(quote(vendor))
        changed[place] = 7
        refused("malformed", vendor, bytes(changed))


@pytest.mark.parametrize("place", ["auth", "outer", "inner"])
@pytest.mark.parametrize("step", [-1, 1])
def test_lengths_fit_each_other(vendor: Intel, place: str, step: int) -> None:
    start = auth_start()
    at = {
        "auth": start - 4,
        "outer": start + 128 + 2,
        "inner": start + 128 + 6 + 384 + 64 + 2 + 32 + 2,
    }[place]
    changed = bytearray(quote(vendor))
    (length,) = struct.unpack_from("<I", changed, at)
    struct.pack_into("<I", changed, at, length + step)
    refused("malformed", vendor, bytes(changed))


def test_a_chain_longer_than_its_bound_is_refused(vendor: Intel) -> None:
    chain = vendor.pck.pem + vendor.pck_authority.pem + vendor.root.pem + b"\n" * 17000
    refused("malformed", vendor, quote(vendor, chain=chain))


def test_another_root_is_refused(vendor: Intel) -> None:
    refused("chain", vendor, known=Collateral())
    forger = Intel()
    refused("chain", vendor, quote(forger))


def test_a_chain_is_of_three_certificates(vendor: Intel) -> None:
    by_root = vendor.root.issue("Intel SGX PCK Certificate", vendor.pck.key, is_listed=True)
    middle, last = vendor.pck_authority.pem, vendor.root.pem
    refused("chain", vendor, quote(vendor, chain=by_root.pem + last))
    refused("chain", vendor, quote(vendor, chain=vendor.pck.pem + middle))
    refused("chain", vendor, quote(vendor, chain=vendor.pck.pem + middle + middle + last))
    stranger = root("Intel SGX Root CA", p256())
    refused("chain", vendor, quote(vendor, chain=vendor.pck.pem + middle + stranger.pem))


def test_nothing_is_hidden_behind_the_chain(vendor: Intel) -> None:
    for hidden in (b"\0", b"more"):
        refused("malformed", vendor, quote(vendor, hidden=hidden))


def test_a_pck_of_nobody_is_refused(vendor: Intel) -> None:
    stranger = root("Intel SGX PCK Platform CA", p256())
    pck = stranger.issue("Intel SGX PCK Certificate", p256())
    refused("chain", vendor, quote(vendor, pck=pck))


@pytest.mark.parametrize("late", [False, True])
def test_a_pck_is_valid_at_the_time_given(vendor: Intel, late: bool) -> None:
    window = {"end": NOW - dt.timedelta(1)} if late else {"start": NOW + dt.timedelta(1)}
    refused("expired", vendor, quote(vendor, pck=vendor.certify(**window)))


def test_revoked_certificates_are_refused(vendor: Intel) -> None:
    serial = vendor.pck.certificate.serial_number
    refused("revoked", vendor, known=collateral(vendor, pck_revoked=[serial]))
    serial = vendor.pck_authority.certificate.serial_number
    refused("revoked", vendor, known=collateral(vendor, root_revoked=[serial]))


def test_both_revocation_lists_are_needed(vendor: Intel) -> None:
    known = collateral(vendor)
    for name in known.revocation_lists:
        fewer = {k: v for k, v in known.revocation_lists.items() if k != name}
        lacking = Collateral(
            roots=known.roots,
            revocation_lists=fewer,
            tcb_infos=known.tcb_infos,
            qe_identity=known.qe_identity,
        )
        refused("collateral_missing", vendor, known=lacking)


def test_a_pck_without_sgx_extension_is_refused(vendor: Intel) -> None:
    pck = vendor.pck_authority.issue("Intel SGX PCK Certificate", p256(), is_listed=True)
    refused("certificate", vendor, quote(vendor, pck=pck))


def test_another_platforms_collateral_is_refused(vendor: Intel) -> None:
    pck = vendor.certify(fmspc=bytes(6))
    refused("collateral_missing", vendor, quote(vendor, pck=pck))
    other = collateral(vendor, tcb_info=vendor.tcb_info(pceId="0001"))
    refused("collateral_missing", vendor, known=other)


def test_collateral_ends(vendor: Intel) -> None:
    known = collateral(vendor)
    end = NOW + dt.timedelta(days=27)
    assert verify(vendor, known=known, now=end).valid_until == end
    refused("collateral_expired", vendor, known=known, now=end + dt.timedelta(seconds=1))
    early = NOW - dt.timedelta(days=3, seconds=1)
    refused("collateral_expired", vendor, known=known, now=early)
    shorter = vendor.qe_identity(nextUpdate="2026-11-22T00:00:00Z")
    known = collateral(vendor, qe_identity=shorter)
    assert verify(vendor, known=known).valid_until == dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
    refused("collateral_expired", vendor, known=known, now=NOW + dt.timedelta(days=1))
    known = collateral(vendor, list_end=NOW + dt.timedelta(hours=1))
    refused("collateral_expired", vendor, known=known, now=NOW + dt.timedelta(hours=2))
    pck = vendor.certify(end=NOW + dt.timedelta(days=1))
    assert verify(vendor, quote(vendor, pck=pck)).valid_until == NOW + dt.timedelta(days=1)
    assert NOW < END


@pytest.mark.parametrize(
    ("changes", "status", "advisories"),
    [
        ({"tee_tcb_svn": (4, 1, 4, *[0] * 13)}, "OutOfDate", ("INTEL-SA-01397",)),
        ({"qe_svn": 3}, "OutOfDate", ("INTEL-SA-00837",)),
    ],
)
def test_an_older_level_is_told(
    vendor: Intel, changes: dict[str, object], status: str, advisories: tuple[str, ...]
) -> None:
    claims = verify(vendor, quote(vendor, **changes))
    assert (claims.tcb_status, claims.advisories) == (status, advisories)


def test_a_platform_that_needs_hardening_is_told(vendor: Intel) -> None:
    pck = vendor.certify(cpu_svn=(3, 3, 2, 2, 3, 1, 0, 3, *[0] * 8), pce_svn=11)
    claims = verify(vendor, quote(vendor, pck=pck))
    assert (claims.tcb_status, claims.advisories) == ("SWHardeningNeeded", ("INTEL-SA-00615",))
    assert claims.tcb["pce_svn"] == 11


@pytest.mark.parametrize("component", [2])
def test_versions_below_every_level_are_refused(vendor: Intel, component: int) -> None:
    lower = tuple(svn - (i == component) for i, svn in enumerate(TEE_TCB_SVN))
    refused("tcb_level", vendor, quote(vendor, tee_tcb_svn=lower))
    refused("tcb_level", vendor, quote(vendor, pck=vendor.certify(pce_svn=4)))


def test_a_revoked_level_is_refused(vendor: Intel) -> None:
    info = vendor.tcb_info(tcbLevels=[level(tcb(), "Revoked")])
    refused("tcb_level", vendor, known=collateral(vendor, tcb_info=info))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"seam_attributes": bytes([1]) * 8}, "module"),
        ({"mrsignerseam": bytes([1]) * 48}, "module"),
        ({"tee_tcb_svn": (3, 1, 4, *[0] * 13)}, "module"),
        ({"qe_signer": bytes(32)}, "quoting_enclave"),
        ({"qe_svn": 1}, "quoting_enclave"),
        (
            {"qe_attributes": bytes.fromhex("1300000000000000e700000000000000")},
            "quoting_enclave",
        ),
    ],
    ids=str,
)
def test_module_and_quoting_enclave_are_intels(
    vendor: Intel, changes: dict[str, object], fault: str
) -> None:
    refused(fault, vendor, quote(vendor, **changes))


def test_tcb_information_lists_no_name_twice(vendor: Intel) -> None:
    text = json.dumps(vendor.tcb_info()).replace('"version": 3', '"version": 2, "version": 3')
    loaded = load_collateral(
        {"bundle": vendor.collateral(tcb_info=text)},
        roots=roots(vendor),
        high_water={},
        now=NOW,
    )
    ((_, error),) = loaded.refused
    assert error.reason == "attestation.collateral.malformed"
    refused("collateral_missing", vendor, known=loaded.collateral)
