"""The verifier's policy file: TOML, strict like the configuration (docs/attestation.md)."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from sealane.crypto.attestation.policy import AllowedKey, Policy
from sealane.daemon.config import load_section
from sealane.daemon.config_types import NodeName, Section
from sealane.errors import UsageError


def _fingerprint(value: str) -> str:
    scheme, _, digest = value.partition(":")
    if scheme != "sha256" or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError("sha256: and 64 hexadecimal digits, lower case")
    return value


class _Key(Section):
    fingerprint: Annotated[str, AfterValidator(_fingerprint)]
    nodes: Annotated[list[NodeName], Field(min_length=1)]
    roles: Annotated[list[Literal["target", "gateway", "fabric"]], Field(min_length=1)]
    tenant: NodeName


class _Software(Section):
    allowed: bool = False
    key: Annotated[list[_Key], Field(default_factory=list)]


class _PolicyFile(Section):
    software: _Software


def load_policy(path: Path) -> Policy:
    """Read `path`; UsageError `config.…` with one line at the first thing that is wrong."""
    parsed = load_section(_PolicyFile, path).software
    keys = tuple(
        AllowedKey(fingerprint=k.fingerprint, nodes=k.nodes, roles=k.roles, tenant=k.tenant)
        for k in parsed.key
    )
    if len({k.fingerprint for k in keys}) != len(keys):
        raise UsageError("config.value", f"{path}: software.key: one fingerprint stands twice")
    return Policy(software_allowed=parsed.allowed, keys=keys)
