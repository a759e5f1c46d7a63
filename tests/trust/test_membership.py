"""The broker's records of nodes: authorization, revocation and restoration."""

import contextlib
import datetime as dt
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from brokers import Count, start_broker
from sealane.crypto.attestation.ear import AttestationResult, verify_result
from sealane.crypto.audit import Detail, Outcome
from sealane.crypto.certificates import (
    CertificateAuthority,
    Subject,
    verify_authorization,
    verify_verifier,
)
from sealane.daemon.broker.membership import PEERS_PER_CALL_MAX, Membership
from sealane.daemon.broker.records import NodeRecord, ShareRecord, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.stated import Stated
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.node.authorizations import NO_VOLUME, peer_from, peer_of
from sealane.daemon.node.peers import PeerIncarnation, ServedDevice
from sealane.daemon.runtime.authorizers import RESULT_KEY, VERIFIER_KEY
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import trust_pb2
from trust.results import result_for

NONCE = bytes(range(32))
HARDWARE = bytes(range(32))
TARGET = Subject(
    node="s", role="target", tenant="t", incarnation=b"T" * 16, kem_public_key=bytes(32)
)
GATEWAY = replace(TARGET, node="g", role="gateway", incarnation=b"G" * 16)


@dataclass
class Recorder:
    """An audit log in memory."""

    records: list[tuple[str, str, dict[str, Detail]]] = field(default_factory=list)

    async def record(
        self, kind: str, *, subject: str, outcome: Outcome, reason: str = "", **detail: Detail
    ) -> None:
        assert (subject, outcome, reason) == ("operator", "done", "")
        self.records.append((kind, str(detail["role"]), detail))


@dataclass
class World:
    """One registry, the membership of two brokers on it, and a clock."""

    registry: Registry
    audit: Recorder
    now: dt.datetime
    covered: list[int] = field(default_factory=list)
    policy_version: int = 1
    is_overlapping: bool = False
    openings: list[tuple[Subject, uuid.UUID, int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    async def _check_device(
        self, caller: Subject, *, device_id: uuid.UUID, fencing_epoch: int
    ) -> None:
        if (caller, device_id, fencing_epoch) not in self.openings:
            raise VerificationError("device.fenced", "not the newest opening")

    async def _lost(self, spiffe_id: str) -> None:
        self.lost.append(spiffe_id)

    def membership(self) -> Membership:
        return Membership(
            self.registry,
            cover=self._cover,
            check_policy=self._check_policy,
            check_device=self._check_device,
            lost=self._lost,
            audit=self.audit,
            metrics=Metrics(),
            now=lambda: self.now,
        )

    @property
    def authority(self) -> CertificateAuthority:
        return self.registry.authority

    def leaf(self, subject: Subject) -> x509.Certificate:
        key = ec.generate_private_key(ec.SECP256R1()).public_key()
        return self.authority.issue(subject, key, now=self.now)

    async def attest(self, subject: Subject) -> x509.Certificate:
        leaf = self.leaf(subject)
        await self.membership().attested(
            subject,
            leaf,
            policy_version=self.policy_version,
            hardware_sha256=HARDWARE,
            stated=Stated(version="1.2.3", clock_skew_ms=-4, addresses={"x": "192.0.2.1:1"}),
            call_address="192.0.2.7",
        )
        return leaf

    def result(self, subject: Subject, leaf: x509.Certificate) -> AttestationResult:
        """Return the result under the current policy."""
        metadata = result_for(
            self.authority, subject, leaf, now=self.now, policy_version=self.policy_version
        )
        verifier = x509.load_der_x509_certificate(bytes(metadata[VERIFIER_KEY]))  # type: ignore[arg-type]
        key = verify_verifier(verifier, anchor=self.authority.certificate, now=self.now)
        return verify_result(str(metadata[RESULT_KEY]), verifier_key=key)

    async def refusal(self, subject: Subject, *, asker: Subject = TARGET) -> str:
        peer = PeerIncarnation(spiffe_id=subject.spiffe_id, incarnation=subject.incarnation)
        content = await self.membership().authorize(asker, nonce=NONCE, peers=[peer])
        return trust_pb2.Authorization.FromString(content).verdicts[0].refusal

    def wait(self, seconds: float) -> None:
        self.now += dt.timedelta(seconds=seconds)

    def _check_policy(self, version: int, *, now_ns: int) -> bool:
        assert now_ns
        if version < self.policy_version and not self.is_overlapping:
            raise VerificationError("attestation.policy.changed", "attest again")
        return version < self.policy_version

    async def _cover(self, revision: int) -> None:
        self.covered.append(revision)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteStore(tmp_path / "b.sqlite")
        service, _, registry = await start_broker(store, starts=Count(), heads=Count())
        stack.push_async_callback(registry.close)
        stack.push_async_callback(service.close)
        yield World(registry, Recorder(), utc_now().replace(microsecond=0))


async def _reason(error: type[Error], call: object) -> str:
    with pytest.raises(error) as caught:
        await call  # type: ignore[misc]
    return caught.value.reason


async def test_only_the_attested_incarnation_is_authorized(world: World) -> None:
    assert await world.refusal(GATEWAY) == "node.unknown"
    await world.attest(GATEWAY)
    assert await world.refusal(GATEWAY) == ""
    assert await world.refusal(replace(GATEWAY, incarnation=b"X" * 16)) == "node.superseded"
    assert await world.refusal(replace(GATEWAY, node="h")) == "node.unknown"
    world.wait(600)
    assert await world.refusal(GATEWAY) == "node.expired"


async def test_each_role_is_told_about_its_own_peers_and_itself_only(world: World) -> None:
    fabric = replace(GATEWAY, role="fabric")
    for subject in (GATEWAY, TARGET, fabric):
        await world.attest(subject)
    assert await world.refusal(fabric) == "node.unknown"
    other = replace(TARGET, node="s2")
    await world.attest(other)
    assert await world.refusal(other) == "node.unknown"
    assert await world.refusal(TARGET) == ""
    assert await world.refusal(fabric, asker=fabric) == ""
    leaves = world.membership().leaves
    assert await leaves(TARGET.spiffe_id, caller=GATEWAY)
    for asked, caller in ((fabric, GATEWAY), (fabric, TARGET), (TARGET, fabric)):
        assert (
            await _reason(UnavailableError, leaves(asked.spiffe_id, caller=caller))
            == "peer.unattested"
        )


async def test_revoked_node_loses_everything_at_once_at_every_broker(world: World) -> None:
    leaf = await world.attest(GATEWAY)
    here, there = world.membership(), world.membership()
    await there.admit(GATEWAY, leaf, world.result(GATEWAY, leaf))
    await here.revoke("g", "gateway", reason="stolen")
    assert world.covered, "a store that is put back would bring the node back"
    assert world.lost == [GATEWAY.spiffe_id], "volumes whose key it has need another"
    assert await world.refusal(GATEWAY) == "node.revoked"
    assert (
        await _reason(VerificationError, there.admit(GATEWAY, leaf, world.result(GATEWAY, leaf)))
        == "node.revoked"
    )
    assert await _reason(VerificationError, world.attest(GATEWAY)) == "node.revoked"
    again = replace(GATEWAY, incarnation=b"N" * 16)
    assert await _reason(VerificationError, world.attest(again)) == "node.revoked"
    assert [kind for kind, _, _ in world.audit.records] == ["node.revoked"]
    assert world.audit.records[0][2]["text"] == "stolen"


async def test_revoked_target_is_nobodys_peer(world: World) -> None:
    await world.attest(TARGET)
    leaves = world.membership().leaves
    assert await leaves(TARGET.spiffe_id, caller=GATEWAY)
    await world.membership().revoke("s", "", reason="")
    answers = [
        await _reason(UnavailableError, leaves(name, caller=GATEWAY))
        for name in (TARGET.spiffe_id, replace(TARGET, node="unknown").spiffe_id)
    ]
    assert answers == ["peer.unattested"] * 2
    assert sorted(role for _, role, _ in world.audit.records) == ["fabric", "gateway", "target"]


async def test_restored_node_must_attest_anew(world: World) -> None:
    old = await world.attest(GATEWAY)
    world.wait(1)
    await world.membership().revoke("g", "", reason="")
    world.wait(1)
    await world.membership().restore("g", "")
    admit = world.membership().admit
    assert (
        await _reason(VerificationError, admit(GATEWAY, old, world.result(GATEWAY, old)))
        == "node.revoked"
    )
    assert await world.refusal(GATEWAY) == "node.expired"
    world.wait(1)
    new = await world.attest(GATEWAY)
    await admit(GATEWAY, new, world.result(GATEWAY, new))
    assert await world.refusal(GATEWAY) == ""
    assert [kind for kind, _, _ in world.audit.records].count("node.restored") == 3
    assert await _reason(UsageError, world.membership().restore("g", "gateway")) == "node.not_found"


async def test_node_that_never_attested_is_revoked_only_where_that_is_meant(world: World) -> None:
    for role in ("gateway", ""):
        asked = world.membership().revoke("g", role, reason="")
        assert await _reason(UsageError, asked) == "node.not_found"
        assert await _reason(UsageError, world.membership().restore("g", role)) == "node.not_found"
    assert (await world.membership().members(page_size=9, page_token=""))[0] == []
    await world.membership().revoke("g", "gateway", reason="", unseen=True)
    assert await _reason(VerificationError, world.attest(GATEWAY)) == "node.revoked"
    await world.attest(replace(GATEWAY, node="h"))


async def test_changed_policy_asks_everybody_to_attest_again(world: World) -> None:
    leaf = await world.attest(GATEWAY)
    old = world.result(GATEWAY, leaf)
    world.policy_version += 1
    assert await world.refusal(GATEWAY) == "attestation.policy.changed"
    admit = world.membership().admit
    assert (
        await _reason(VerificationError, admit(GATEWAY, leaf, old)) == "attestation.policy.changed"
    )
    leaf = await world.attest(GATEWAY)
    await admit(GATEWAY, leaf, world.result(GATEWAY, leaf))
    assert await world.refusal(GATEWAY) == ""


async def test_an_older_policy_counts_for_a_while_and_its_results_are_asked_to_be_renewed(
    world: World,
) -> None:
    leaf = await world.attest(GATEWAY)
    old = world.result(GATEWAY, leaf)
    admit = world.membership().admit
    assert not await admit(GATEWAY, leaf, old)
    world.policy_version, world.is_overlapping = 2, True
    assert await admit(GATEWAY, leaf, old)
    assert await world.refusal(GATEWAY) == ""


@pytest.mark.parametrize(
    ("hardware", "incarnation", "version", "ends"),
    [
        (HARDWARE, GATEWAY.incarnation, 2, True),
        # Evidence of other hardware or of another process doesn't concern this one.
        (bytes(32), GATEWAY.incarnation, 2, False),
        (HARDWARE, b"N" * 16, 2, False),
        (HARDWARE, GATEWAY.incarnation, 1, False),
    ],
)
async def test_what_the_new_policy_refuses_ends_at_once(
    world: World, hardware: bytes, incarnation: bytes, version: int, *, ends: bool
) -> None:
    leaf = await world.attest(GATEWAY)
    old = world.result(GATEWAY, leaf)
    world.policy_version, world.is_overlapping = 2, True
    await world.membership().refused(
        "g",
        "gateway",
        incarnation=incarnation,
        policy_version=version,
        hardware_sha256=hardware,
    )
    admitted = world.membership().admit(GATEWAY, leaf, old)
    if ends:
        assert await _reason(VerificationError, admitted) == "attestation.policy.changed"
        assert await world.refusal(GATEWAY) == "attestation.policy.changed"
    else:
        await admitted
        assert await world.refusal(GATEWAY) == ""
    # Now accepted: the node was fixed, or the policy changed again.
    leaf = await world.attest(GATEWAY)
    assert not await world.membership().admit(GATEWAY, leaf, world.result(GATEWAY, leaf))
    assert await world.refusal(GATEWAY) == ""


async def test_a_refusal_of_a_node_that_never_attested_makes_no_record(world: World) -> None:
    await world.membership().refused(
        "x", "gateway", incarnation=bytes(16), policy_version=2, hardware_sha256=HARDWARE
    )
    members, _ = await world.membership().members(page_size=10, page_token="")
    assert not members


async def test_process_that_was_superseded_does_not_come_back(world: World) -> None:
    await world.attest(GATEWAY)
    successor = replace(GATEWAY, incarnation=b"N" * 16)
    await world.attest(successor)
    await world.attest(successor)
    assert await _reason(VerificationError, world.attest(GATEWAY)) == "node.superseded"
    assert await world.refusal(successor) == ""


async def test_both_leaves_of_a_renewal_are_named_and_none_of_a_predecessor(world: World) -> None:
    first = await world.attest(TARGET)
    world.wait(300)
    second = await world.attest(TARGET)
    leaves = world.membership().leaves
    assert await leaves(TARGET.spiffe_id, caller=GATEWAY) == [second, first]
    world.wait(300)
    assert await leaves(TARGET.spiffe_id, caller=GATEWAY) == [second]
    third = await world.attest(replace(TARGET, incarnation=b"N" * 16))
    assert await leaves(TARGET.spiffe_id, caller=GATEWAY) == [third]


async def test_list_has_every_node_with_its_state(world: World) -> None:
    await world.attest(GATEWAY)
    await world.attest(TARGET)
    await world.membership().revoke("x", "fabric", reason="lost", unseen=True)
    members, token = await world.membership().members(page_size=2, page_token="")
    more, end = await world.membership().members(page_size=2, page_token=token)
    states = {(m.record.node, m.record.role): m.state for m in [*members, *more]}
    assert states == {
        ("g", "gateway"): "active",
        ("s", "target"): "active",
        ("x", "fabric"): "revoked",
    }
    assert end == ""
    # A node that was revoked before it attested has stated nothing.
    stated = {m.state: (m.stated.version, m.stated.clock_skew_ms) for m in [*members, *more]}
    assert stated == {"active": ("1.2.3", -4), "revoked": ("", None)}


async def test_where_a_node_is_is_not_what_an_earlier_process_said(world: World) -> None:
    await world.attest(GATEWAY)
    (member,), _ = await world.membership().members(page_size=2, page_token="")
    assert (member.call_address, member.stated.addresses) == ("192.0.2.7", {"x": "192.0.2.1:1"})
    # A broker of an earlier version records the next process, and not where it is.
    registry, name = world.registry, "gateway/g"
    stored = await registry.nodes.get(name)
    assert stored is not None
    later = stored.record.model_copy(update={"incarnation": b"L" * 16})
    await registry.commit(
        [registry.nodes.unchanged(name, stored)], registry.nodes.sealed(name, later)
    )
    (member,), _ = await world.membership().members(page_size=2, page_token="")
    assert (member.call_address, member.stated.addresses) == ("", {})


def test_brokers_of_earlier_versions_read_the_record_of_a_node() -> None:
    # They refuse fields that they don't know.
    assert {*NodeRecord.model_fields} == {
        "node",
        "role",
        "tenant",
        "incarnation",
        "leaf",
        "previous_leaf",
        "policy_version",
        "hardware_sha256",
        "refused_version",
        "superseded",
        "attested_at",
        "revocation",
        "restored_at",
    }


async def test_what_an_earlier_incarnation_stated_is_not_shown(world: World) -> None:
    await world.attest(GATEWAY)
    nodes = world.registry.nodes
    stored = await nodes.get("gateway/g")
    assert stored is not None
    # As a broker of an earlier version records the next attestation.
    record = stored.record.model_copy(update={"incarnation": b"N" * 16})
    await world.registry.commit(puts=nodes.sealed("gateway/g", record))
    (member,), _ = await world.membership().members(page_size=2, page_token="")
    assert member.stated == Stated()


@pytest.mark.parametrize(("nonce", "count"), [(b"", 1), (bytes(31), 1), (NONCE, 1025)])
async def test_questions_are_bounded(world: World, nonce: bytes, count: int) -> None:
    assert count <= 1 or count == PEERS_PER_CALL_MAX + 1
    peer = PeerIncarnation(spiffe_id=GATEWAY.spiffe_id, incarnation=b"")
    asked = world.membership().authorize(TARGET, nonce=nonce, peers=[peer] * count)
    assert await _reason(UsageError, asked) == "authorization.request"


async def test_who_lost_the_device_is_told_of_no_peer(world: World) -> None:
    device_id = uuid.UUID(int=1)
    world.openings = [(TARGET, device_id, 2)]
    for epoch in (1, 2):
        served = ServedDevice(device_id=device_id, fencing_epoch=epoch)
        asked = world.membership().authorize(TARGET, nonce=NONCE, peers=[], device=served)
        if epoch == 2:
            assert await asked
        else:
            assert await _reason(VerificationError, asked) == "device.fenced"


@pytest.mark.parametrize("name", ["", "spiffe://sealane/gateway/", "spiffe://other/gateway/g"])
async def test_malformed_names_are_unknown(world: World, name: str) -> None:
    peer = PeerIncarnation(spiffe_id=name, incarnation=bytes(16))
    content = await world.membership().authorize(TARGET, nonce=NONCE, peers=[peer])
    answer = trust_pb2.Authorization.FromString(content)
    assert answer.verdicts[0].refusal == "node.unknown"
    assert answer.subject.spiffe_id == TARGET.spiffe_id
    assert answer.nonce == NONCE


@pytest.mark.parametrize(("node", "role"), [("G", ""), ("g", "broker"), ("", "")])
async def test_what_cannot_be_a_node_is_not_revoked(world: World, node: str, role: str) -> None:
    asked = world.membership().revoke(node, role, reason="")
    assert await _reason(UsageError, asked) == "node.malformed"


async def test_signature_covers_the_authorization(world: World) -> None:
    content = await world.membership().authorize(TARGET, nonce=NONCE, peers=[])
    signature = world.authority.sign_authorization(content)
    anchor = world.authority.certificate
    verify_authorization(anchor, authorization=content, signature=signature)
    stranger = CertificateAuthority.create(broker="b", now=utc_now())
    for bad in (
        (anchor, content + b"\0", signature),
        (anchor, content, world.authority.sign_descriptor(content)),
        (stranger.certificate, content, signature),
    ):
        with pytest.raises(VerificationError) as caught:
            verify_authorization(bad[0], authorization=bad[1], signature=bad[2])
        assert caught.value.reason == "authorization.signature"


async def test_a_gateway_may_use_a_volume_of_its_own_until_that_moves(world: World) -> None:
    await world.attest(GATEWAY)
    volume_id = uuid.uuid4()
    record = VolumeRecord(
        volume_id=volume_id,
        tenant="t",
        display_name="",
        sector_count=1,
        target_node=GATEWAY.node,
        generation=1,
        key_epoch=1,
    )
    table = world.registry.volumes
    await world.registry.commit((), table.sealed(str(volume_id), record))

    async def refusal() -> str:
        use = replace(peer_of(GATEWAY), volume_id=str(volume_id))
        content = await world.membership().authorize(GATEWAY, nonce=NONCE, peers=[use])
        return trust_pb2.Authorization.FromString(content).verdicts[0].refusal

    assert await refusal() == ""
    moved = record.model_copy(update={"target_node": "g2"})
    await world.registry.commit((), table.sealed(str(volume_id), moved))
    assert await refusal() == NO_VOLUME


async def test_a_volume_is_used_by_its_tenant_and_those_it_is_shared_with(world: World) -> None:
    volume_id, elsewhere, gone, filler = (uuid.uuid4() for _ in range(4))
    shares = (
        ShareRecord(tenant="reader", read_only=True),
        ShareRecord(tenant="w", read_only=False),
    )
    for each, node in ((volume_id, "s"), (elsewhere, "s2"), (gone, "s")):
        record = VolumeRecord(
            volume_id=each,
            tenant="t",
            display_name="",
            sector_count=1,
            target_node=node,
            generation=1,
            key_epoch=1,
            shares=shares,
            is_deleted=each == gone,
        )
        await world.registry.commit((), world.registry.volumes.sealed(str(each), record))
    gateways = {
        tenant: replace(GATEWAY, node=f"g-{tenant}", tenant=tenant)
        for tenant in ("t", "reader", "w", "other")
    }
    for gateway in gateways.values():
        await world.attest(gateway)

    async def may(tenant: str, volume: object, *, reading: bool = False) -> str:
        use = replace(peer_of(gateways[tenant]), volume_id=str(volume), is_read_only=reading)
        content = await world.membership().authorize(TARGET, nonce=NONCE, peers=[use])
        (verdict,) = trust_pb2.Authorization.FromString(content).verdicts
        assert peer_from(verdict.peer) == use
        return verdict.refusal

    for tenant, writes, reads in (
        ("t", "", ""),
        ("reader", NO_VOLUME, ""),
        ("w", "", ""),
        ("other", NO_VOLUME, NO_VOLUME),
    ):
        assert await may(tenant, volume_id) == writes
        assert await may(tenant, volume_id, reading=True) == reads
        # Volumes that are missing or inaccessible get the same answer.
        for volume in (elsewhere, gone, filler, "x", f"{volume_id}".upper(), "\x00" * 9):
            assert await may(tenant, volume, reading=True) == NO_VOLUME
    await world.membership().revoke("g-w", "gateway", reason="")
    assert await may("w", volume_id) == "node.revoked"
