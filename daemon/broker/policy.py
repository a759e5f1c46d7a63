"""The verifier's policy document: TOML, strict like the configuration, signed by its owners.

`sealane.crypto.attestation.policy` defines its meaning, attestation.md describes each field. A
missing field is an error, or refuses the nodes that would need it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from sealane.crypto.attestation.ar4si import Tier
from sealane.crypto.attestation.policy import (
    Hardware,
    Policy,
    Position,
    ReferenceValues,
    software_reference,
)
from sealane.crypto.evidence.software import HARDWARE_SCHEME, SOFTWARE
from sealane.crypto.roles import Role
from sealane.daemon.broker.owners import SIGNATURE_SUFFIX
from sealane.daemon.runtime.config_types import NodeName, Section
from sealane.daemon.runtime.files import read_bounded
from sealane.daemon.runtime.sections import parse_toml
from sealane.errors import UsageError

# Limit of the store, because one record holds the document. Some 400 machines.
POLICY_BYTES_MAX: Final = 128 << 10

_HEX: Final = frozenset("0123456789abcdef")
_ITEMS_MAX: Final = 4096

NodeRole = Literal[Role.TARGET, Role.GATEWAY, Role.FABRIC]


def _fingerprint(value: str) -> str:
    scheme, _, digest = value.partition(":")
    if scheme != "sha256" or len(digest) != 64 or set(digest) - _HEX:
        raise ValueError("sha256: and 64 hexadecimal digits, lower case")
    return value


def _hardware_id(value: str) -> str:
    scheme, _, identity = value.partition(":")
    if not scheme or not identity or len(identity) % 2 or set(identity) - _HEX or len(value) > 300:
        raise ValueError("a scheme, a colon and hexadecimal digits, lower case")
    return value


def _digest(value: str) -> str:
    if not value or len(value) % 2 or set(value) - _HEX or len(value) > 128:
        raise ValueError("2 to 128 hexadecimal digits, lower case")
    return value


def _number(value: int) -> int:
    if not 0 <= value < 1 << 64:
        raise ValueError("0…18446744073709551615")
    return value


def _name(value: str) -> str:
    if not 1 <= len(value) <= 128 or not value.isascii() or not value.isprintable():
        raise ValueError("1…128 printable ASCII characters")
    return value


Digest = Annotated[str, AfterValidator(_digest)]
HardwareId = Annotated[str, AfterValidator(_hardware_id)]
Name = Annotated[str, AfterValidator(_name)]
Roles = Annotated[list[NodeRole], Field(min_length=1)]
Nodes = Annotated[list[NodeName], Field(min_length=1)]
Number = Annotated[int, AfterValidator(_number)]


class _Key(Section):
    fingerprint: Annotated[str, AfterValidator(_fingerprint)]
    nodes: Nodes
    roles: Roles
    tenant: NodeName
    devices: Annotated[list[HardwareId], Field(default_factory=list)]


class _Software(Section):
    allowed: bool = False
    key: Annotated[list[_Key], Field(default_factory=list, max_length=_ITEMS_MAX)]


class _Hardware(Section):
    id: HardwareId
    nodes: Nodes
    roles: Roles
    tenant: NodeName
    devices: Annotated[list[HardwareId], Field(default_factory=list)]


class _Reference(Section):
    name: Name
    evidence: Name
    product: Name
    roles: Roles
    measurements: dict[Name, list[Digest] | Literal["any", "events"]]
    events: Annotated[dict[Name, list[Digest]], Field(default_factory=dict)]
    tcb: dict[Name, Number]
    tcb_statuses: list[Name]
    advisories: list[Name]
    properties: dict[Name, list[Number]]
    flags: Annotated[dict[Name, bool], Field(default_factory=dict)]
    certified_keys: list[Literal["kem", "tls"]]
    secondary: list[Name]
    accepted_tier: Literal["affirming", "warning"]


class _PolicyDocument(Section):
    version: Annotated[int, Field(ge=1, le=(1 << 53) - 1)]
    software: _Software | None = None
    hardware: Annotated[list[_Hardware], Field(default_factory=list, max_length=_ITEMS_MAX)]
    reference: Annotated[list[_Reference], Field(default_factory=list, max_length=_ITEMS_MAX)]


def parse_policy(document: bytes, *, source: str) -> Policy:
    """Parse a document; UsageError `config.…`, one line about the first error."""
    if len(document) > POLICY_BYTES_MAX:
        raise UsageError(
            "config.size", f"{source}: {len(document)} bytes; allowed: {POLICY_BYTES_MAX}"
        )
    parsed = parse_toml(_PolicyDocument, document, source=source)
    software = parsed.software or _Software(key=[])
    machines = [
        *(_hardware(entry) for entry in parsed.hardware),
        *(_software_key(key) for key in software.key),
    ]
    references = [_reference(entry) for entry in parsed.reference]
    if software.allowed:
        references.append(software_reference(frozenset(r for k in software.key for r in k.roles)))
    _refuse_twice((m.hardware_id for m in machines), "hardware id", source)
    _refuse_twice((r.name for r in references), "reference name", source)
    if any(r.evidence == SOFTWARE for r in parsed.reference):
        raise UsageError(
            "config.value",
            f"{source}: reference.evidence: found {SOFTWARE!r}; allowed: software.allowed",
        )
    return Policy(
        version=parsed.version,
        digest=hashlib.sha256(document).digest(),
        hardware={m.hardware_id: m for m in machines},
        references=tuple(references),
    )


def read_document(path: Path) -> bytes:
    """Read a policy or its signature without parsing it; UsageError `config.unreadable`."""
    try:
        return read_bounded(path)
    except OSError as error:
        raise UsageError("config.unreadable", f"{path}: {error.strerror}") from error


def read_signature(path: Path) -> bytes:
    """Read the file of signatures beside the document at `path`; empty if there is none."""
    beside = path.with_name(path.name + SIGNATURE_SUFFIX)
    return read_document(beside) if beside.exists() else b""


def cautions(policy: Policy, *, safe_flags: Mapping[str, Mapping[str, bool]]) -> list[str]:
    """Return what a security engineer should double-check, one line each."""
    found = []
    if policy.software_allowed:
        found.append("software evidence is allowed: it says nothing about a machine")
    for reference in policy.references:
        if reference.evidence_type == SOFTWARE:
            continue
        safe = safe_flags.get(reference.evidence_type, {})
        found += [
            f"reference {reference.name!r} allows {name} = {str(value).lower()}"
            for name, value in sorted(reference.flags.items())
            if name in safe and safe[name] != value
        ]
        found += [
            f"reference {reference.name!r} accepts any {name}"
            for name, accepted in sorted(reference.measurements.items())
            if accepted is Position.ANY
        ]
        if reference.product == "Milan":
            found.append(
                f"reference {reference.name!r} is for Milan, whose keys have been extracted: "
                "security there rests on who has physical access to the machines"
            )
        if reference.accepted_tier is Tier.WARNING:
            found.append(
                f"reference {reference.name!r} accepts attestation results of tier warning"
            )
    roles = {role for machine in policy.hardware.values() for role in machine.roles}
    served = {role for reference in policy.references for role in reference.roles}
    found += [
        f"no reference values for role {role}: no {role} can enrol"
        for role in sorted(roles - served)
    ]
    return found


def _hardware(entry: _Hardware) -> Hardware:
    return Hardware(
        hardware_id=entry.id,
        nodes=frozenset(entry.nodes),
        roles=frozenset(entry.roles),
        tenant=entry.tenant,
        devices=frozenset(entry.devices),
    )


def _software_key(key: _Key) -> Hardware:
    return Hardware(
        hardware_id=f"{HARDWARE_SCHEME}:{key.fingerprint.partition(':')[2]}",
        nodes=frozenset(key.nodes),
        roles=frozenset(key.roles),
        tenant=key.tenant,
        devices=frozenset(key.devices),
    )


def _reference(entry: _Reference) -> ReferenceValues:
    return ReferenceValues(
        name=entry.name,
        evidence_type=entry.evidence,
        product=entry.product,
        roles=frozenset(entry.roles),
        measurements={
            name: Position(accepted) if isinstance(accepted, str) else _digests(accepted)
            for name, accepted in entry.measurements.items()
        },
        events={name: _digests(digests) for name, digests in entry.events.items()},
        tcb=dict(entry.tcb),
        tcb_statuses=frozenset(entry.tcb_statuses),
        advisories=frozenset(entry.advisories),
        properties={name: frozenset(accepted) for name, accepted in entry.properties.items()},
        flags=dict(entry.flags),
        certified_keys=frozenset(entry.certified_keys),
        secondary=frozenset(entry.secondary),
        accepted_tier=Tier[entry.accepted_tier.upper()],
    )


def _digests(values: Iterable[str]) -> frozenset[bytes]:
    return frozenset(bytes.fromhex(value) for value in values)


def _refuse_twice(names: Iterable[str], what: str, source: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError("config.value", f"{source}: {what} {twice[0]!r} appears twice")
