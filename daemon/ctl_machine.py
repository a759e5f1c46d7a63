"""`sealanectl attest machine`: what this machine's evidence says, as entries for a policy.

Runs challenge, evidence and verification here, with the driver of a daemon's configuration. What
comes out is what the machine says of itself *now*: who puts it into a policy has looked at it and
knows that the machine is in the state it shall be in.
"""

import argparse
import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cryptography import x509

from sealane.crypto.attestation.runtime_data import NONCE_BYTES, RuntimeData
from sealane.crypto.certificates import ROLES
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.tpm2 import TPM2
from sealane.crypto.evidence.verifier import EvidenceVerifier
from sealane.daemon.broker.assembly import evidence_verifiers, tpm_roots_of
from sealane.daemon.clock import utc_now
from sealane.daemon.config import load_config
from sealane.daemon.ctl_attest import collateral_of
from sealane.daemon.ctl_output import Output
from sealane.daemon.ctl_verbs import offline
from sealane.daemon.evidence.choose import open_driver
from sealane.daemon.evidence.driver import Driver
from sealane.errors import UsageError


def attest_machine(options: argparse.Namespace, output: Output) -> None:
    """Print `[[hardware]]` and `[[reference]]` for this machine; JSON has the claims' names."""
    config = load_config(options.file)
    if config.enrolment is None or config.enrolment.evidence == "software":
        raise UsageError(
            "attestation.machine.none",
            f"{options.file}: enrolment.evidence: no evidence of a machine; allowed: tpm2, tsm",
        )
    driver = open_driver(config.enrolment, tcti=config.tpm.tcti)
    try:
        known = collateral_of(options.collateral, utc_now())
        verifiers = evidence_verifiers(lambda: known, tpm_roots=_roots(options.tpm_roots))
        verifier = next(v for v in verifiers if v.evidence_type == driver.evidence_type)
        claims = asyncio.run(_claims(driver, verifier, node=options.node, role=options.role))
    finally:
        driver.close()
    lines = policy_entries(
        claims, verifier, node=options.node, role=options.role, tenant=options.tenant
    )
    text = "\n".join(lines)
    if output.form == "json":
        output.show_one({"hardware_id": claims.hardware_id, "policy": text})
    else:
        print(text)


async def _claims(driver: Driver, verifier: EvidenceVerifier, *, node: str, role: str) -> Claims:
    """Let the driver answer a challenge of ours. Its evidence goes nowhere."""
    now = utc_now()
    introduced = verifier.introduce(await driver.introduction(), now=now)
    endorsements = await driver.endorsements()
    kem = await driver.create_kem_key()
    data = RuntimeData(
        nonce=secrets.token_bytes(NONCE_BYTES),
        audience="sealanectl",
        node=node,
        role=role,
        incarnation=bytes(16),
        tls_public_key=b"",
        kem_public_key=kem.public_key,
        verifier_key_sha256=bytes(32),
        evidence_type=driver.evidence_type,
        kem_algorithm=kem.algorithm,
    )
    evidence = await driver.collect(data, activation=introduced.activation)
    return verifier.verify(
        evidence,
        binding=data.binding(),
        introduced=introduced,
        endorsements=endorsements,
        now=now,
    )


def policy_entries(
    claims: Claims, verifier: EvidenceVerifier, *, node: str, role: str, tenant: str
) -> Iterator[str]:
    """Yield TOML that allows exactly what `claims` say."""
    unsafe = {
        name: claims.flags[name]
        for name, safe in verifier.safe_flags.items()
        if claims.flags.get(name, safe) != safe
    }
    yield "[[hardware]]"
    yield f'id = "{claims.hardware_id}"'
    yield f'nodes = ["{node}"]'
    yield f'roles = ["{role}"]'
    yield f'tenant = "{tenant}"'
    yield ""
    yield "[[reference]]"
    yield f'name = "{node}"'
    yield f'evidence = "{claims.evidence_type}"'
    yield f'product = "{claims.product}"'
    yield f'roles = ["{role}"]'
    yield f"tcb = {_table(claims.tcb)}"
    yield f"tcb_statuses = {json.dumps([claims.tcb_status] if claims.tcb_status else [])}"
    yield f"advisories = {json.dumps(list(claims.advisories))}"
    yield f"properties = {_table({name: [value] for name, value in claims.properties.items()})}"
    if unsafe:
        yield "# Not safe, and so to be allowed by name or mended:"
    yield f"flags = {_table(unsafe)}"
    yield f"certified_keys = {json.dumps(sorted(claims.certified_keys))}"
    yield "secondary = []"
    # A TPM machine's memory is open to its host: no more than a warning can be had.
    yield f'accepted_tier = "{"warning" if claims.evidence_type == TPM2 else "affirming"}"'
    yield "[reference.measurements]"
    for name, digest in sorted(claims.measurements.items()):
        yield f'{name} = ["{digest.hex()}"]'


def _table(values: Mapping[str, object]) -> str:
    # JSON's booleans, integers and arrays are TOML's.
    pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in sorted(values.items()))
    return f"{{ {pairs} }}" if pairs else "{}"


def _roots(path: Path | None) -> tuple[x509.Certificate, ...]:
    return () if path is None else tuple(tpm_roots_of(str(path), "--tpm-roots"))


def add_verbs(verbs: Any) -> None:
    """Add `attest machine` to sealanectl's parser."""
    made = offline(verbs, "machine", attest_machine, "print this machine's entries for a policy")
    made.add_argument("--node", required=True, help="who it is to be")
    made.add_argument("--role", required=True, choices=ROLES[1:], help="in which role")
    made.add_argument("--tenant", required=True, help="whose volumes it may use")
    made.add_argument("--collateral", type=Path, metavar="DIRECTORY")
    made.add_argument("--tpm-roots", type=Path, metavar="FILE", help="as broker.tpm_roots")
