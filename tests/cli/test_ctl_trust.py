"""sealanectl attest, policy and audit: output and exit codes."""

import datetime as dt
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane import Site, daemon, sealanectl, short_directory, wait_for_log
from sealane.cli.output import Output
from sealane.cli.result import show_identities
from sealane.client import connect
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.crypto.evidence.cmw import PRIMARY, Item, encode_collection
from sealane.crypto.evidence.software import MEDIA_TYPE, SoftwareKey
from sealane.daemon.runtime.authorizers import RESULT_KEY, VERIFIER_KEY
from sealane.daemon.runtime.clock import utc_now
from sealane.protocol.v1 import nodes_pb2
from trust.results import result_for

pytestmark = pytest.mark.slow

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
        assert sealanectl(*ctl, "audit", "verify", log).returncode == 0
        whole = log.read_bytes()
        log.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
        cut = sealanectl(*ctl, "audit", "verify", log)
        assert (cut.returncode, cut.stderr.endswith("[audit.truncated]\n")) == (3, True)
        assert sealanectl("audit", "verify", log, "--chain-only").returncode == 0
        log.write_bytes(whole)
    # Without the broker, the end of the log is unknown.
    assert sealanectl(*ctl, "audit", "verify", log).returncode == 4
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


async def test_a_node_shows_what_it_shows_to_its_peers(site: Site) -> None:
    site.write_policy({"g": ["gateway"]})
    with daemon(site.broker_config()) as broker:
        config = site.write_config(
            "g",
            site.enrolment("g", broker)
            + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\ntarget_address = "h:1"\n',
        )
        with daemon(config) as gateway:
            show = ("--socket", gateway.socket, "--output", "json", "attest", "show", "self")
            (shown,) = json.loads(sealanectl(*show).stdout)
            table = sealanectl("--socket", gateway.socket, "attest", "show", "self")
            async with connect(gateway.socket) as client:
                (identity,) = (await client.node()).identities
        own = json.loads(
            sealanectl("--socket", broker.socket, *show[2:]).stdout,
        )
    assert shown["SPIFFE id"] == shown["subject"] == "spiffe://sealane/gateway/g"
    assert (shown["tenant"], shown["policy version"]) == ("t", 1)
    assert shown["signature"] == "verified, and for this certificate"
    assert "s left" in shown["certificate until"]
    assert shown["submodules"][0]["vector"]["runtime-opaque"] == 32
    assert table.returncode == 0
    for text in ("gateway/g", "runtime-opaque", "warning", "policy version"):
        assert text in table.stdout
    # The broker's own certificate isn't based on evidence.
    assert (own[0]["role"], own[0]["submodules"]) == ("broker", [])
    file = site.root / "token.jwt"
    file.write_text(f"{identity.token}\n")
    (said,) = json.loads(sealanectl("--output", "json", "attest", "show", file).stdout)
    assert said["signature"].startswith("NOT CHECKED")
    assert said["result"] == shown["result"]
    file.write_text(identity.token[:-40])
    spoiled = sealanectl("attest", "show", file)
    assert spoiled.returncode == 0, "a signature of any length is not looked at"
    file.write_text(identity.token.rpartition(".")[0])
    spoiled = sealanectl("attest", "show", file)
    assert (spoiled.returncode, spoiled.stderr[-18:]) == (3, "[token.malformed]\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": "other"}, "token.holder.mismatch"),
        ({"trust_anchors": "other"}, "certificate.issuer"),
        ({"verifier_certificate": "other"}, "token.signature"),
        ({"late": True}, "certificate.expired"),
    ],
)
def test_an_identity_that_does_not_hold_is_shown_so(
    capsys: pytest.CaptureFixture[str], change: dict[str, object], reason: str
) -> None:
    now = utc_now().replace(microsecond=0)
    authority = CertificateAuthority.create(broker="b", now=now)
    own, other = (_identity(authority, now) for _ in range(2))
    stranger = _identity(CertificateAuthority.create(broker="b", now=now), now)
    if "token" in change:
        own.token = other.token
        own.verifier_certificate = other.verifier_certificate
    if "trust_anchors" in change:
        own.trust_anchors[:] = stranger.trust_anchors
    if "verifier_certificate" in change:
        own.verifier_certificate = other.verifier_certificate
    later = dt.timedelta(minutes=11 if "late" in change else 0)
    show_identities([own], now + later, Output("json"))
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["signature"].startswith("REFUSED")
    assert shown["signature"].endswith(f"[{reason}]")


def _identity(authority: CertificateAuthority, now: dt.datetime) -> nodes_pb2.RoleIdentity:
    subject = Subject(
        node="g", role="gateway", tenant="t", incarnation=bytes(16), kem_public_key=bytes(32)
    )
    leaf = authority.issue(subject, ec.generate_private_key(ec.SECP256R1()).public_key(), now=now)
    metadata = result_for(authority, subject, leaf, now=now)
    der = serialization.Encoding.DER
    return nodes_pb2.RoleIdentity(
        role="gateway",
        certificate=leaf.public_bytes(der),
        token=str(metadata[RESULT_KEY]),
        verifier_certificate=bytes(metadata[VERIFIER_KEY]),  # type: ignore[arg-type]
        trust_anchors=[authority.certificate.public_bytes(der)],
    )
