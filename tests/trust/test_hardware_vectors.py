"""Real evidence under a strict policy: the verdict on each set and the rule behind it.

The policy names every claim of the good sets; a bad set fails the rule named in its README.
"""

from collections.abc import Iterator

import pytest

from sealane.crypto.attestation.appraisal import Appraisal, appraise
from sealane.crypto.evidence import nvidia, snp, tdx
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.cmw import PRIMARY
from sealane.crypto.evidence.collateral import Collateral, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.crypto.evidence.snp_report import ASK_GUID, VCEK_GUID, VLEK_GUID
from sealane.daemon.broker.policy import parse_policy
from sealane.errors import VerificationError
from vendors.amd import certificate_table
from vendors.vectors import Committed, utc, vector

SAFE = {"snp": snp.SAFE_FLAGS, "tdx": tdx.SAFE_FLAGS, "nvidia": nvidia.SAFE_FLAGS}
END = b"-----END CERTIFICATE-----\n"


def snp_claims(name: str, *, chain: str = "milan_ask_ark", now: str = "2026-01-01") -> Claims:
    report = vector(f"snp/{name}/report.{'hex' if name == 'milan-v2-vcek' else 'bin'}")
    kind, guid = ("vlek", VLEK_GUID) if name.endswith("vlek") else ("vcek", VCEK_GUID)
    key = vector(f"snp/{name}/{kind}.{'pem' if name.startswith('genoa') else 'der'}")
    signer = vector(f"snp/chains/{chain}.pem").split(END)[0] + END
    return snp.verify(
        report,
        binding=Committed(report_data=report[0x50:0x90]),
        collateral=Collateral(),
        now=utc(now),
        endorsements=certificate_table((guid, key), (ASK_GUID, signer)),
    )


def tdx_claims(name: str, collateral: str, now: str) -> Claims:
    quote = vector(f"tdx/{name}/quote.bin")
    body = quote[54:] if quote[0] == 5 else quote[48:]
    loaded = load_collateral(
        {"bundle": vector(f"tdx/{collateral}/collateral.json")},
        roots=vendor_roots(),
        high_water={},
        now=utc(now),
    )
    return tdx.verify(
        quote,
        binding=Committed(report_data=body[0x208:0x248]),
        collateral=loaded.collateral,
        now=utc(now),
    )


def gpu_claims() -> Claims:
    nonce = "87d8e24ab336adafe228d49e83d745f6dba4ae505372b6a5704820856b343fec"
    return nvidia.verify(
        nvidia.encode_evidence(
            vector("nvidia/hopper-1/report.hex"), vector("nvidia/hopper-1/certs.pem")
        ),
        binding=Committed(device_nonce=bytes.fromhex(nonce)),
        collateral=Collateral(),
        now=utc("2026-11-21"),
    )


def policy_text(claims: Claims, device: Claims | None = None, **changes: str) -> str:
    """Write a policy that requires exactly the machine and values in `claims`.

    The vectors contain no lists by AMD or NVIDIA, so those two may remain unchecked.
    """

    def reference(of: Claims, secondary: str) -> Iterator[str]:
        values = {
            "name": f'"{of.evidence_type}"',
            "evidence": f'"{of.evidence_type}"',
            "product": f'"{of.product}"',
            "roles": '["gateway"]',
            "measurements": _table({n: f'["{v.hex()}"]' for n, v in of.measurements.items()}),
            "tcb": _table({n: str(v) for n, v in of.tcb.items()}),
            "tcb_statuses": '["UpToDate"]' if of.tcb_status else "[]",
            "properties": _table({n: f"[{v}]" for n, v in of.properties.items()}),
            "flags": "{}" if of.evidence_type == "tdx" else "{ revocation_checked = false }",
            "advisories": "[]",
            "certified_keys": "[]",
            "secondary": secondary,
            "accepted_tier": '"affirming"',
        } | (changes if of is claims else {})
        yield "[[reference]]"
        yield from (f"{name} = {value}" for name, value in values.items())

    lines = ["version = 1", "[[hardware]]", f'id = "{claims.hardware_id}"', 'nodes = ["gw-1"]']
    lines += ['roles = ["gateway"]', 'tenant = "t"']
    lines.append(f'devices = ["{device.hardware_id}"]' if device else "devices = []")
    lines += reference(claims, '["nvidia"]' if device else "[]")
    if device is not None:
        lines += reference(device, "[]")
    return "\n".join(lines)


def _table(values: dict[str, str]) -> str:
    return "{ " + ", ".join(f"{name} = {value}" for name, value in values.items()) + " }"


def verdict(claims: Claims, text: str, **devices: Claims) -> Appraisal:
    return appraise(
        {PRIMARY: claims, **devices},
        policy=parse_policy(text.encode(), source="policy"),
        node="gw-1",
        role="gateway",
        safe_flags=SAFE,
    )


def test_genoa_is_accepted() -> None:
    claims = snp_claims("genoa-v3-vcek", chain="genoa_ask_ark")
    assert verdict(claims, policy_text(claims)).is_accepted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"product": '"Turin"'}, "attestation.product.refused"),
        ({"flags": "{}"}, "attestation.flag.refused"),
        ({"properties": "{ report_version = [5], vmpl = [0] }"}, "attestation.property.refused"),
    ],
)
def test_genoa_is_refused_by_a_policy_that_wants_otherwise(
    changes: dict[str, str], reason: str
) -> None:
    claims = snp_claims("genoa-v3-vcek", chain="genoa_ask_ark")
    appraisal = verdict(claims, policy_text(claims, **changes))
    assert appraisal.decided.reason == reason


def test_each_tcb_component_has_its_minimum() -> None:
    claims = snp_claims("genoa-v3-vcek", chain="genoa_ask_ark")
    for component in claims.tcb:
        tcb = _table({n: str(v + (n == component)) for n, v in claims.tcb.items()})
        appraisal = verdict(claims, policy_text(claims, tcb=tcb))
        assert appraisal.decided.reason == "attestation.tcb.below_minimum"
        assert appraisal.decided.rule == f"tcb.{component}"


def test_one_bit_of_any_measurement_decides() -> None:
    claims = snp_claims("genoa-v3-vcek", chain="genoa_ask_ark")
    for name, value in claims.measurements.items():
        flipped = claims.measurements | {name: bytes([value[0] ^ 1]) + value[1:]}
        text = _table({n: f'["{v.hex()}"]' for n, v in flipped.items()})
        appraisal = verdict(claims, policy_text(claims, measurements=text))
        assert (appraisal.decided.reason, appraisal.decided.rule) == (
            "attestation.measurement.unknown",
            f"measurement.{name}",
        )


def test_an_unlisted_chip_is_refused() -> None:
    claims = snp_claims("genoa-v3-vcek", chain="genoa_ask_ark")
    text = policy_text(claims).replace(claims.hardware_id, "chip-id:" + "00" * 64)
    assert verdict(claims, text).decided.reason == "attestation.hardware.not_listed"


def test_version_2_is_refused_where_3_is_required() -> None:
    claims = snp_claims("milan-v2-vcek")
    text = policy_text(claims, properties="{ report_version = [3, 4, 5], vmpl = [0] }")
    rules = {f.rule for f in verdict(claims, text).findings if not f.holds}
    assert rules == {"property.report_version", "flag.alias_check_complete", "tier"}


def test_milan_is_refused_unless_it_is_named() -> None:
    claims = snp_claims("milan-v2-vcek")
    text = policy_text(claims, product='"Genoa"')
    assert verdict(claims, text).decided.reason == "attestation.product.refused"


def test_debug_is_refused() -> None:
    claims = snp_claims("milan-v2-debug")
    failed = {f.reason for f in verdict(claims, policy_text(claims)).findings if not f.holds}
    assert "attestation.debug.refused" in failed


def test_uncommitted_firmware_is_refused_unless_it_is_permitted() -> None:
    claims = snp_claims("milan-v2-uncommitted")
    allowed = "{ revocation_checked = false, alias_check_complete = false }"
    (failed, _) = [
        f for f in verdict(claims, policy_text(claims, flags=allowed)).findings if not f.holds
    ]
    assert failed.rule == "flag.uncommitted"
    allowed = allowed.replace("{ ", "{ uncommitted = true, ")
    assert verdict(claims, policy_text(claims, flags=allowed)).is_accepted


def test_a_vlek_of_another_vmpl_is_refused() -> None:
    claims = snp_claims("milan-v3-vlek", chain="milan_asvk_ark", now="2025-06-01")
    text = policy_text(
        claims,
        properties="{ report_version = [3], vmpl = [0] }",
        flags="{ revocation_checked = false, uncommitted = true }",
    )
    assert verdict(claims, text).decided.rule == "property.vmpl"


@pytest.mark.parametrize(
    ("name", "collateral", "now"),
    [
        ("v4-uptodate", "v4-uptodate", "2025-06-20T12:00"),
        ("v5-google", "v5-no-tcb-level", "2026-02-19T12:00"),
    ],
)
def test_tdx_up_to_date_is_accepted(name: str, collateral: str, now: str) -> None:
    claims = tdx_claims(name, collateral, now)
    assert verdict(claims, policy_text(claims)).is_accepted
    text = policy_text(claims, tcb_statuses="[]")
    assert verdict(claims, text).decided.reason == "attestation.tcb.status_refused"


def test_tdx_below_every_level_gets_no_verdict() -> None:
    with pytest.raises(VerificationError, match=r"attestation\.tdx\.tcb_level"):
        tdx_claims("v5-no-tcb-level", "v5-no-tcb-level", "2026-02-19T12:00")


def test_a_gpu_vetoes() -> None:
    node, gpu = snp_claims("genoa-v3-vcek", chain="genoa_ask_ark"), gpu_claims()
    text = policy_text(node, gpu)
    assert verdict(node, text, gpu0=gpu).is_accepted
    assert verdict(node, text).decided.reason == "attestation.secondary.missing"
    block = gpu.measurements["block_9"].hex()
    assert text.count(f'block_9 = ["{block}"]') == 1
    other = text.replace(f'block_9 = ["{block}"]', f'block_9 = ["{"ab" * 48}"]')
    assert verdict(node, other, gpu0=gpu).decided.rule == "measurement.block_9"
    unpaired = text.replace(gpu.hardware_id, "key-sha256:" + "00" * 32, 1)
    assert verdict(node, unpaired, gpu0=gpu).decided.reason == "attestation.device.not_paired"
