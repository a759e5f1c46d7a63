"""An authority, roles with real mutual TLS, and a server with simple calls."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cryptography import x509

from patience import PATIENCE_SECONDS
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.attestation.ear import AttestationResult
from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.daemon.node.authorizations import NONCE_BYTES, Authorizations
from sealane.daemon.node.channels import UNATTESTED
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.authorizers import Admit, Authorizer, Context
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import bind_tcp, new_server, running
from sealane.daemon.target.data_path import Target
from sealane.errors import Error, UnavailableError
from sealane.protocol.v1 import storage_pb2, storage_pb2_grpc
from trust.results import issued


async def everybody(caller: Subject, leaf: x509.Certificate, result: AttestationResult) -> bool:
    """Admit every caller."""
    return False


async def authorize_all(nonce: bytes, peers: Sequence[PeerIncarnation]) -> Sequence[str]:
    """Answer as a broker without revocations."""
    assert len(nonce) == NONCE_BYTES
    return [""] * len(peers)


def all_authorized(target: Target) -> Authorizations:
    """Authorize every gateway of `target`."""
    return Authorizations(ask=authorize_all, uses=target.gateways, lost=target.fence_gateway)


@contextlib.asynccontextmanager
async def running_authorizations(authorizations: Authorizations) -> AsyncIterator[None]:
    """Keep authorizations renewed until the end of the block."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(authorizations.run())
        try:
            yield
        finally:
            running.cancel()


@dataclass
class Echo(storage_pb2_grpc.StorageServicer):
    """Echoes requests; streams until the end of the test."""

    calls: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetNamespace(
        self, request: storage_pb2.GetNamespaceRequest, context: Context
    ) -> storage_pb2.Namespace:
        self.calls += 1
        if self.held is not None and request.volume_id == "held":
            self.held.set()
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return storage_pb2.Namespace(volume_id=request.volume_id)

    async def WatchEvents(
        self, request: storage_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[storage_pb2.VolumeEvent]:
        yield storage_pb2.VolumeEvent(kind="first")
        await self.released.wait()
        yield storage_pb2.VolumeEvent(kind="last")


@dataclass
class Site:
    """The leaves of all nodes, as the broker would report them."""

    authority: CertificateAuthority = field(
        default_factory=lambda: CertificateAuthority.create(broker="b", now=utc_now())
    )
    leaves: dict[tuple[str, str], list[x509.Certificate]] = field(default_factory=dict)
    refusal: Error | None = None
    refused: asyncio.Event = field(default_factory=asyncio.Event)
    questions: int = 0
    stop: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def identity(
        self, role: str, node: str, *, lifetime: Callable[[], dt.datetime] = utc_now
    ) -> Identity:
        """Return a newly enrolled role; `lifetime` returns the time its leaves are issued."""

        async def issue(keys: Keys) -> Issued:
            if self.refusal is not None:
                self.refused.set()
                raise self.refusal
            subject = Subject(
                node=node,
                role=role,
                tenant="t",
                incarnation=keys.incarnation,
                kem_public_key=keys.kem_public,
            )
            now = lifetime()
            leaf = self.authority.issue(subject, keys.tls.public_key(), now=now)
            self.leaves[node, role] = [leaf, *self.leaves.get((node, role), [])[:1]]
            return issued(self.authority, subject, leaf, now=now)

        identity = Identity(
            node=node,
            role=role,
            anchors=TrustAnchors(self.authority.certificate),
            obtain=issue,
            metrics=Metrics(),
        )
        identity.find_peer = self.find
        await identity.renew()
        self.stop.push_async_callback(identity.channels.close)
        return identity

    async def find(self, node: str, role: str) -> Sequence[x509.Certificate]:
        """Answer as `GetPeer` does."""
        self.questions += 1
        try:
            return self.leaves[node, role]
        except KeyError:
            raise UnavailableError(UNATTESTED, "not attested") from None

    async def serve(
        self, identity: Identity, servicer: Echo, *, admit: Admit = everybody, listen: str = ""
    ) -> str:
        """Serve `servicer` as `identity`; return the address."""
        authorizer = Authorizer(
            TrustAnchors(self.authority.certificate),
            server=identity.spiffe_id,
            admit=admit,
            metrics=Metrics(),
        )
        server = new_server(Metrics(), authorizer)
        storage_pb2_grpc.add_StorageServicer_to_server(servicer, server)
        credentials = identity.server_credentials(mutual=True)
        address = bind_tcp(server, listen or "127.0.0.1:0", credentials, key="test")
        await self.stop.enter_async_context(running(server))
        return address


async def ask(identity: Identity, address: str, text: str = "x", *, node: str = "s") -> str:
    """Call target `node` once and return its answer."""
    async with identity.channel(address, node, "target") as channel:
        answer = await storage_pb2_grpc.StorageStub(channel).GetNamespace(
            storage_pb2.GetNamespaceRequest(volume_id=text), timeout=PATIENCE_SECONDS
        )
    return answer.volume_id
