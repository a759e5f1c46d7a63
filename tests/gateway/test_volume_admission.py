"""Permission to use a volume, its namespace, keys and leases, and checks of answering peers."""

import asyncio
import ssl
import uuid
from dataclasses import replace
from functools import partial

import grpc
import pytest
from cryptography import x509

from patience import PATIENCE_SECONDS
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import Subject
from sealane.daemon.gateway.queue_opening import QueueOpening
from sealane.daemon.gateway.volumes import Via
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.volume.descriptors import open_descriptor
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.status import error_of
from sealane.protocol.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    storage_pb2,
    storage_pb2_grpc,
)
from volume_control import HOST, World, create


@pytest.mark.parametrize("role", ["target", "fabric", "broker"])
async def test_only_gateways_may_call_the_target(world: World, role: str) -> None:
    with pytest.raises(VerificationError) as caught:
        await world.namespace(world.identities[role], "")
    assert caught.value.reason == "call.role.refused"


async def test_only_gateways_get_keys_and_leases(world: World) -> None:
    volume_id = await create(world)
    async with world.identities["target"].channel(world.addresses["broker"], "b", "broker") as c:
        stub = broker_pb2_grpc.BrokerStub(c)
        listed = await stub.ListVolumeDescriptors(
            broker_pb2.ListVolumeDescriptorsRequest(), timeout=PATIENCE_SECONDS
        )
        assert len(listed.volumes) == 1
    for method, request in (
        ("GetVolumeKey", broker_pb2.GetVolumeKeyRequest(volume_id=volume_id)),
        ("GrantLease", broker_pb2.GrantLeaseRequest(volume_id=volume_id)),
    ):
        with pytest.raises(VerificationError) as caught:
            async with world.identities["target"].channel(
                world.addresses["broker"], "b", "broker"
            ) as c:
                await getattr(broker_pb2_grpc.BrokerStub(c), method)(
                    request, timeout=PATIENCE_SECONDS
                )
        assert caught.value.reason == "call.role.refused"


async def test_descriptors_are_listed_of_the_volumes_that_one_may_see(world: World) -> None:
    volume_id, other, unknown = await create(world), await create(world), str(uuid.uuid4())

    async def found(who: str, *volume_ids: str) -> list[str]:
        async with world.identities[who].channel(world.addresses["broker"], "b", "broker") as c:
            listed = await broker_pb2_grpc.BrokerStub(c).ListVolumeDescriptors(
                broker_pb2.ListVolumeDescriptorsRequest(volume_ids=volume_ids),
                timeout=PATIENCE_SECONDS,
            )
        anchors = world.identities[who].anchors
        return [open_descriptor(anchors, each).volume_id for each in listed.volumes]

    assert await found("gateway", volume_id, unknown) == [volume_id]
    assert await found("target", volume_id, other) == [volume_id, other]
    assert await found("stranger", volume_id, other, unknown) == []
    for wrong in (["x"], [volume_id] * 1001):
        with pytest.raises(UsageError) as caught:
            await found("gateway", *wrong)
        assert caught.value.reason == "request.malformed"


async def test_other_tenants_gateway_hears_of_a_volume_what_it_hears_of_none(
    world: World,
) -> None:
    volume_id, unknown = await create(world), str(uuid.uuid4())
    stranger = world.identities["stranger"]
    heard = []
    for asked in (volume_id, unknown):
        with pytest.raises(UsageError) as caught:
            await world.namespace(stranger, asked)
        assert caught.value.reason == "namespace.not_found"
        heard.append(str(caught.value).replace(asked, "ID"))
        for call in (
            world.storage.open_queue(
                stranger.subject, storage_pb2.OpenQueueRequest(volume_id=asked, queue_id=1)
            ),
            world.storage.delete(stranger.subject, asked),
        ):
            with pytest.raises(UsageError) as caught:
                await call
            heard.append(str(caught.value).replace(asked, "ID"))
        with pytest.raises(UsageError) as caught:
            world.storage.check_watch(stranger.subject, asked)
        heard.append(str(caught.value).replace(asked, "ID"))
    assert len(set(heard)) == 1
    assert not world.target.admitted


async def test_a_namespace_is_made_for_its_tenants_gateways_only(world: World) -> None:
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="s",
    )
    with pytest.raises(UsageError) as caught:
        await world.storage.create(world.identities["stranger"].subject, answer.volume)
    assert caught.value.reason == "namespace.not_found"
    assert not world.target.volumes


async def test_a_shared_volume_is_used_under_an_authorization_of_its_own(world: World) -> None:
    volume_id = await create(world)
    owner, stranger = world.identities["gateway"].subject, world.identities["stranger"]
    await world.broker.share_volume(owner, volume_id, tenant="other", read_only=True)
    await world.namespace(stranger, volume_id)

    def request(*, read_only: bool) -> storage_pb2.OpenQueueRequest:
        return QueueOpening(
            volume_id=uuid.UUID(volume_id),
            target=world.identities["target"].subject,
            gateway_node="x",
            kem=stranger.keys.kem,
            queue_id=1,
            association_epoch=1,
            read_only=read_only,
        ).request

    with pytest.raises(UsageError) as caught:
        await world.storage.open_queue(stranger.subject, request(read_only=False))
    assert caught.value.reason == "namespace.not_found"
    await world.storage.open_queue(stranger.subject, request(read_only=True))
    (admitted,) = world.target.admitted.values()
    use = PeerIncarnation(
        spiffe_id=stranger.subject.spiffe_id,
        incarnation=stranger.subject.incarnation,
        volume_id=volume_id,
        is_read_only=True,
    )
    assert (admitted["gateway"], admitted["is_read_only"]) == (use, True)
    # Events name all users of the volume, so only its owner gets them.
    with pytest.raises(UsageError):
        world.storage.check_watch(stranger.subject, volume_id)
    with pytest.raises(UsageError):
        await world.storage.delete(stranger.subject, volume_id)
    await world.broker.unshare_volume(owner, volume_id, tenant="other")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await world.target.fencing.wait()
    assert world.target.fenced == {use: "volume.not_found"}


async def test_forged_descriptor_makes_no_namespace(world: World) -> None:
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="s",
    )
    signed = answer.volume
    descriptor = broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
    descriptor.sector_count = 1 << 30
    signed.descriptor = descriptor.SerializeToString()
    with pytest.raises(VerificationError) as caught:
        await world.storage.create(world.identities["gateway"].subject, signed)
    assert caught.value.reason == "volume.descriptor.signature"
    assert world.target.volumes == {}


async def test_descriptor_of_another_target_is_refused(world: World) -> None:
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="elsewhere",
    )
    signed = answer.volume
    with pytest.raises(UsageError) as caught:
        await world.storage.create(world.identities["gateway"].subject, signed)
    assert caught.value.reason == "namespace.target"


async def test_server_of_another_node_or_role_is_not_reached(world: World) -> None:
    gateway = world.identities["gateway"]
    for node, role in (("other", "target"), ("s", "broker")):
        with pytest.raises(VerificationError) as caught:
            await world.namespace(gateway, "", node=node, role=role)
        assert caught.value.reason == "peer.certificate"


async def test_certificate_that_expires_on_a_live_connection_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = await create(world)
    request = storage_pb2.GetNamespaceRequest(volume_id=volume_id)
    gateway = world.identities["gateway"]
    async with gateway.channel(world.addresses["target"], "s", "target") as channel:
        stub = storage_pb2_grpc.StorageStub(channel)
        await stub.GetNamespace(request, timeout=PATIENCE_SECONDS)
        late = gateway.certificate.not_valid_after_utc
        monkeypatch.setattr("sealane.daemon.runtime.authorizers.utc_now", lambda: late)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetNamespace(request, timeout=PATIENCE_SECONDS)
    error = error_of(caught.value, peer="target")
    assert isinstance(error, VerificationError)
    assert error.reason == "certificate.expired"


async def test_caller_without_a_certificate_is_not_served(world: World) -> None:
    anchor = world.broker.authority.anchor_pem
    credentials = grpc.ssl_channel_credentials(anchor)
    options = [("grpc.ssl_target_name_override", "s.target.sealane.internal")]
    async with grpc.aio.secure_channel(
        world.addresses["target"], credentials, options=options
    ) as c:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await storage_pb2_grpc.StorageStub(c).GetNamespace(
                storage_pb2.GetNamespaceRequest(), timeout=PATIENCE_SECONDS
            )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_identity_refuses_a_certificate_for_another_key(world: World) -> None:
    async def issue(keys: Keys) -> Issued:
        return Issued(leaf=world.identities["gateway"].certificate)

    identity = Identity(
        node="g",
        role="gateway",
        anchors=TrustAnchors(world.broker.authority.certificate),
        obtain=issue,
        metrics=Metrics(),
    )
    with pytest.raises(VerificationError) as caught:
        await identity.renew()
    assert caught.value.reason == "certificate.key.mismatch"


@pytest.mark.parametrize("change", [{"node": "h"}, {"role": "target"}, {"incarnation": bytes(16)}])
async def test_identity_refuses_a_certificate_for_another_subject(
    world: World, change: dict[str, object]
) -> None:
    async def issue(keys: Keys) -> Issued:
        subject = Subject(
            node="g",
            role="gateway",
            tenant="t",
            incarnation=keys.incarnation,
            kem_public_key=keys.kem_public,
        )
        leaf = world.broker.authority.issue(
            replace(subject, **change),  # type: ignore[arg-type]
            keys.tls.public_key(),
            now=utc_now(),
        )
        return Issued(leaf=leaf)

    identity = Identity(
        node="g",
        role="gateway",
        anchors=TrustAnchors(world.broker.authority.certificate),
        obtain=issue,
        metrics=Metrics(),
    )
    with pytest.raises(VerificationError) as caught:
        await identity.renew()
    assert caught.value.reason == "certificate.subject.mismatch"


async def test_renewed_certificate_is_shown_at_the_next_handshake(world: World) -> None:
    target = world.identities["target"]
    before = await _shown(world.addresses["target"])
    assert before == target.certificate
    await target.renew()
    after = await _shown(world.addresses["target"])
    assert after == target.certificate
    assert after.serial_number != before.serial_number
    assert after.public_key() == before.public_key()


async def test_failed_renewal_is_tried_again_until_the_broker_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RENEW_SECONDS", "RETRY_SECONDS", "_SPACING_SECONDS"):
        monkeypatch.setattr(f"sealane.daemon.node.identity.{name}", 0.0)
    gateway = world.identities["gateway"]
    first = gateway.certificate
    failures = 3
    renewed = asyncio.Event()

    async def issue(keys: Keys) -> Issued:
        nonlocal failures
        if failures:
            failures -= 1
            raise UnavailableError("peer.unreachable", "no broker")
        leaf = world.broker.authority.issue(gateway.subject, keys.tls.public_key(), now=utc_now())
        renewed.set()
        return Issued(leaf=leaf)

    monkeypatch.setattr(gateway, "_obtain", issue)
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(gateway.keep_renewed())
        await renewed.wait()
        await asyncio.sleep(0)
        renewing.cancel()
    assert failures == 0
    assert gateway.certificate.serial_number != first.serial_number


async def test_gateway_that_may_not_act_can_neither_open_nor_delete(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    await made.open_queue(1, 7)
    world.refused[world.identities["gateway"].subject.spiffe_id] = "node.revoked"
    await asyncio.wait_for(world.target.fencing.wait(), PATIENCE_SECONDS)

    async def delete() -> None:
        gateway = world.identities["gateway"]
        async with gateway.channel(world.addresses["target"], "s", "target") as channel:
            await storage_pb2_grpc.StorageStub(channel).DeleteNamespace(
                storage_pb2.DeleteNamespaceRequest(volume_id=volume_id), timeout=PATIENCE_SECONDS
            )

    for refused in (partial(made.open_queue, 1, 8), delete):
        with pytest.raises(VerificationError) as caught:
            await refused()
        assert caught.value.reason == "node.revoked"
    assert world.target.volumes


async def test_gateway_that_loses_its_authorization_is_fenced(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    await made.open_queue(1, 7)
    subject = world.identities["gateway"].subject
    (owner,) = world.target.gateways()
    assert (owner.spiffe_id, owner.incarnation) == (subject.spiffe_id, subject.incarnation)
    world.refused[subject.spiffe_id] = "node.revoked"
    await asyncio.wait_for(world.target.fencing.wait(), PATIENCE_SECONDS)
    assert world.target.fenced == {owner: "node.revoked"}


async def _shown(address: str) -> x509.Certificate:
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(der)
