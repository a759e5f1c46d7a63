"""`sealanectl attest machine`: this machine's evidence as entries for a policy.

Runs challenge, evidence and verification locally, with the driver of a daemon's configuration. The
entries describe the machine as it is *now*: before you put them into a policy, make sure that this
is the state you want.
"""

import argparse
import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509

from sealane.cli.attest import collateral_of
from sealane.cli.output import Output
from sealane.cli.verbs import offline
from sealane.crypto.attestation.runtime_data import NONCE_BYTES, RuntimeData
from sealane.crypto.evidence.claims import Claims, device_nonce
from sealane.crypto.evidence.cmw import secondary_digests
from sealane.crypto.evidence.kinds import Trusted, verifiers
from sealane.crypto.evidence.tpm2 import TPM2
from sealane.crypto.evidence.verifier import NOT_INTRODUCED, EvidenceVerifier
from sealane.crypto.roles import NODE_ROLES
from sealane.daemon.config import load_config
from sealane.daemon.node.evidence.choose import open_driver, open_sources
from sealane.daemon.node.evidence.driver import Driver, SecondarySource
from sealane.daemon.node.evidence.secondary import collect_all
from sealane.daemon.runtime.certificate_files import read_certificates
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.third_party_evidence import load_verifier
from sealane.errors import UsageError


def attest_machine(options: argparse.Namespace, output: Output) -> None:
    """Print `[[hardware]]` and `[[reference]]` for this machine."""
    config = load_config(options.file)
    if config.enrolment is None or config.enrolment.evidence == "software":
        raise UsageError(
            "attestation.machine.none",
            f"{options.file}: enrolment.evidence: gives no evidence of the machine; allowed: "
            "tpm2, tsm",
        )
    driver, sources = (
        open_driver(config.enrolment, tcti=config.tpm.tcti),
        open_sources(config.enrolment),
    )
    try:
        known = collateral_of(options.collateral, utc_now())
        trusted = Trusted(
            collateral=lambda: known,
            tpm_roots=_roots(options.tpm_roots, "--tpm-roots"),
            card_roots=_roots(options.card_roots, "--card-roots"),
        )
        by_type = {v.evidence_type: v for v in verifiers(trusted)}
        if driver.evidence_type not in by_type:
            by_type[driver.evidence_type] = load_verifier(driver.evidence_type)
        claims, devices = asyncio.run(
            _claims(driver, sources, by_type, node=options.node, role=options.role[0])
        )
    finally:
        driver.close()
    roles = sorted(set(options.role))
    lines = [
        *_hardware_entry(claims, devices, node=options.node, roles=roles, tenant=options.tenant)
    ]
    types = sorted({device.evidence_type for device in devices.values()})
    safe = {name: verifier.safe_flags for name, verifier in by_type.items()}
    lines += _reference_entry(claims, safe, name=options.node, secondary=types, roles=roles)
    for label, device in devices.items():
        name = f"{options.node}-{label}"
        lines += ["", *_reference_entry(device, safe, name=name, secondary=[], roles=roles)]
    text = "\n".join(lines)
    if output.is_data:
        output.show_one({"hardware_id": claims.hardware_id, "policy": text})
    else:
        print(text)


async def _claims(
    driver: Driver,
    sources: Sequence[SecondarySource],
    verifiers: Mapping[str, EvidenceVerifier],
    *,
    node: str,
    role: str,
) -> tuple[Claims, dict[str, Claims]]:
    """Collect and verify evidence of the machine and its devices; nothing is sent elsewhere."""
    now = utc_now()
    verifier = verifiers[driver.evidence_type]
    introduced = verifier.introduce(await driver.introduction(), now=now)
    endorsements = await driver.endorsements()
    kem = await driver.create_kem_key()
    nonce = secrets.token_bytes(NONCE_BYTES)
    items = await collect_all(
        sources, device_nonce(nonce=nonce, tls_public_key=b"", kem_public_key=kem.public_key)
    )
    data = RuntimeData(
        nonce=nonce,
        audience="sealanectl",
        node=node,
        role=role,
        incarnation=bytes(16),
        tls_public_key=b"",
        kem_public_key=kem.public_key,
        verifier_key_sha256=bytes(32),
        evidence_type=driver.evidence_type,
        kem_algorithm=kem.algorithm,
        secondary_evidence_sha256=secondary_digests(items),
    )
    evidence = await driver.collect(data, activation=introduced.activation)
    claims = verifier.verify(
        evidence,
        binding=data.binding(),
        introduced=introduced,
        endorsements=b"" if endorsements is None else endorsements.value,
        now=now,
    )
    by_type = {source.label: source.evidence_type for source in sources}
    devices = {
        label: verifiers[by_type[label]].verify(
            item.value,
            binding=data.binding(),
            introduced=NOT_INTRODUCED,
            endorsements=b"",
            now=now,
        )
        for label, item in items.items()
    }
    return claims, devices


def _hardware_entry(
    claims: Claims, devices: Mapping[str, Claims], *, node: str, roles: Sequence[str], tenant: str
) -> Iterator[str]:
    """Yield TOML that names the machine and its devices."""
    yield "[[hardware]]"
    yield f'id = "{claims.hardware_id}"'
    yield f'nodes = ["{node}"]'
    yield f"roles = {json.dumps(roles)}"
    yield f'tenant = "{tenant}"'
    if devices:
        yield f"devices = {json.dumps(sorted({d.hardware_id for d in devices.values()}))}"
    yield ""


def _reference_entry(
    claims: Claims,
    safe_flags: Mapping[str, Mapping[str, bool]],
    *,
    name: str,
    secondary: Sequence[str],
    roles: Sequence[str],
) -> Iterator[str]:
    """Yield TOML that allows exactly `claims`; `safe_flags` are by type of evidence."""
    unsafe = {
        flag: claims.flags[flag]
        for flag, safe in safe_flags[claims.evidence_type].items()
        if claims.flags.get(flag, safe) != safe
    }
    yield "[[reference]]"
    yield f'name = "{name}"'
    yield f'evidence = "{claims.evidence_type}"'
    yield f'product = "{claims.product}"'
    yield f"roles = {json.dumps(roles)}"
    yield f"tcb = {_table(claims.tcb)}"
    yield f"tcb_statuses = {json.dumps([claims.tcb_status] if claims.tcb_status else [])}"
    yield f"advisories = {json.dumps(list(claims.advisories))}"
    yield f"properties = {_table({each: [value] for each, value in claims.properties.items()})}"
    if unsafe:
        yield "# Not safe: fix these, or keep this line to allow them:"
    yield f"flags = {_table(unsafe)}"
    yield f"certified_keys = {json.dumps(sorted(claims.certified_keys))}"
    yield f"secondary = {json.dumps(secondary)}"
    # A TPM machine's host can read its memory: its tier is `warning` at best.
    yield f'accepted_tier = "{"warning" if claims.evidence_type == TPM2 else "affirming"}"'
    yield "[reference.measurements]"
    for measurement, digest in sorted(claims.measurements.items()):
        yield f'{measurement} = ["{digest.hex()}"]'


def _table(values: Mapping[str, object]) -> str:
    # JSON's booleans, integers and arrays are TOML's.
    pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in sorted(values.items()))
    return f"{{ {pairs} }}" if pairs else "{}"


def _roots(path: Path | None, option: str) -> tuple[x509.Certificate, ...]:
    return () if path is None else tuple(read_certificates(str(path), option))


def add_verbs(verbs: Any) -> None:
    """Add `attest machine` to sealanectl's parser."""
    made = offline(
        verbs,
        "machine",
        attest_machine,
        "print this machine's entries for a policy",
        file="configuration of the node's daemon",
    )
    made.add_argument("--node", required=True, help="name of the node")
    made.add_argument(
        "--role",
        required=True,
        action="append",
        choices=tuple(map(str, NODE_ROLES)),
        help="role of the node; repeat the option for several roles",
    )
    made.add_argument("--tenant", required=True, help="tenant whose volumes it may use")
    made.add_argument(
        "--collateral", type=Path, metavar="DIRECTORY", help="as broker.collateral_dir"
    )
    made.add_argument("--tpm-roots", type=Path, metavar="FILE", help="as broker.tpm_roots")
    made.add_argument("--card-roots", type=Path, metavar="FILE", help="as broker.card_roots")
