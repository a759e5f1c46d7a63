"""A thief of a leaf's TLS key, anywhere on the network, can open no secret.

The thief has leaf, TLS key and attestation result of a node, but not its KEM key, which never
leaves the process (or the TPM). So its calls are refused (`test_call_proofs.py`). Here it also has
the call keys, so that the defences behind the proofs are tested on their own.
"""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base class

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import fabric_daemons
from attached_hosts import host_of, new_secret
from control_plane import Daemon, Site, daemon, short_directory
from permits import own_authorized
from sealane.client import Client, Volume, connect
from sealane.client.grants import introduce
from sealane.crypto.certificates import Subject
from sealane.crypto.exchange import Exchange
from sealane.crypto.hpke import Context, SignedSecret, open_signed
from sealane.crypto.kem import KemKey, X25519KemKey
from sealane.crypto.lease import CounterRange
from sealane.crypto.queue import (
    QueueOffer,
    QueueTranscript,
    derive_queue_secret,
)
from sealane.crypto.share import open_share, seal_share
from sealane.daemon.config import UNIT_BYTES
from sealane.daemon.fabric.establishment import Initiation
from sealane.daemon.fabric.servicer import answer_of, establish_request
from sealane.daemon.fabric.shown import own_shown, responder_shown
from sealane.daemon.gateway.back_ends import Via, VolumeBackEnds
from sealane.daemon.gateway.data_path import Gateway, GatewaySettings
from sealane.daemon.gateway.grants import OpenQueue, QueueGrant, VolumeKey
from sealane.daemon.gateway.queue_opening import QueueOpening
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.third_party import ThirdPartyStores
from sealane.daemon.node.channels import Channels, Own
from sealane.daemon.runtime.call_keys import CallKeys, CallKeysServicer
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import VerificationError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.status import error_of
from sealane.protocol.v1 import (
    broker_pb2,
    calls_pb2_grpc,
    sessions_pb2,
    storage_pb2,
    storage_pb2_grpc,
)
from sealane.protocol.v1.broker_pb2_grpc import BrokerStub
from sealane.protocol.v1.sessions_pb2_grpc import SessionPeerStub
from sealane.transport.establish import SessionKeys
from sealane.transport.nvme.initiator import HostController, NvmeStatusError
from trust.insider import Insider, insider

HOST = "nqn.2014-08.org.nvmexpress:uuid:55555555-2222-4333-8444-555555555555"


@dataclass
class Thief:
    """A thief with all secrets of a node except its KEM key."""

    victim: Insider
    kem: X25519KemKey = field(default_factory=X25519KemKey.create)

    @property
    def key_pem(self) -> bytes:
        """Stolen TLS key."""
        return self.victim.identity.keys.tls.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )

    @property
    def leaf_pem(self) -> bytes:
        """Leaf of the stolen key."""
        return self.victim.identity.certificate.public_bytes(Encoding.PEM)

    @contextlib.asynccontextmanager
    async def channel(self, address: str, node: str, role: str) -> AsyncIterator[grpc.aio.Channel]:
        """Open a channel to `role` of `node` as the victim, with proofs under its call keys."""
        identity = self.victim.identity
        own = Own(
            leaf=identity.certificate,
            certificate_pem=self.leaf_pem,
            key_pem=self.key_pem,
            metadata=tuple(identity.metadata.items()),
        )

        async def find(node: str, role: str) -> Any:
            return () if role == "broker" else await self.victim.trust.leaves(node, role)

        channels = Channels(
            lambda: own, anchors=identity.anchors, find_peer=find, proofs=identity.proofs
        )
        try:
            async with channels.use(address, node, role) as connection:
                yield connection.channel
        finally:
            await channels.close()


@dataclass
class Cluster:
    site: Site
    broker: Daemon
    target: Daemon
    gateway: Daemon

    @property
    def storage_address(self) -> str:
        return self.target.addresses["target_control"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        roles = {"s": ["target"], "s2": ["target"], "g": ["gateway"], "x": ["gateway"]}
        site.write_policy(roles)
        broker = stack.enter_context(daemon(site.broker_config()))
        listen = 'listen = "127.0.0.1:0"\n'
        target = stack.enter_context(
            daemon(
                site.write_config(
                    "s",
                    site.enrolment("s", broker)
                    + f'[target]\n{listen}control_{listen}store = "memory"\n',
                )
            )
        )
        gateway = stack.enter_context(
            daemon(
                site.write_config(
                    "g",
                    site.enrolment("g", broker)
                    + f'[gateway]\n{listen}target_node = "s"\n'
                    + f'target_address = "{target.addresses["target_control"]}"\n',
                )
            )
        )
        yield Cluster(site, broker, target, gateway)


@pytest.fixture
async def volume(cluster: Cluster) -> AsyncIterator[Volume]:
    async with connect(cluster.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=1 << 20)
        attached = await client.volumes.attach(volume.name, host_nqn=HOST)
        async with client.open(attached) as disk:
            await disk.write(0, b"w" * 4096)
        await client.volumes.detach(volume.name)
        yield volume


def _id(volume: Volume) -> str:
    return volume.name.removeprefix("volumes/")


async def test_keys_and_leases_of_a_stolen_leaf_are_sealed_to_its_owner(
    cluster: Cluster, volume: Volume
) -> None:
    async with insider(cluster.site, cluster.broker, node="x") as victim:
        thief = Thief(victim)
        request_id = secrets.token_bytes(16)
        async with thief.channel(cluster.broker.addresses["broker"], "broker", "broker") as channel:
            key = await BrokerStub(channel).GetVolumeKey(
                broker_pb2.GetVolumeKeyRequest(
                    volume_id=_id(volume), key_epoch=1, request_id=request_id
                )
            )
            lease = await BrokerStub(channel).GrantLease(
                broker_pb2.GrantLeaseRequest(
                    volume_id=_id(volume), key_epoch=1, request_id=request_id
                )
            )
        subject = victim.identity.subject
        for answer, purpose, arena in (
            (key, "volume key", None),
            (lease, "lease", (lease.broker_instance, lease.start_epoch)),
        ):
            context = Context(
                purpose=purpose,
                recipient=subject.spiffe_id,
                incarnation=subject.incarnation,
                request_id=request_id,
                volume_id=_id(volume),
                key_epoch=1,
                arena=arena,
            )
            secret = SignedSecret(sealed=answer.sealed, signature=answer.signature)
            broker_key = victim.identity.broker_key
            with pytest.raises(VerificationError) as caught:
                open_signed(secret, private_key=thief.kem, context=context, signer=broker_key)
            assert caught.value.reason == "secret.sealed"
            # The secret opens with the victim's KEM key: nothing else stopped the thief.
            own = victim.identity.keys.kem
            assert open_signed(secret, private_key=own, context=context, signer=broker_key)


@pytest.mark.slow
async def test_a_stolen_leaf_of_a_gateway_gets_no_queue(cluster: Cluster, volume: Volume) -> None:
    async with insider(cluster.site, cluster.broker, node="x") as victim:
        thief = Thief(victim)
        (leaf, *_) = await victim.trust.leaves("s", "target")
        target = victim.identity.verified(leaf)
        refused = []

        async def open_queue(
            queue_id: int, association_epoch: int, milestone: bytes = b""
        ) -> QueueGrant:
            opening = _opening(volume, target, thief.kem, queue_id, association_epoch)
            async with thief.channel(cluster.storage_address, "s", "target") as channel:
                answer = await storage_pb2_grpc.StorageStub(channel).OpenQueue(opening.request)
            with pytest.raises(VerificationError) as caught:
                opening.grant(answer)
            refused.append(caught.value.reason)
            # Its best guess: a share of zeros, sealed to itself.
            answer.sealed_share = _sealed_to(thief.kem, opening, answer)
            return opening.grant(answer)

        async def open_with_the_kem_key(
            queue_id: int, association_epoch: int, milestone: bytes = b""
        ) -> QueueGrant:
            kem = victim.identity.keys.kem
            opening = _opening(volume, target, kem, queue_id, association_epoch)
            async with thief.channel(cluster.storage_address, "s", "target") as channel:
                answer = await storage_pb2_grpc.StorageStub(channel).OpenQueue(opening.request)
            return opening.grant(answer)

        with pytest.raises((NvmeStatusError, TimeoutError)):
            await asyncio.wait_for(_write(volume, 0, open_queue), 20)
        assert set(refused) == {"secret.sealed"}
        # It is the KEM key that it lacks, and nothing else.
        await _write(volume, 1, open_with_the_kem_key)
    async with connect(cluster.gateway.socket) as client:
        attached = await client.volumes.attach(volume.name, host_nqn=HOST)
        async with client.open(attached) as disk:
            assert await disk.read(0, 4096) == b"w" * 4096
        await client.volumes.detach(volume.name)


async def _write(volume: Volume, lba: int, open_queue: OpenQueue) -> None:
    async with _attached(volume, open_queue) as host:
        queue = await host.open_queue(1)
        await queue.write(lba, b"z" * 4096)
        await queue.close()


def _opening(
    volume: Volume, target: Subject, kem: KemKey, queue_id: int, association_epoch: int
) -> QueueOpening:
    return QueueOpening(
        volume_id=uuid.UUID(_id(volume)),
        target=target,
        gateway_node="x",
        kem=kem,
        queue_id=queue_id,
        association_epoch=association_epoch,
    )


def _offer(request: storage_pb2.OpenQueueRequest, *, target: str, gateway: str) -> QueueOffer:
    return QueueOffer(
        volume_id=uuid.UUID(request.volume_id),
        host_nqn=request.host_nqn,
        target_node=target,
        gateway_node=gateway,
        queue_id=request.queue_id,
        association_epoch=request.association_epoch,
        is_read_only=request.read_only,
        nonce=request.nonce,
        public_key=request.public_key,
        milestone=request.milestone,
    )


def _sealed_to(
    kem: X25519KemKey, opening: QueueOpening, answer: storage_pb2.OpenQueueResponse
) -> bytes:
    transcript = QueueTranscript(
        offer=_offer(opening.request, target="s", gateway="x"),
        target_incarnation=answer.target_incarnation,
        nonce=answer.nonce,
        public_key=answer.public_key,
        milestone=answer.milestone,
    )
    return seal_share(bytearray(32), transcript, kem_algorithm="x25519", public_key=kem.public_key)


@contextlib.asynccontextmanager
async def _attached(volume: Volume, open_queue: OpenQueue) -> AsyncIterator[HostController]:
    """Yield a gateway of the thief's, with an invented key and counters."""
    gateway = Gateway(traddr="127.0.0.1", trsvcid=0, settings=GatewaySettings(hold_seconds=1.0))
    await gateway.start()
    try:
        attached = await gateway.attach(
            VolumeKey(
                volume_id=uuid.UUID(_id(volume)),
                generation=1,
                sector_count=256,
                keys={1: bytearray(secrets.token_bytes(32))},
            ),
            counters=[
                CounterRange(
                    broker_instance=9, start_epoch=9, counter_start=256, counter_end=1 << 40
                )
            ],
            secret=new_secret(),
            host_nqn=HOST,
            open_queue=open_queue,
        )
        async with host_of(attached, HOST) as host:
            await host.request_queues(1)
            yield host
    finally:
        await gateway.stop()


@dataclass
class FalseTarget(storage_pb2_grpc.StorageServicer):
    """Serves under a stolen target leaf, and derives the keys that it can."""

    thief: Thief
    gateway: Subject
    guesses: list[bytes] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def GetNamespace(
        self, request: storage_pb2.GetNamespaceRequest, context: object
    ) -> storage_pb2.Namespace:
        return storage_pb2.Namespace(volume_id=request.volume_id)

    async def OpenQueue(
        self, request: storage_pb2.OpenQueueRequest, context: object
    ) -> storage_pb2.OpenQueueResponse:
        offer = _offer(request, target="s2", gateway=self.gateway.node)
        with pytest.raises(VerificationError) as caught:
            open_share(request.sealed_share, offer, key=self.thief.kem)
        self.refused.append(caught.value.reason)
        own, share = Exchange(), bytearray(32)
        transcript = QueueTranscript(
            offer=offer, target_incarnation=1, nonce=bytes(16), public_key=own.public_key
        )
        sealed = seal_share(
            share,
            transcript,
            kem_algorithm=self.gateway.kem_algorithm,
            public_key=self.gateway.kem_public_key,
        )
        guess = derive_queue_secret(
            own,
            peer_key=request.public_key,
            gateway_share=bytearray(32),
            target_share=share,
            transcript=transcript,
        )
        self.guesses.append(bytes(guess))
        return storage_pb2.OpenQueueResponse(
            ticket=bytes(range(16)),
            public_key=own.public_key,
            nonce=transcript.nonce,
            target_incarnation=1,
            traddr="127.0.0.1",
            trsvcid=1,
            sealed_share=sealed,
        )


async def test_a_stolen_leaf_of_a_target_shares_no_secret_with_a_gateway(
    cluster: Cluster,
) -> None:
    async with (
        insider(cluster.site, cluster.broker, node="s2", role="target") as victim,
        insider(cluster.site, cluster.broker, node="x") as gateway,
    ):
        thief = Thief(victim)
        server = grpc.aio.server()
        false = FalseTarget(thief, gateway.identity.subject)
        storage_pb2_grpc.add_StorageServicer_to_server(false, server)
        # An invented call key; proofs under it are valid nowhere else.
        keys = CallKeys(victim.identity.spiffe_id)
        calls_pb2_grpc.add_CallKeysServicer_to_server(
            CallKeysServicer(keys, lambda _: gateway.identity.subject), server
        )
        credentials = grpc.ssl_server_credentials([(thief.key_pem, thief.leaf_pem)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        back_ends = VolumeBackEnds(
            Targets({"s2": f"127.0.0.1:{port}"}, identity=gateway.identity),
            identity=gateway.identity,
            broker=gateway.broker,
            devices=gateway.devices,
            third_parties=ThirdPartyStores(
                [], host_nqn=gateway_nqn("x"), directory=Path("/unused"), authorized=own_authorized
            ),
        )
        descriptor = broker_pb2.VolumeDescriptor(volume_id=str(uuid.uuid4()), target_node="s2")
        back_end = await back_ends.open(descriptor, via=Via())
        grant = await back_end.open_queue(1, 1)
        await server.stop(None)
    assert false.refused == ["secret.sealed"]
    assert bytes(grant.secret) not in false.guesses


async def test_a_stolen_leaf_of_a_fabric_opens_no_session() -> None:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"f": ["fabric"], "x": ["fabric"]})
        broker = stack.enter_context(daemon(site.broker_config()))
        config = site.write_config("f", site.enrolment("f", broker) + fabric_daemons.SECTION)
        fabric = stack.enter_context(daemon(config))
        async with (
            insider(site, broker, node="x", role="fabric") as victim,
            connect(fabric.socket) as client,
        ):
            thief = Thief(victim)
            pins = await victim.trust.leaves("f", "fabric")
            async with thief.channel(fabric.addresses["fabric_control"], "f", "fabric") as channel:
                with pytest.raises(VerificationError) as caught:
                    await _session_keys(client, channel, victim, pins, thief.kem)
                assert caught.value.reason == "secret.sealed"
                # It is the KEM key that it lacks, and nothing else.
                kem = victim.identity.keys.kem
                keys = await _session_keys(client, channel, victim, pins, kem)
                assert len(keys.send) == len(keys.receive) == 32


async def _session_keys(
    client: Client,
    channel: grpc.aio.Channel,
    victim: Insider,
    pins: Sequence[x509.Certificate],
    kem: KemKey,
) -> SessionKeys:
    """Request a session as the victim, with this KEM key; return the derived keys."""
    name = secrets.token_hex(4)
    listening = client.sessions.ListenSession(
        sessions_pb2.ListenSessionRequest(
            job_token=await introduce(client.sessions), display_name=name, region_bytes=1 << 20
        )
    )
    initiation = Initiation(
        display_name=name,
        own=victim.identity.subject,
        responder=victim.identity.verified(pins[0]),
        shown=own_shown(victim.identity.own),
        check_result=lambda result: responder_shown(
            result, pins=pins, anchors=victim.identity.anchors, now=utc_now()
        ),
        kem=kem,
        units=(UNIT_BYTES,),
        rate_bits_per_second=1_000_000,
        data_addresses=("127.0.0.1:9",),
        secret=None,
    )
    try:
        while True:
            try:
                response = await SessionPeerStub(channel).Establish(
                    establish_request(initiation.offer)
                )
            except grpc.aio.AioRpcError as error:
                # The listener starts in another task, if it is permitted.
                is_early = error_of(error, peer="f").reason == "session.listener.absent"
                if not is_early or listening.done():
                    raise
            else:
                return initiation.keys(answer_of(response))
    finally:
        listening.cancel()
