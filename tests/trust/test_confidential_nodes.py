"""Nodes in confidential machines, from driver to certificate subject, with synthetic hardware.

The driver reads an emulated configfs-tsm, whose reports are signed by a synthetic AMD or Intel.
Verifiers, policy and appraisal are the broker's own.
"""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealane.crypto.attestation.challenge import Challenge
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.attestation.verifier import Verified, Verifier
from sealane.crypto.evidence.cmw import (
    COLLATERAL,
    PRIMARY,
    Item,
    encode_collection,
    secondary_digests,
)
from sealane.crypto.evidence.kinds import Trusted, verifiers
from sealane.crypto.evidence.media_types import NVIDIA_EVIDENCE, SNP_CERTIFICATES
from sealane.crypto.evidence.nvidia import encode_evidence
from sealane.daemon.broker.policy import parse_policy
from sealane.daemon.node.evidence.tsm import TsmDriver
from sealane.errors import VerificationError
from trust.confidential import known, policy
from vendors.amd import amd
from vendors.authority import NOW, p256
from vendors.intel import intel
from vendors.nvidia import nvidia
from vendors.tsm import ImitationTree

AUDIENCE, KEY_SHA256 = "spiffe://sealane/broker/b", bytes(range(32))
SECONDS = 10**9


class Node:
    """A node and its verifier."""

    def __init__(self, root: Path, evidence_type: str) -> None:
        root.mkdir(exist_ok=True)
        self.type = evidence_type
        vendor, provider, table = (
            (amd("Genoa"), "sev_guest", amd("Genoa").table())
            if evidence_type == "snp"
            else (intel(), "tdx_guest", b"")
        )
        make = getattr(vendor, "report" if evidence_type == "snp" else "quote")
        self.driver = TsmDriver(
            ImitationTree(root, provider, sign=lambda data: make(report_data=data), table=table)
        )
        collateral = known()
        self.verifier = Verifier(
            policy=parse_policy(policy(evidence_type).encode(), source="policy"),
            evidence_verifiers=verifiers(Trusted(collateral=lambda: collateral)),
            audience=AUDIENCE,
            verifier_key_sha256=KEY_SHA256,
        )
        public = p256().public_key()
        self.tls_key = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def challenge(self) -> Challenge:
        asked = {"node": "n", "role": "gateway"}
        introduced = self.verifier.prepare(
            **asked, evidence_types=[self.type], introduction=b"", now=NOW
        )
        opened = self.verifier.open(
            **asked, evidence_type=self.type, peer="a", introduced=introduced, now_ns=0
        )
        return self.verifier.take(opened.session_id, now_ns=SECONDS)

    def answer(
        self,
        challenge: Challenge,
        *,
        gpu: bool = False,
        collateral: Item | None = None,
        **changes: object,
    ) -> tuple[RuntimeData, dict[str, Item]]:
        """Return runtime data and evidence, made as in enrolment."""
        endorsements = collateral or asyncio.run(self.driver.endorsements())
        items = {COLLATERAL: endorsements} if endorsements else {}
        data = RuntimeData(
            **{
                "nonce": challenge.nonce,
                "audience": AUDIENCE,
                "node": "n",
                "role": "gateway",
                "incarnation": bytes(16),
                "tls_public_key": self.tls_key,
                "kem_public_key": bytes(range(32)),
                "verifier_key_sha256": KEY_SHA256,
                "evidence_type": self.type,
            }
            | changes
        )
        if gpu:
            report = nvidia().report(nonce=data.binding().device_nonce)
            items["gpu0"] = Item(NVIDIA_EVIDENCE, encode_evidence(report, nvidia().chain()))
        data = dataclasses.replace(data, secondary_evidence_sha256=secondary_digests(items))
        evidence = asyncio.run(self.driver.collect(data, activation=b""))
        return data, items | {PRIMARY: Item(self.driver.media_type, evidence)}

    def verify(self, challenge: Challenge, data: RuntimeData, items: dict[str, Item]) -> Verified:
        return self.verifier.verify(
            challenge, runtime_data=data.encode(), evidence=encode_collection(items), now=NOW
        )


@pytest.fixture(params=["snp", "tdx"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    return Node(tmp_path / "report", request.param)


@pytest.fixture
def snp_node(tmp_path: Path) -> Node:
    return Node(tmp_path / "report", "snp")


def refused(reason: str, node: Node, *arguments: object) -> None:
    with pytest.raises(VerificationError) as caught:
        node.verify(*arguments).subject()
    assert caught.value.reason == reason


def test_a_confidential_machine_becomes_a_node(node: Node) -> None:
    challenge = node.challenge()
    verified = node.verify(challenge, *node.answer(challenge))
    assert verified.subject().tenant == "t"
    assert verified.appraisal.items[PRIMARY].claims.evidence_type == node.type


def test_evidence_of_one_session_is_none_in_another(node: Node) -> None:
    data, items = node.answer(node.challenge())
    other = node.challenge()
    refused("attestation.nonce.mismatch", node, other, data, items)
    mended = dataclasses.replace(data, nonce=other.nonce)
    refused(f"attestation.{node.type}.report_data", node, other, mended, items)


@pytest.mark.parametrize("name", ["tls_public_key", "kem_public_key", "incarnation"])
def test_keys_that_were_not_attested_are_refused(node: Node, name: str) -> None:
    challenge = node.challenge()
    data, items = node.answer(challenge)
    stranger = p256().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    value = stranger if name == "tls_public_key" else bytes([7]) * len(getattr(data, name))
    swapped = dataclasses.replace(data, **{name: value})
    refused(f"attestation.{node.type}.report_data", node, challenge, swapped, items)


def test_another_table_than_was_named_is_refused(snp_node: Node) -> None:
    challenge = snp_node.challenge()
    data, items = snp_node.answer(challenge)
    items[COLLATERAL] = Item(SNP_CERTIFICATES, items[COLLATERAL].value + b"\0")
    refused("attestation.evidence.unbound", snp_node, challenge, data, items)


@pytest.mark.parametrize(
    ("evidence_type", "media_type"), [("snp", NVIDIA_EVIDENCE), ("tdx", SNP_CERTIFICATES)]
)
def test_endorsements_of_another_media_type_are_refused(
    evidence_type: str, media_type: str, tmp_path: Path
) -> None:
    """Each type accepts only its own; a TDX quote contains its chain and accepts none."""
    node = Node(tmp_path / "report", evidence_type)
    challenge = node.challenge()
    data, items = node.answer(challenge, collateral=Item(media_type, b"table"))
    refused("attestation.evidence.type", node, challenge, data, items)


def test_a_gpu_speaks_beside_its_node(snp_node: Node) -> None:
    challenge = snp_node.challenge()
    verified = snp_node.verify(challenge, *snp_node.answer(challenge, gpu=True))
    assert verified.subject().node == "n"
    assert verified.appraisal.items["gpu0"].claims.product == "GH100"


def test_a_gpus_answer_to_somebody_else_is_refused(snp_node: Node) -> None:
    """Another node's GPU signs any nonce that its host supplies, but our nonce covers our keys."""
    challenge = snp_node.challenge()
    theirs, their_items = snp_node.answer(challenge, gpu=True, kem_public_key=bytes(32))
    items = {"gpu0": their_items["gpu0"], COLLATERAL: their_items[COLLATERAL]}
    data, ours = snp_node.answer(challenge)
    data = dataclasses.replace(data, secondary_evidence_sha256=secondary_digests(items))
    evidence = asyncio.run(snp_node.driver.collect(data, activation=b""))
    items[PRIMARY] = Item(ours[PRIMARY].media_type, evidence)
    refused("attestation.nvidia.nonce", snp_node, challenge, data, items)
    assert theirs.kem_public_key != data.kem_public_key


def test_a_gpu_is_no_node(snp_node: Node) -> None:
    challenge = snp_node.challenge()
    data, items = snp_node.answer(challenge, gpu=True)
    items[PRIMARY] = items["gpu0"]
    refused("attestation.evidence.type", snp_node, challenge, data, items)
