"""Fabrics in one process, over real gRPC on loopback; the peer names itself in metadata."""

import contextlib
import functools
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from patience import PATIENCE_SECONDS
from permits import permitted
from sealane.crypto.certificates import Subject
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.fabric.establishment import Answer, Offer, Result
from sealane.daemon.fabric.responder import Peer
from sealane.daemon.fabric.service import FabricService, PeerLink, ReachPeer
from sealane.daemon.fabric.servicer import (
    PeerChannel,
    SessionPeerServicer,
    SessionsServicer,
    reach_over,
)
from sealane.daemon.fabric.settings import FabricSettings
from sealane.daemon.runtime.calls import CallInterceptor
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import VerificationError
from sealane.protocol.v1.sessions_pb2_grpc import (
    SessionsStub,
    add_SessionPeerServicer_to_server,
    add_SessionsServicer_to_server,
)
from sealane.transport.establish import Shown

RATE_MAX = 400_000_000
REGION_MAX = 8 << 20


@dataclass
class Fabric:
    name: str
    service: FabricService
    sessions: Any
    address: str

    @property
    def job_token(self) -> bytes:
        """Return the token of this process as a job."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            return self.service.jobs.introduce(ours)


def settings(directory: Path, name: str) -> FabricSettings:
    return FabricSettings(
        ring_socket=directory / f"{name}.sock",
        rate_max_bits_per_second=RATE_MAX,
        region_bytes_max=REGION_MAX,
        sessions_max=4,
        establish_timeout_seconds=PATIENCE_SECONDS,
    )


def named_peer(name: str) -> Callable[..., contextlib.AbstractAsyncContextManager[Any]]:
    """Return the peer named in metadata; the control plane takes it from a certificate."""

    class Name(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            metadata = grpc.aio.Metadata(("node", name))
            return await continuation(details._replace(metadata=metadata), request)

    @contextlib.asynccontextmanager
    async def connect(address: str, node: str) -> AsyncIterator[PeerChannel]:
        async with grpc.aio.insecure_channel(address, interceptors=[Name()]) as channel:
            yield PeerChannel(
                channel=channel,
                shown=shown(name),
                subject=subject(node),
                check_result=lambda result: check_named(result, node),
            )

    return connect


def certificate_digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def result(name: str) -> Result:
    return Result(token=f"result of {name}", verifier=b"v")


def shown(name: str) -> Shown:
    return Shown(certificate=certificate_digest(name), token=result(name).thumbprint)


def check_named(found: Result, node: str) -> Shown:
    if not found.token.endswith(node):
        raise VerificationError("token.subject", "of another node")
    return Shown(certificate=certificate_digest(node), token=found.thumbprint)


@functools.cache
def kem(node: str) -> X25519KemKey:
    """Return the KEM key of a node, the same in all processes of a test."""
    return X25519KemKey(X25519PrivateKey.from_private_bytes(certificate_digest(f"kem {node}")))


def subject(node: str) -> Subject:
    """Return the subject of a node: `x-of-t` has tenant t, other names the unnamed tenant."""
    return Subject(
        node=node,
        role="fabric",
        tenant=node.rpartition("-of-")[2] if "-of-" in node else "",
        incarnation=bytes(16),
        kem_public_key=kem(node).public_key,
    )


def identify(context: Any) -> Peer:
    node = str(dict(context.invocation_metadata())["node"])
    return Peer(subject=subject(node), shown=shown(node))


Change = Callable[[Offer], Offer]
ChangeAnswer = Callable[[Answer], Answer]


@contextlib.asynccontextmanager
async def fabric(
    config: FabricSettings,
    name: str,
    *,
    change_offer: Change = lambda offer: offer,
    change_answer: ChangeAnswer = lambda answer: answer,
    change_shown: Callable[[Shown], Shown] = lambda shown: shown,
    change_subject: Callable[[Subject], Subject] = lambda subject: subject,
    control: str | None = None,
) -> AsyncIterator[Fabric]:
    """Run a fabric; requests and answers of its exchange may be tampered with.

    Its control address is `control`; by default it uses the data address.
    """
    honest: ReachPeer = reach_over(named_peer(name))

    @contextlib.asynccontextmanager
    async def reach(address: str, node: str) -> AsyncIterator[PeerLink]:
        async with honest(address, node) as link:

            async def establish(offer: Offer) -> Answer:
                return change_answer(await link.establish(change_offer(offer)))

            yield replace(
                link,
                shown=change_shown(link.shown),
                subject=change_subject(link.subject),
                establish=establish,
            )

    service = FabricService(
        config,
        own=lambda: subject(name),
        own_result=lambda: (certificate_digest(name), result(name)),
        kem=kem(name),
        reach_peer=reach,
        permit=lambda _: permitted(),
    )
    server = grpc.aio.server(interceptors=[CallInterceptor(Metrics(), None)])
    add_SessionsServicer_to_server(
        SessionsServicer(service, ring_socket=str(config.ring_socket)), server
    )
    add_SessionPeerServicer_to_server(SessionPeerServicer(service, identify=identify), server)
    first = control or config.listen_data[0]
    host = f"[{first}]" if ":" in first else first
    address = f"{host}:{server.add_insecure_port(f'{host}:0')}"
    async with service.running():
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield Fabric(name, service, SessionsStub(channel), address)
        finally:
            await server.stop(0)
