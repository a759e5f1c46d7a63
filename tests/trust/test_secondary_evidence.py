"""Enrolment with a device, from the command that queries it to the broker's verdict.

Machine and device come from synthetic vendors whose roots the verifier trusts. The rest is the
product: enrolment over TLS, the command as a process, verifiers, policy, appraisal.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from brokers import MemoryAudit, authorities_of, unchanged_authorities
from sealane.cli import machine as ctl_machine
from sealane.cli.output import Output
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.attestation.verifier import Verifier
from sealane.crypto.certificates import Subject, spiffe_id
from sealane.crypto.evidence.chain import key_sha256
from sealane.crypto.evidence.kinds import Trusted, verifiers
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import verifier as verifier_module
from sealane.daemon.broker.policy import parse_policy
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.servicer import AttestationServicer
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.verifier import Clocks, VerifierService
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node import enrolment as enrolment_module
from sealane.daemon.node.enrolment import Enrolment, key_digest
from sealane.daemon.node.evidence.choose import open_sources
from sealane.daemon.node.evidence.tsm import TsmDriver
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.node.kept_anchors import KeptAnchors
from sealane.daemon.runtime.authorizers import TlsOnly
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import bind_tcp, new_server, running
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.v1 import attestation_pb2_grpc
from trust.confidential import known, policy
from trust.verifiers import NoBooks
from vendors.amd import amd
from vendors.authority import NOW
from vendors.nvidia import Nvidia, gpu_command, nvidia
from vendors.tsm import ImitationTree


def machine(root: Path) -> TsmDriver:
    """Return the driver of the synthetic machine."""
    tree = ImitationTree(
        root / "tsm",
        "sev_guest",
        sign=lambda data: amd("Genoa").report(report_data=data),
        table=amd("Genoa").table(),
    )
    return TsmDriver(tree)


def devices(*commands: list[str]) -> list[dict[str, Any]]:
    """Return `enrolment.secondary` for devices queried by these commands."""
    return [
        {"label": f"gpu{i}", "type": "nvidia", "command": command, "timeout_seconds": 30}
        for i, command in enumerate(commands)
    ]


@dataclass
class Site:
    """A broker that requires a GPU with a confidential machine, and such a machine."""

    root: Path
    audit: MemoryAudit
    verifier: Verifier
    config: dict[str, Any]

    async def enrol(self, *commands: list[str]) -> Issued:
        """Attest as a gateway whose devices are queried by these commands."""
        config = EnrolmentConfig.model_validate({**self.config, "secondary": devices(*commands)})
        node = Enrolment(
            config,
            node="n",
            role="gateway",
            driver=machine(self.root),
            kept=KeptAnchors.open(config, self.root),
            sources=open_sources(config),
        )
        return await node.obtain(Keys.create())

    async def refusal(self, *commands: list[str]) -> str:
        """Expect a refusal; return its reason, which only the audit log contains."""
        with pytest.raises(VerificationError) as caught:
            await self.enrol(*commands)
        assert caught.value.reason == "attestation.refused"
        return str(self.audit.records[-1]["reason"])


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    # The synthetic vendors' certificates are valid at a fixed time.
    monkeypatch.setattr(verifier_module, "utc_now", lambda: NOW)
    (tmp_path / "tsm").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteStore(tmp_path / "broker.sqlite")
        registry = await Registry.open(store, WrappingKey(bytes(32)), node="b")
        stack.push_async_callback(registry.close)
        authority, collateral = registry.authority, known()
        verifier = Verifier(
            policy=parse_policy(policy("snp", secondary='["nvidia"]').encode(), source="policy"),
            evidence_verifiers=verifiers(Trusted(collateral=lambda: collateral)),
            audience=spiffe_id("b", "broker"),
            verifier_key_sha256=key_digest(authority.certificate),
        )
        audit = MemoryAudit()
        service = VerifierService(
            verifier,
            books=NoBooks(),
            authorities=authorities_of(authority),
            refresh=unchanged_authorities,
            broker="b",
            audit=audit,
            clocks=Clocks(registry),
            metrics=Metrics(),
        )
        stack.callback(service.close)

        async def issue(keys: Keys) -> Issued:
            subject = Subject(
                node="b",
                role="broker",
                tenant="",
                incarnation=keys.incarnation,
                kem_public_key=keys.kem_public,
            )
            return Issued(leaf=authority.issue(subject, keys.tls.public_key(), now=utc_now()))

        identity = Identity(
            node="b",
            role="broker",
            anchors=TrustAnchors(authority.certificate),
            obtain=issue,
            metrics=Metrics(),
        )
        await identity.renew()
        server = new_server(Metrics(), TlsOnly())
        servicer = AttestationServicer(service)
        attestation_pb2_grpc.add_AttestationServicer_to_server(servicer, server)
        credentials = identity.server_credentials(mutual=False)
        address = bind_tcp(server, "127.0.0.1:0", credentials, key="test")
        await stack.enter_async_context(running(server))
        anchor = tmp_path / "anchor.pem"
        anchor.write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
        config = {
            "broker_node": "b",
            "broker_address": "unused:1",
            "attestation_address": address,
            "trust_anchor": str(anchor),
            "evidence": "tsm",
        }
        yield Site(tmp_path, audit, verifier, config)


def saying(path: Path) -> list[str]:
    """Return a command that replays an answer, whatever the nonce."""
    return [sys.executable, "-c", f"print(open({str(path)!r}).read())"]


async def test_node_with_its_device_enrols(site: Site) -> None:
    issued = await site.enrol(gpu_command(site.root))
    assert issued.leaf.not_valid_after_utc > NOW


async def test_node_without_the_device_is_refused(site: Site) -> None:
    assert await site.refusal() == "attestation.secondary.missing"


async def test_answer_to_an_earlier_challenge_is_refused(site: Site) -> None:
    said = site.root / "said"
    (site.root / "record").write_text(
        "import subprocess, sys\n"
        f"said = subprocess.run([*{gpu_command(site.root)!r}, sys.argv[1]], check=True, "
        "capture_output=True, text=True).stdout\n"
        f"open({str(said)!r}, 'w').write(said)\nprint(said)\n"
    )
    await site.enrol([sys.executable, str(site.root / "record")])
    assert await site.refusal(saying(said)) == "attestation.nvidia.nonce"


async def test_device_of_another_machine_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is genuine, but not listed for this machine."""
    other = Nvidia()
    other.root, other.identity, other.provisioner = (
        nvidia().root,
        nvidia().identity,
        nvidia().provisioner,
    )
    other.device = other.provisioner.issue(
        "GH100 A01 GSP BROM", other.device.key, is_authority=True
    )
    other.key = other.endorse()
    assert key_sha256(other.device.certificate) != key_sha256(nvidia().device.certificate)
    monkeypatch.setattr("vendors.nvidia.nvidia", lambda: other)
    assert await site.refusal(gpu_command(site.root)) == "attestation.device.not_paired"


async def test_device_that_the_runtime_data_do_not_name_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a relay had replaced our device's answer by another's."""
    digests = enrolment_module.secondary_digests
    monkeypatch.setattr(
        enrolment_module,
        "secondary_digests",
        lambda items: tuple(bytes(32) for _ in digests(items)),
    )
    assert await site.refusal(gpu_command(site.root)) == "attestation.evidence.unbound"


async def test_device_that_can_not_be_asked_ends_the_attempt_with_its_reason(site: Site) -> None:
    with pytest.raises(UnavailableError) as caught:
        await site.enrol([sys.executable, "-c", "raise SystemExit('the driver is not loaded')"])
    assert caught.value.reason == "evidence.secondary.failed"
    assert "the driver is not loaded" in str(caught.value)


async def test_device_that_the_policy_does_not_want_is_not_asked(site: Site) -> None:
    without = policy("snp").partition('[[reference]]\nname = "gpu"')[0]
    site.verifier.policy = parse_policy(without.encode(), source="policy")
    asked = site.root / "asked"
    await site.enrol([sys.executable, "-c", f"open({str(asked)!r}, 'w')"])
    assert not asked.exists()


async def test_a_device_that_the_policy_only_knows_is_attested_if_it_can_be(site: Site) -> None:
    site.verifier.policy = parse_policy(policy("snp").encode(), source="policy")
    assert [*(await site.enrol(gpu_command(site.root))).devices] == ["gpu0"]
    # The driver is not loaded.
    issued = await site.enrol([sys.executable, "-c", "raise SystemExit(1)"])
    assert issued.leaf.not_valid_after_utc > NOW
    assert issued.devices == {}


async def test_a_node_is_attested_without_a_device_that_is_refused(site: Site) -> None:
    strict = policy("snp").replace("feature_flag = [0]", "feature_flag = [7]")
    site.verifier.policy = parse_policy(strict.encode(), source="policy")
    issued = await site.enrol(gpu_command(site.root))
    assert issued.leaf.not_valid_after_utc > NOW
    assert issued.devices == {}
    assert "attestation.property" in str([record["reason"] for record in site.audit.records])


async def test_what_a_machine_says_of_itself_and_its_device_is_a_policy_that_lets_both_in(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = gpu_command(site.root)
    path = site.root / "sealaned.toml"
    values = {**site.config, "trust_anchor": str(site.root / "anchor.pem")}
    lines = ['[node]\nname = "n"', '[gateway]\ntarget_node = "s"\ntarget_address = "unused:1"']
    lines += ["[enrolment]", *(f'{name} = "{value}"' for name, value in values.items())]
    lines += ["[[enrolment.secondary]]", 'label = "gpu0"', 'type = "nvidia"']
    lines.append(f"command = {json.dumps(command)}")
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(ctl_machine, "open_driver", lambda *_, **__: machine(site.root))
    monkeypatch.setattr(ctl_machine, "collateral_of", lambda *_: known())
    monkeypatch.setattr(ctl_machine, "utc_now", lambda: NOW)
    options = argparse.Namespace(
        file=path,
        node="n",
        role=["gateway"],
        tenant="t",
        collateral=None,
        tpm_roots=None,
        card_roots=None,
    )
    await asyncio.to_thread(ctl_machine.attest_machine, options, Output("table"))
    said = capsys.readouterr().out
    assert 'secondary = ["nvidia"]' in said
    site.verifier.policy = parse_policy(f"version = 1\n{said}".encode(), source="policy")
    await site.enrol(command)
    assert await site.refusal() == "attestation.secondary.missing"
