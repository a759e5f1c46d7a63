"""Appraisal: each rule can refuse; anything not in the policy is refused; vetoes and tiers."""

import dataclasses
import datetime as dt

import pytest

from sealane.crypto.attestation.appraisal import Appraisal, PolicyViolationError, appraise
from sealane.crypto.attestation.ar4si import CLAIMS, Tier, tier_of, worst
from sealane.crypto.attestation.policy import Hardware, Policy, Position, ReferenceValues
from sealane.crypto.evidence.claims import Claims, Memory

END = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
GOOD = bytes(48)
EVENT = bytes(32)
SAFE = {"snp": {"debug": False, "migrate_ma": False}}

NODE = Claims(
    evidence_type="snp",
    memory=Memory.ENCRYPTED,
    hardware_id="chip-id:01",
    product="Genoa",
    measurements={"measurement": GOOD, "host_data": bytes(32), "log": b"\1"},
    events={"log": (EVENT,)},
    tcb={"bootloader": 9, "microcode": 70},
    flags={"debug": False, "migrate_ma": False, "smt_allowed": True},
    properties={"report_version": 5, "vmpl": 0},
    tcb_status="UpToDate",
    certified_keys=frozenset({"kem"}),
    valid_until=END,
)
GPU = Claims(
    evidence_type="nvidia",
    hardware_id="key-sha256:02",
    product="GH100",
    measurements={"block_1": GOOD},
    tcb={},
    flags={},
    valid_until=END,
)
FOR_NODES = ReferenceValues(
    name="node",
    evidence_type="snp",
    product="Genoa",
    roles=frozenset({"gateway"}),
    measurements={
        "measurement": frozenset({GOOD}),
        "host_data": Position.ANY,
        "log": Position.EVENTS,
    },
    events={"log": frozenset({EVENT})},
    tcb={"bootloader": 9, "microcode": 70},
    tcb_statuses=frozenset({"UpToDate", "SWHardeningNeeded"}),
    advisories=frozenset({"SA-1"}),
    properties={"report_version": frozenset({3, 4, 5}), "vmpl": frozenset({0})},
    flags={},
    certified_keys=frozenset({"kem"}),
    secondary=frozenset({"nvidia"}),
    accepted_tier=Tier.AFFIRMING,
)
FOR_GPUS = ReferenceValues(
    name="gpu",
    evidence_type="nvidia",
    product="GH100",
    roles=frozenset({"gateway"}),
    measurements={"block_1": frozenset({GOOD})},
    events={},
    tcb={},
    tcb_statuses=frozenset(),
    advisories=frozenset(),
    properties={},
    flags={},
    certified_keys=frozenset(),
    secondary=frozenset(),
    accepted_tier=Tier.AFFIRMING,
)
MACHINE = Hardware(
    hardware_id="chip-id:01",
    nodes=frozenset({"g"}),
    roles=frozenset({"gateway"}),
    tenant="t",
    devices=frozenset({"key-sha256:02"}),
)


def policy(*references: ReferenceValues, machine: Hardware = MACHINE) -> Policy:
    return Policy(
        version=1,
        hardware={machine.hardware_id: machine},
        references=references or (FOR_NODES, FOR_GPUS),
    )


def result(
    node: Claims = NODE,
    gpu: Claims | None = GPU,
    *,
    by: Policy | None = None,
    name: str = "g",
    role: str = "gateway",
) -> Appraisal:
    claims = {"primary": node} if gpu is None else {"primary": node, "gpu0": gpu}
    return appraise(claims, policy=by or policy(), node=name, role=role, safe_flags=SAFE)


def reason(appraisal: Appraisal) -> str:
    with pytest.raises(PolicyViolationError) as caught:
        appraisal.require()
    assert not appraisal.is_accepted
    return caught.value.reason


def changed(claims: Claims, **fields: object) -> Claims:
    return dataclasses.replace(claims, **fields)  # type: ignore[arg-type]


def test_what_the_policy_names_is_accepted_and_affirmed() -> None:
    appraisal = result()
    assert appraisal.require() == MACHINE
    assert appraisal.status is Tier.AFFIRMING
    assert appraisal.items["primary"].vector == {
        "instance-identity": 2,
        "configuration": 2,
        "executables": 3,
        "hardware": 2,
        "runtime-opaque": 2,
    }


@pytest.mark.parametrize(
    ("change", "expected", "claim", "value"),
    [
        (
            {"hardware_id": "chip-id:ff"},
            "attestation.hardware.not_listed",
            "instance-identity",
            97,
        ),
        ({"product": "Milan"}, "attestation.product.refused", "hardware", 97),
        ({"evidence_type": "tdx"}, "attestation.type.refused", "hardware", 97),
        (
            {"flags": {**NODE.flags, "debug": True}},
            "attestation.debug.refused",
            "runtime-opaque",
            96,
        ),
        ({"flags": {"debug": False}}, "attestation.flag.refused", "configuration", 96),
        (
            {"flags": {**NODE.flags, "migrate_ma": True}},
            "attestation.flag.refused",
            "configuration",
            96,
        ),
        (
            {"tcb": {"bootloader": 8, "microcode": 70}},
            "attestation.tcb.below_minimum",
            "hardware",
            96,
        ),
        (
            {"tcb": {"bootloader": 9, "microcode": 69}},
            "attestation.tcb.below_minimum",
            "hardware",
            96,
        ),
        ({"tcb": {"microcode": 70}}, "attestation.tcb.below_minimum", "hardware", 96),
        ({"tcb": {**NODE.tcb, "fmc": 3}}, "attestation.policy.silent", "hardware", 96),
        ({"tcb_status": "OutOfDate"}, "attestation.tcb.status_refused", "hardware", 96),
        ({"tcb_status": ""}, "attestation.tcb.status_refused", "hardware", 96),
        ({"advisories": ("SA-2",)}, "attestation.advisory.refused", "hardware", 96),
        (
            {"measurements": {**NODE.measurements, "measurement": b"\1" + GOOD[1:]}},
            "attestation.measurement.unknown",
            "executables",
            33,
        ),
        (
            {"measurements": {"host_data": b"", "log": b""}},
            "attestation.measurement.unknown",
            "executables",
            33,
        ),
        (
            {"measurements": {**NODE.measurements, "rtmr9": b""}},
            "attestation.policy.silent",
            "executables",
            33,
        ),
        (
            {"events": {"log": (EVENT, b"\1")}},
            "attestation.measurement.unknown",
            "executables",
            33,
        ),
        ({"events": {}}, "attestation.measurement.unknown", "executables", 33),
        (
            {"properties": {"report_version": 2, "vmpl": 0}},
            "attestation.property.refused",
            "configuration",
            96,
        ),
        (
            {"properties": {"report_version": 5, "vmpl": 1}},
            "attestation.property.refused",
            "configuration",
            96,
        ),
        (
            {"properties": {"report_version": 5}},
            "attestation.property.refused",
            "configuration",
            96,
        ),
        (
            {"properties": {**NODE.properties, "more": 1}},
            "attestation.policy.silent",
            "configuration",
            96,
        ),
        ({"certified_keys": frozenset()}, "attestation.key.uncertified", "configuration", 96),
    ],
)
def test_each_claim_is_refused_alone(
    change: dict[str, object], expected: str, claim: str, value: int
) -> None:
    appraisal = result(changed(NODE, **change))
    assert reason(appraisal) == expected
    item = appraisal.items["primary"]
    assert item.vector[claim] == value
    assert item.status is worst(item.vector)
    assert item.status >= Tier.WARNING


def test_every_bit_of_a_measurement_counts() -> None:
    for bit in range(len(GOOD) * 8):
        flipped = bytearray(GOOD)
        flipped[bit // 8] ^= 1 << bit % 8
        measurements = {**NODE.measurements, "measurement": bytes(flipped)}
        assert (
            reason(result(changed(NODE, measurements=measurements)))
            == "attestation.measurement.unknown"
        )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"measurements": {}}, "attestation.policy.silent"),
        (
            {"measurements": {**FOR_NODES.measurements, "measurement": frozenset()}},
            "attestation.measurement.unknown",
        ),
        ({"events": {}}, "attestation.measurement.unknown"),
        ({"tcb": {}}, "attestation.policy.silent"),
        ({"tcb_statuses": frozenset()}, "attestation.tcb.status_refused"),
        ({"properties": {}}, "attestation.policy.silent"),
        ({"roles": frozenset({"target"})}, "attestation.type.refused"),
        ({"product": ""}, "attestation.product.refused"),
    ],
)
def test_field_that_the_policy_leaves_out_refuses(fields: dict[str, object], expected: str) -> None:
    reference = dataclasses.replace(FOR_NODES, **fields)  # type: ignore[arg-type]
    assert reason(result(by=policy(reference, FOR_GPUS))) == expected


def test_empty_policy_refuses() -> None:
    assert reason(result(by=Policy())) == "attestation.hardware.not_listed"


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        ("h", "gateway", "attestation.node.refused"),
        ("g", "target", "attestation.role.refused"),
    ],
)
def test_listed_hardware_is_only_what_it_is_listed_as(name: str, role: str, expected: str) -> None:
    assert reason(result(name=name, role=role)) == expected


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (None, "attestation.secondary.missing"),
        (changed(GPU, hardware_id="key-sha256:ff"), "attestation.device.not_paired"),
        (changed(GPU, measurements={"block_1": b"\1"}), "attestation.measurement.unknown"),
        (changed(GPU, product="GB100"), "attestation.product.refused"),
        (changed(GPU, evidence_type="dpu"), "attestation.secondary.missing"),
    ],
)
def test_devices_can_veto(gpu: Claims | None, expected: str) -> None:
    assert reason(result(gpu=gpu)) == expected


def test_device_that_nobody_asked_for_is_appraised_too() -> None:
    reference = dataclasses.replace(FOR_NODES, secondary=frozenset())
    rules = policy(reference)
    assert result(gpu=None, by=rules).is_accepted
    assert reason(result(by=rules)) == "attestation.type.refused"


def test_explicit_exceptions_are_taken() -> None:
    reference = dataclasses.replace(FOR_NODES, flags={"migrate_ma": True})
    moving = changed(NODE, flags={**NODE.flags, "migrate_ma": True})
    assert result(moving, by=policy(reference, FOR_GPUS)).is_accepted
    assert reason(result(by=policy(reference, FOR_GPUS))) == "attestation.flag.refused"


@pytest.mark.parametrize("change", [{"tcb_status": "SWHardeningNeeded"}, {"advisories": ("SA-1",)}])
def test_known_vulnerability_is_a_warning_that_must_be_accepted(change: dict[str, object]) -> None:
    node = changed(NODE, **change)
    appraisal = result(node)
    assert appraisal.items["primary"].vector["hardware"] == 32
    assert reason(appraisal) == "attestation.tier.refused"
    lenient = dataclasses.replace(FOR_NODES, accepted_tier=Tier.WARNING)
    assert result(node, by=policy(lenient, FOR_GPUS)).is_accepted


def test_memory_that_the_operator_can_read_is_a_warning() -> None:
    node = changed(NODE, evidence_type="tpm2", memory=Memory.ISOLATED)
    reference = dataclasses.replace(FOR_NODES, evidence_type="tpm2")
    appraisal = result(node, by=policy(reference, FOR_GPUS))
    assert appraisal.items["primary"].vector["runtime-opaque"] == 32
    assert reason(appraisal) == "attestation.tier.refused"


def test_one_of_several_reference_values_is_enough() -> None:
    other = dataclasses.replace(
        FOR_NODES, name="old", measurements={**FOR_NODES.measurements, "measurement": frozenset()}
    )
    appraisal = result(by=policy(other, FOR_NODES, FOR_GPUS))
    assert appraisal.items["primary"].reference == "node"
    # Reference values aren't mixed: one can't supply what another lacks.
    strict = dataclasses.replace(FOR_NODES, name="strict", tcb={"bootloader": 10, "microcode": 70})
    assert not result(by=policy(other, strict, FOR_GPUS)).is_accepted


def test_every_rule_is_applied_whatever_failed_before() -> None:
    rules = [f.rule for f in result().findings]
    broken = changed(NODE, hardware_id="chip-id:ff", tcb={**NODE.tcb, "microcode": 0})
    assert [f.rule for f in result(broken, by=policy()).findings] == rules


@pytest.mark.parametrize(
    ("value", "tier"),
    [
        (-128, Tier.CONTRAINDICATED),
        (-97, Tier.CONTRAINDICATED),
        (-96, Tier.WARNING),
        (-33, Tier.WARNING),
        (-32, Tier.AFFIRMING),
        (-2, Tier.AFFIRMING),
        (-1, Tier.NONE),
        (0, Tier.NONE),
        (1, Tier.NONE),
        (2, Tier.AFFIRMING),
        (31, Tier.AFFIRMING),
        (32, Tier.WARNING),
        (95, Tier.WARNING),
        (96, Tier.CONTRAINDICATED),
        (127, Tier.CONTRAINDICATED),
    ],
)
def test_tiers_are_those_of_the_draft(value: int, tier: Tier) -> None:
    assert tier_of(value) is tier
    assert worst({CLAIMS[0]: 2, CLAIMS[1]: value}) is max(tier, Tier.AFFIRMING)


def test_value_that_is_no_int8_has_no_tier() -> None:
    for value in (-129, 128):
        with pytest.raises(ValueError, match="int8"):
            tier_of(value)
