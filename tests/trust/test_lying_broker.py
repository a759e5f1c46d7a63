"""Nodes accept from a broker only answers to their own requests.

The clients are the product's, over TLS. The server has a certificate for the broker role and
everything the authority ever signed, including for others and on other subjects. It stands for a
thief of a broker's TLS key, or a faulty broker.
"""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import datetime as dt
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import CertificateAuthority
from sealane.crypto.hpke import Context, seal_signed
from sealane.crypto.lease import RETURN_TOKEN_BYTES
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.node.authorizations import peer_message, peer_of
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.node.trust_client import TrustClient
from sealane.daemon.runtime.authorizers import Authorizer
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import bind_tcp, new_server, running
from sealane.errors import Error, LeaseError, UnavailableError, VerificationError
from sealane.protocol.v1 import broker_pb2, broker_pb2_grpc, trust_pb2, trust_pb2_grpc
from trust.world import Site, everybody

NONCE, OTHER_NONCE = bytes(range(32)), bytes(32)
PEER = PeerIncarnation(
    spiffe_id="spiffe://sealane/gateway/h", incarnation=bytes(range(16)), volume_id="v"
)
V = broker_pb2.VolumeDescriptor(
    volume_id="v", generation=1, sector_count=256, tenant="t", target_node="s", key_epoch=3
)
OTHER = broker_pb2.VolumeDescriptor(
    volume_id="w", generation=1, sector_count=256, tenant="t", target_node="s", key_epoch=3
)
LEASE = broker_pb2.Lease(
    volume_id="v",
    key_epoch=3,
    broker_instance=1,
    start_epoch=2,
    lease_id=9,
    counter_start=256,
    counter_end=1024,
    return_token=bytes(RETURN_TOKEN_BYTES),
)


Verdicts = Callable[[trust_pb2.AuthorizePeersRequest], trust_pb2.Authorization | bytes]


@dataclass
class Liar(trust_pb2_grpc.TrustServicer, broker_pb2_grpc.BrokerServicer):
    """Answers each call as the test specifies; truthfully by default."""

    site: Site
    client: Identity
    asker: Identity
    signer: CertificateAuthority | None = None
    descriptor: broker_pb2.VolumeDescriptor = field(default_factory=lambda: V)
    pems: list[str] = field(default_factory=list)
    verdicts: (
        Callable[[trust_pb2.AuthorizePeersRequest], trust_pb2.Authorization | bytes] | None
    ) = None
    sign: Callable[[CertificateAuthority, bytes], bytes] = CertificateAuthority.sign_authorization
    lease: broker_pb2.Lease | bytes = field(default_factory=lambda: LEASE)
    arena: tuple[int, int] = (1, 2)
    context: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def authority(self) -> CertificateAuthority:
        return self.signer or self.site.authority

    async def GetPeer(self, request: trust_pb2.GetPeerRequest, context: object) -> Any:
        return trust_pb2.Peer(certificate_pem=self.pems)

    async def AuthorizePeers(
        self, request: trust_pb2.AuthorizePeersRequest, context: object
    ) -> trust_pb2.SignedAuthorization:
        answer = self.truth(request) if self.verdicts is None else self.verdicts(request)
        encoded = answer if isinstance(answer, bytes) else answer.SerializeToString()
        return trust_pb2.SignedAuthorization(
            authorization=encoded, signature=self.sign(self.authority, encoded)
        )

    def truth(self, request: trust_pb2.AuthorizePeersRequest) -> trust_pb2.Authorization:
        return trust_pb2.Authorization(
            subject=peer_message(peer_of(self.asker.subject)),
            nonce=request.nonce,
            verdicts=[trust_pb2.Verdict(peer=peer, refusal="no") for peer in request.peers],
        )

    def signed(self) -> broker_pb2.SignedVolumeDescriptor:
        encoded = self.descriptor.SerializeToString()
        return broker_pb2.SignedVolumeDescriptor(
            descriptor=encoded, signature=self.authority.sign_descriptor(encoded)
        )

    async def GetVolumeDescriptor(self, request: object, context: object) -> Any:
        return self.signed()

    FinishFilling = BeginResize = FinishResize = SetVolumeShare = RemoveVolumeShare = (
        GetVolumeDescriptor
    )

    async def RegisterVolume(self, request: object, context: object) -> Any:
        return broker_pb2.RegisterVolumeResponse(volume=self.signed())

    async def ListVolumeDescriptors(self, request: object, context: object) -> Any:
        return broker_pb2.ListVolumeDescriptorsResponse(volumes=[self.signed()])

    def sealed(self, purpose: str, request: Any, secret: bytes, **values: Any) -> dict[str, bytes]:
        told: dict[str, Any] = {
            "purpose": purpose,
            "recipient": self.client.subject.spiffe_id,
            "incarnation": self.client.keys.incarnation,
            "request_id": request.request_id,
            "volume_id": request.volume_id,
            "key_epoch": request.key_epoch,
            **values,
            **self.context,
        }
        sealed = seal_signed(
            secret,
            recipient_key=self.client.keys.kem_public,
            context=Context(**told),
            signing_key=self.authority.signing_key,
        )
        return {"sealed": sealed.sealed, "signature": sealed.signature}

    async def GetVolumeKey(self, request: Any, context: object) -> Any:
        return broker_pb2.SealedVolumeKey(**self.sealed("volume key", request, bytes(32)))

    async def GrantLease(self, request: Any, context: object) -> Any:
        encoded = self.lease if isinstance(self.lease, bytes) else self.lease.SerializeToString()
        sealed = self.sealed("lease", request, encoded, arena=self.arena)
        named = {"broker_instance": self.arena[0], "start_epoch": self.arena[1], **self.shown}
        return broker_pb2.SealedLease(**sealed, **named)


@dataclass
class World:
    """A node's clients, and the server that answers them."""

    site: Site
    liar: Liar
    identity: Identity
    trust: TrustClient
    broker: BrokerClient

    async def authorize(self, peers: list[PeerIncarnation] | None = None) -> list[str]:
        return [*await self.trust.authorize(NONCE, [PEER] if peers is None else peers)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    site = Site()
    async with site.stop:
        server_identity = await site.identity("broker", "broker")
        identity = await site.identity("gateway", "g")
        asker = await site.identity("fabric", "own")
        liar = Liar(site, identity, asker)
        authorizer = Authorizer(
            TrustAnchors(site.authority.certificate),
            server=server_identity.spiffe_id,
            admit=everybody,
            metrics=Metrics(),
        )
        server = new_server(Metrics(), authorizer)
        trust_pb2_grpc.add_TrustServicer_to_server(liar, server)
        broker_pb2_grpc.add_BrokerServicer_to_server(liar, server)
        credentials = server_identity.server_credentials(mutual=True)
        address = bind_tcp(server, "127.0.0.1:0", credentials, key="test")
        await site.stop.enter_async_context(running(server))
        config = EnrolmentConfig(
            broker_address=address,
            attestation_address="unused:1",
            trust_anchor="/unused",
            evidence="software",
            key_file="/unused",
        )
        trust, broker = TrustClient(config, asker), BrokerClient(config, identity)
        yield World(site, liar, identity, trust, broker)


async def reason_of(call: Any, kind: type[Error] = VerificationError) -> str:
    with pytest.raises(kind) as caught:
        await call
    return caught.value.reason


def other_authority() -> CertificateAuthority:
    return CertificateAuthority.create(broker="b", now=utc_now())


# Certificates and results of peers


async def leaf_of(world: World, role: str, node: str) -> str:
    identity = await world.site.identity(role, node)
    return identity.certificate.public_bytes(Encoding.PEM).decode()


async def test_leaves_of_the_peer_are_taken_newest_first_and_two_at_most(world: World) -> None:
    world.liar.pems = [await leaf_of(world, "target", "s") for _ in range(3)]
    leaves = await world.trust.leaves("s", "target")
    assert [leaf.public_bytes(Encoding.PEM).decode() for leaf in leaves] == world.liar.pems[:2]


@pytest.mark.parametrize(("role", "node"), [("target", "u"), ("gateway", "s")])
@pytest.mark.parametrize("place", [0, 1])
async def test_leaf_of_another_node_or_role_is_refused(
    world: World, role: str, node: str, place: int
) -> None:
    world.liar.pems = [await leaf_of(world, "target", "s"), await leaf_of(world, "target", "s")]
    world.liar.pems[place] = await leaf_of(world, role, node)
    assert await reason_of(world.trust.leaves("s", "target")) == "peer.mismatch"


async def test_leaf_that_the_authority_did_not_issue_now_is_refused(world: World) -> None:
    stranger = await Site().identity("target", "s")
    world.liar.pems = [stranger.certificate.public_bytes(Encoding.PEM).decode()]
    assert await reason_of(world.trust.leaves("s", "target")) == "certificate.issuer"
    identity = await world.site.identity("target", "s")
    expired = world.site.authority.issue(
        identity.subject,
        identity.keys.tls.public_key(),
        now=utc_now() - dt.timedelta(days=1),
    )
    world.liar.pems = [expired.public_bytes(Encoding.PEM).decode()]
    assert await reason_of(world.trust.leaves("s", "target")) == "certificate.expired"
    world.liar.pems = ["no certificate"]
    assert await reason_of(world.trust.leaves("s", "target")) == "certificate.profile"
    world.liar.pems = []
    assert await reason_of(world.trust.leaves("s", "target"), UnavailableError) == "peer.unattested"


# Authorizations of peers


async def test_verdicts_are_taken_in_the_order_that_was_asked(world: World) -> None:
    def verdicts(request: trust_pb2.AuthorizePeersRequest) -> trust_pb2.Authorization:
        answer = world.liar.truth(request)
        for number, verdict in enumerate(answer.verdicts):
            verdict.refusal = "x" * number
        return answer

    world.liar.verdicts = verdicts
    others = [PeerIncarnation(spiffe_id=f"p{i}", incarnation=bytes(16)) for i in range(3)]
    assert await world.authorize(others) == ["", "x", "xx"]


def change(name: str, answer: trust_pb2.Authorization) -> None:
    """Turn a true answer into one to another request."""
    verdict = answer.verdicts[0]
    if name == "nonce":
        answer.nonce = OTHER_NONCE
    elif name == "no nonce":
        answer.nonce = b""
    elif name == "asker":
        answer.subject.spiffe_id = "spiffe://sealane/gateway/other"
    elif name == "asker's incarnation":
        answer.subject.incarnation = bytes(16)
    elif name == "peer":
        verdict.peer.spiffe_id = "spiffe://sealane/gateway/other"
    elif name == "incarnation":
        verdict.peer.incarnation = bytes(16)
    elif name == "volume":
        verdict.peer.volume_id = "w"
    elif name == "right":
        verdict.peer.read_only = True
    elif name == "fewer":
        del answer.verdicts[1]
    elif name == "more":
        answer.verdicts.append(verdict)
    elif name == "order":
        verdicts = [*answer.verdicts]
        del answer.verdicts[:]
        answer.verdicts.extend(reversed(verdicts))


@pytest.mark.parametrize(
    "name",
    [
        *("nonce", "no nonce", "asker", "asker's incarnation", "peer", "incarnation", "volume"),
        *("right", "fewer", "more", "order"),
    ],
)
async def test_authorization_that_answers_another_question_is_refused(
    world: World, name: str
) -> None:
    def verdicts(request: trust_pb2.AuthorizePeersRequest) -> trust_pb2.Authorization:
        answer = world.liar.truth(request)
        change(name, answer)
        return answer

    world.liar.verdicts = verdicts
    other = PeerIncarnation(spiffe_id="spiffe://sealane/gateway/k", incarnation=bytes(16))
    assert await reason_of(world.authorize([PEER, other])) == "authorization.mismatch"


async def test_authorization_of_an_earlier_question_is_refused(world: World) -> None:
    """An answer recorded before a revocation is replayed after it."""
    recorded: list[trust_pb2.Authorization] = []

    def record(request: trust_pb2.AuthorizePeersRequest) -> trust_pb2.Authorization:
        recorded.append(world.liar.truth(request))
        return recorded[0]

    world.liar.verdicts = record
    await world.authorize()
    asked = world.trust.authorize(OTHER_NONCE, [PEER])
    assert await reason_of(asked) == "authorization.mismatch"


async def test_authorization_that_the_authority_did_not_sign_is_refused(world: World) -> None:
    world.liar.signer = other_authority()
    assert await reason_of(world.authorize()) == "authorization.signature"
    world.liar.signer = None
    world.liar.sign = CertificateAuthority.sign_descriptor
    assert await reason_of(world.authorize()) == "authorization.signature"
    world.liar.sign = lambda *_: b""
    assert await reason_of(world.authorize()) == "authorization.signature"


async def test_authorization_that_can_not_be_read_is_refused(world: World) -> None:
    world.liar.verdicts = lambda _: b"\xff"
    assert await reason_of(world.authorize()) == "authorization.malformed"


# Descriptors


async def register(broker: BrokerClient, **options: str) -> Any:
    return await broker.register(
        request_id="r", display_name="", size_bytes=1 << 20, target_node="s", **options
    )


CALLS: dict[str, Callable[[BrokerClient], Any]] = {
    "get": lambda broker: broker.descriptor("v"),
    "fill": lambda broker: broker.finish_filling("v"),
    "begin resize": lambda broker: broker.begin_resize("v", size_bytes=1 << 20),
    "finish resize": lambda broker: broker.finish_resize("v", size_bytes=1 << 20),
    "share": lambda broker: broker.share("v", tenant="u", read_only=True),
    "unshare": lambda broker: broker.unshare("v", tenant="u"),
    "register": register,
    "list": lambda broker: broker.descriptors(page_size=0, page_token=""),
}


@pytest.mark.parametrize("name", CALLS)
async def test_descriptor_of_the_volume_is_taken(world: World, name: str) -> None:
    answer = await CALLS[name](world.broker)
    assert V in (answer, *(answer if isinstance(answer, tuple) else ())) or name in {
        "begin resize",
        "list",
    }


@pytest.mark.parametrize("name", [name for name in CALLS if name not in {"register", "list"}])
async def test_descriptor_of_another_volume_is_refused(world: World, name: str) -> None:
    world.liar.descriptor = OTHER
    assert await reason_of(CALLS[name](world.broker)) == "volume.descriptor.mismatch"


@pytest.mark.parametrize(
    "changes",
    [{"mode": "off"}, {"mode": "local", "third_party": "array"}, {"sector_count": 255}],
    ids=lambda changes: next(iter(changes)),
)
async def test_volume_of_another_kind_than_was_asked_for_is_refused(
    world: World, changes: dict[str, Any]
) -> None:
    """For example, a volume without freshness instead of one with it."""
    values = {"volume_id": "v", "sector_count": 256, "target_node": "s", **changes}
    world.liar.descriptor = broker_pb2.VolumeDescriptor(**values)
    assert await reason_of(register(world.broker)) == "volume.descriptor.mismatch"
    world.liar.descriptor = broker_pb2.VolumeDescriptor(**{**values, "sector_count": 512})
    options = {name: value for name, value in changes.items() if name != "sector_count"}
    descriptor, _ = await register(world.broker, **options)
    assert descriptor.sector_count == 512


@pytest.mark.parametrize("name", CALLS)
async def test_descriptor_that_the_authority_did_not_sign_is_refused(
    world: World, name: str
) -> None:
    world.liar.signer = other_authority()
    assert await reason_of(CALLS[name](world.broker)) == "volume.descriptor.signature"


# Keys and leases


@pytest.mark.parametrize(
    "context",
    [
        {"purpose": "device secret"},
        {"recipient": "spiffe://sealane/gateway/other"},
        {"incarnation": bytes(16)},
        {"request_id": bytes(16)},
        {"volume_id": "w"},
        {"key_epoch": 2},
        {"beside": b"x"},
    ],
    ids=lambda context: next(iter(context)),
)
async def test_secret_that_answers_another_question_is_refused(
    world: World, context: dict[str, Any]
) -> None:
    world.liar.context = context
    assert await reason_of(world.broker.key(V, key_epoch=3)) == "secret.signature"
    assert await reason_of(world.broker.lease(V)) == "secret.signature"


async def test_secrets_of_the_broker_are_taken_and_of_no_other(world: World) -> None:
    assert await world.broker.key(V, key_epoch=3) == bytes(32)
    lease = await world.broker.lease(V)
    assert (lease.arena, lease.lease_id) == ((1, 2), 9)
    world.liar.signer = other_authority()
    assert await reason_of(world.broker.key(V, key_epoch=3)) == "secret.signature"
    assert await reason_of(world.broker.lease(V)) == "secret.signature"


async def test_secret_sealed_to_another_key_is_refused(world: World) -> None:
    other = await world.site.identity("gateway", "g")
    truthful = world.liar.client
    world.liar.client = other
    world.liar.context = {
        "recipient": world.identity.subject.spiffe_id,
        "incarnation": world.identity.keys.incarnation,
    }
    assert await reason_of(world.broker.key(V, key_epoch=3)) == "secret.sealed"
    assert truthful is world.identity


def changed(**values: Any) -> broker_pb2.Lease:
    lease = broker_pb2.Lease.FromString(LEASE.SerializeToString())
    for name, value in values.items():
        setattr(lease, name, value)
    return lease


@pytest.mark.parametrize(
    "values",
    [
        {"volume_id": "w"},
        {"key_epoch": 2},
        {"broker_instance": 2},
        {"start_epoch": 3},
        {"return_token": b""},
        {"return_token": bytes(RETURN_TOKEN_BYTES + 1)},
    ],
    ids=["volume", "key epoch", "broker", "start", "no token", "long token"],
)
async def test_lease_that_is_not_the_one_asked_for_is_refused(
    world: World, values: dict[str, Any]
) -> None:
    """It is signed and sealed for this request, but its contents differ."""
    world.liar.lease = changed(**values)
    assert await reason_of(world.broker.lease(V), LeaseError) == "lease.mismatch"


async def test_lease_of_another_arena_than_is_shown_is_refused(world: World) -> None:
    for shown in ({"broker_instance": 2}, {"start_epoch": 3}):
        world.liar.shown = shown
        assert await reason_of(world.broker.lease(V)) == "secret.signature"


async def test_lease_of_no_possible_arena_is_refused(world: World) -> None:
    for shown in ({"broker_instance": 1 << 16}, {"start_epoch": 1 << 24}):
        world.liar.shown = shown
        assert await reason_of(world.broker.lease(V), LeaseError) == "lease.malformed"
    world.liar.shown, world.liar.lease = {}, b"\xff"
    assert await reason_of(world.broker.lease(V), LeaseError) == "lease.malformed"
