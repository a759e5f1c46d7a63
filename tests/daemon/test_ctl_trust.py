"""sealanectl attest, policy and audit: what an engineer sees, and the exit codes."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane import Site, daemon, sealanectl, short_directory, wait_for_log
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.cmw import PRIMARY, Item, encode_collection
from sealane.crypto.evidence.software import MEDIA_TYPE, SoftwareKey

POLICY = """version = {version}
[software]
allowed = true
[[software.key]]
fingerprint = "{fingerprint}"
nodes = ["g1"]
roles = ["gateway"]
tenant = "t"
"""
KEY = SoftwareKey.create()


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        yield Site(root)


def evidence(directory: Path) -> tuple[Path, Path]:
    data = RuntimeData(
        nonce=bytes(32),
        audience="a",
        node="g1",
        role="gateway",
        incarnation=bytes(16),
        tls_public_key=b"t",
        kem_public_key=bytes(32),
        verifier_key_sha256=bytes(32),
        evidence_type="software",
    )
    item = Item(MEDIA_TYPE, KEY.evidence(data.binding()))
    (directory / "data").write_bytes(data.encode())
    (directory / "evidence").write_bytes(encode_collection({PRIMARY: item}))
    return directory / "evidence", directory / "data"


def test_evidence_is_shown_verified_and_judged(tmp_path: Path) -> None:
    file, data = evidence(tmp_path)
    shown = sealanectl("--output", "json", "attest", "show", file)
    assert json.loads(shown.stdout)[0]["media type"] == MEDIA_TYPE
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(version=1, fingerprint=KEY.fingerprint))
    verify = ("attest", "verify", file, "--runtime-data", data)
    claims = sealanectl(*verify)
    assert (claims.returncode, claims.stderr) == (0, "")
    assert "key-sha256:" in claims.stdout
    judged = (*verify, "--policy", policy, "--role", "gateway", "--node")
    accepted = sealanectl("--output", "json", *judged, "g1")
    assert accepted.returncode == 0
    assert json.loads(accepted.stdout)["verdict"] == "accepted"
    refused = sealanectl(*judged, "g2")
    assert refused.returncode == 3
    assert refused.stderr.endswith("[attestation.node.refused]\n")
    assert "decided by  primary: hardware.node" in refused.stdout
    (tmp_path / "data").write_bytes(data.read_bytes()[:-1] + b" ")
    spoiled = sealanectl(*verify)
    assert spoiled.returncode == 3
    assert spoiled.stderr.endswith("[attestation.software.signature]\n")
    unknown = sealanectl(*verify, "--type", "sample")
    assert unknown.returncode == 2


def test_policy_is_signed_and_checked(tmp_path: Path) -> None:
    owner = Ed25519PrivateKey.generate()
    key, public, policy = (tmp_path / name for name in ("owner", "owner.pub", "policy.toml"))
    key.write_bytes(
        owner.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    key.chmod(0o600)
    public.write_bytes(
        owner.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    policy.write_text(POLICY.format(version=1, fingerprint=KEY.fingerprint))
    check = ("policy", "check", policy, "--owner-key", public)
    assert sealanectl(*check).returncode == 3
    assert sealanectl("policy", "sign", policy, "--key", key).returncode == 0
    checked = sealanectl(*check)
    assert checked.returncode == 0
    assert "caution: software evidence is allowed" in checked.stdout
    policy.write_text(POLICY.format(version=2, fingerprint=KEY.fingerprint))
    assert sealanectl(*check).stderr.endswith("[policy.signature]\n")


def test_operator_applies_a_policy_and_exports_the_log(site: Site) -> None:
    site.write_policy({})
    policy = site.root / "next.toml"
    policy.write_text(POLICY.format(version=7, fingerprint=KEY.fingerprint))
    log, anchor = site.root / "export", site.root / "broker" / "trust-anchor.pem"
    with daemon(site.broker_config()) as broker:
        ctl = ("--socket", broker.socket, "--output", "json")
        difference = json.loads(sealanectl(*ctl, "policy", "diff", policy).stdout)
        assert [(c["change"], c["what"]) for c in difference["changes"]] == [
            ("added", "hardware"),
            ("changed", "reference"),
        ]
        assert json.loads(sealanectl(*ctl, "policy", "apply", policy).stdout)["version"] == 7
        again = sealanectl(*ctl, "policy", "apply", policy)
        assert again.returncode == 2
        assert again.stderr.endswith("[policy.version.used]\n")
        shown = json.loads(sealanectl(*ctl, "policy", "show").stdout)
        assert shown["document"] == policy.read_text()
        head = json.loads(sealanectl(*ctl, "audit", "export", log).stdout)["head"]
    verified = sealanectl("audit", "verify", log, "--anchor", anchor, "--head", head)
    assert (verified.returncode, verified.stderr) == (0, "")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]))
    cut = sealanectl("audit", "verify", log, "--head", head)
    assert cut.returncode == 3
    assert cut.stderr.endswith("[audit.truncated]\n")
    log.write_bytes(b"".join(lines).replace(b'"operator"', b'"somebody"', 1))
    assert sealanectl("audit", "verify", log, "--head", head).returncode == 3


def test_newer_policy_file_is_taken_at_sighup(site: Site) -> None:
    site.write_policy({})
    config = site.broker_config()
    with daemon(config) as broker:
        site.write_policy({})
        broker.process.send_signal(signal.SIGHUP)
        wait_for_log(broker.process, config, "reloaded")
        shown = sealanectl("--socket", broker.socket, "--output", "json", "policy", "show")
        assert json.loads(shown.stdout)["version"] == 2
