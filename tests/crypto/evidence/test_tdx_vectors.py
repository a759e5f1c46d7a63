"""Real TDX quotes with Intel's collateral, each at the time its README names."""

import datetime as dt
import json

import pytest

from sealane.crypto.evidence import tdx, tdx_quote
from sealane.crypto.evidence.chain import parse_certificates, verify_chain
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.collateral import vendor_roots
from sealane.crypto.evidence.collateral_loader import Loaded, load_collateral
from sealane.errors import VerificationError
from vendors.vectors import Committed, utc, vector

IN_2025 = "2025-06-20T12:00"
IN_2026 = "2026-02-19T12:00"


def load(collateral: str, now: str, loaded_at: str | None = None) -> Loaded:
    return load_collateral(
        {"bundle": vector(f"tdx/{collateral}/collateral.json")},
        roots=vendor_roots(),
        high_water={},
        now=utc(loaded_at or now),
    )


def verify(
    name: str,
    collateral: str,
    now: str,
    *,
    evidence: bytes | None = None,
    loaded_at: str | None = None,
) -> Claims:
    evidence = evidence or vector(f"tdx/{name}/quote.bin")
    body = evidence[54:] if evidence[0] == 5 else evidence[48:]
    return tdx.verify(
        evidence,
        binding=Committed(report_data=body[0x208:0x248]),
        collateral=load(collateral, now, loaded_at).collateral,
        now=utc(now),
    )


def fault(*arguments: str, **options: object) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(*arguments, **options)
    return caught.value.reason.removeprefix("attestation.tdx.")


@pytest.mark.parametrize("now", ["2025-06-19T10:32:27", IN_2025, "2025-07-19T10:00:34"])
def test_v4_is_up_to_date_within_its_window(now: str) -> None:
    claims = verify("v4-uptodate", "v4-uptodate", now)
    assert (claims.tcb_status, claims.advisories) == ("UpToDate", ())
    assert claims.properties == {"quote_version": 4}
    assert claims.hardware_id == "ppid:811dca2a26b952e85bb6448b097ba4fd"
    assert {n: claims.flags[n] for n in tdx.SAFE_FLAGS} == dict(tdx.SAFE_FLAGS)
    assert claims.valid_until == utc("2025-07-19T10:00:35")


@pytest.mark.parametrize("now", ["2025-06-19T10:00", "2025-07-19T10:00:36"])
def test_v4_is_refused_outside_its_window(now: str) -> None:
    assert fault("v4-uptodate", "v4-uptodate", now, loaded_at=IN_2025) == "collateral_expired"


@pytest.mark.parametrize("now", ["2025-06-19T10:00", "2025-07-19T10:40", "2026-04-04T00:00"])
def test_collateral_is_not_loaded_outside_its_window(now: str) -> None:
    ((_, error), *_) = load("v4-uptodate", now).refused
    assert error.reason in {
        "attestation.collateral.expired",
        "attestation.collateral.collateral_expired",
    }


def test_v5_is_up_to_date() -> None:
    claims = verify("v5-google", "v5-no-tcb-level", IN_2026)
    assert (claims.tcb_status, claims.properties) == ("UpToDate", {"quote_version": 5})
    assert claims.measurements["fmspc"] == bytes.fromhex("90c06f000000")


def test_a_platform_below_every_level_is_refused() -> None:
    assert fault("v5-no-tcb-level", "v5-no-tcb-level", IN_2026) == "tcb_level"


def test_debug_is_refused() -> None:
    assert fault("v4-debug", "v4-uptodate", IN_2025) == "debug"


def test_sept_ve_off_and_bytes_that_follow_are_refused() -> None:
    evidence = vector("tdx/v4-sept-ve-off/quote.bin")
    assert fault("v4-sept-ve-off", "v4-uptodate", IN_2025) == "malformed"
    assert len(evidence) - 39 > 0
    cut = evidence[:-39]
    assert fault("v4-sept-ve-off", "v4-uptodate", IN_2025, evidence=cut) == "sept_ve"


def test_sgx_is_another_tee() -> None:
    assert fault("sgx-v3-config-and-hardening", "v4-uptodate", IN_2025) == "tee_type"
    ((_, error),) = load("sgx-v3-config-and-hardening", IN_2025).refused
    assert error.reason == "attestation.collateral.malformed"


@pytest.mark.parametrize(
    ("name", "collateral", "now"),
    [
        ("v4-uptodate", "v5-no-tcb-level", IN_2026),
        ("v5-google", "v4-uptodate", IN_2025),
        ("v5-no-tcb-level", "v4-uptodate", IN_2025),
    ],
)
def test_another_platforms_collateral_is_refused(name: str, collateral: str, now: str) -> None:
    assert fault(name, collateral, now) in {"collateral_missing", "expired"}


@pytest.mark.parametrize(
    "name", ["v4-uptodate", "v4-debug", "v4-sept-ve-off", "v5-google", "v5-no-tcb-level"]
)
def test_every_chain_ends_at_intels_root(name: str) -> None:
    evidence = vector(f"tdx/{name}/quote.bin")
    if name == "v4-sept-ve-off":
        evidence = evidence[:-39]
    quote = tdx_quote.parse_quote(evidence)
    chain = parse_certificates(quote.certificates, kind="tdx")
    root = vendor_roots().intel
    assert chain[-1] == root
    now = chain[0].not_valid_before_utc + dt.timedelta(days=1)
    verify_chain(chain[:-1], root=root, revocation_lists={}, kind="tdx", now=now)


def test_a_newline_of_the_chain_may_change_and_the_identity_stays() -> None:
    good = vector("tdx/v4-uptodate/quote.bin")
    # Byte 2000 in the README is a newline within the PEM, which isn't signed.
    changed = bytearray(good)
    assert changed[2000] == ord("\n")
    changed[2000] = ord("\r")
    claims = verify("v4-uptodate", "v4-uptodate", IN_2025, evidence=bytes(changed))
    assert claims == verify("v4-uptodate", "v4-uptodate", IN_2025)
    first, second = (tdx_quote.parse_quote(each) for each in (good, bytes(changed)))
    assert first.signed == second.signed


def test_no_cut_or_flip_changes_what_is_said() -> None:
    good = vector("tdx/v4-uptodate/quote.bin")
    loaded = load("v4-uptodate", IN_2025).collateral
    binding = Committed(report_data=good[568:632])
    said = tdx.verify(good, binding=binding, collateral=loaded, now=utc(IN_2025))
    end = len(good) - 70
    cuts = [good[:length] for length in range(0, end, 17)]
    flips = [
        good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(0, end, 5)
    ]
    for changed in cuts + flips:
        try:
            again = tdx.verify(changed, binding=binding, collateral=loaded, now=utc(IN_2025))
        except VerificationError:
            continue
        assert again == said


def test_older_collateral_of_a_platform_is_refused_after_newer() -> None:
    """The second TCB information of the same FMSPC is 17 days older."""
    newer = load("v5-no-tcb-level", IN_2026)
    bundle = json.loads(vector("tdx/v5-no-tcb-level/collateral.json"))
    response = vector("tdx/v5-google/tcb_info_response.json").decode()
    body = response[response.index("{", 1) : response.rindex(',"signature"')]
    bundle["tcb_info"] = body
    bundle["tcb_info_signature"] = json.loads(response)["signature"]
    older = {"older": json.dumps(bundle).encode()}
    options = {"roots": vendor_roots(), "now": utc(IN_2026)}
    alone = load_collateral(older, high_water={}, **options)
    assert not alone.refused
    after = load_collateral(older, high_water=newer.high_water, **options)
    ((name, error),) = after.refused
    assert (name, error.reason) == ("older", "attestation.collateral.rolled_back")
    assert not after.collateral.tcb_infos


def test_the_quote_beside_azures_virtual_tpm_lets_the_host_inject_exceptions() -> None:
    evidence = vector("tpm/az-tdx-vtpm/td-quote.bin")
    assert fault("az", "v4-uptodate", IN_2025, evidence=evidence) == "sept_ve"
