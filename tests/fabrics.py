"""Fabrics in one process, over real gRPC on loopback; the peer names itself in metadata."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from sealane.daemon.calls import CallInterceptor
from sealane.daemon.fabric.service import (
    Answer,
    Established,
    EstablishWith,
    FabricService,
    Offer,
    Peer,
)
from sealane.daemon.fabric.servicer import (
    PeerChannel,
    SessionPeerServicer,
    SessionsServicer,
    establish_over,
)
from sealane.daemon.fabric.settings import FabricSettings
from sealane.daemon.metrics import Metrics
from sealane.daemon.ports import PeerIncarnation
from sealane.protocol.v1.sessions_pb2_grpc import (
    SessionsStub,
    add_SessionPeerServicer_to_server,
    add_SessionsServicer_to_server,
)

RATE_MAX = 400_000_000
REGION_MAX = 8 << 20


@dataclass
class Fabric:
    name: str
    service: FabricService
    sessions: Any
    address: str


def settings(directory: Path, name: str) -> FabricSettings:
    return FabricSettings(
        ring_socket=directory / f"{name}.sock",
        rate_max_bits_per_second=RATE_MAX,
        region_bytes_max=REGION_MAX,
        sessions_max=4,
        establish_timeout_seconds=5,
    )


def named_peer(name: str) -> Callable[..., contextlib.AbstractAsyncContextManager[Any]]:
    """What part of the control plane does by certificate, done by metadata in these tests."""

    class Name(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            metadata = grpc.aio.Metadata(("node", name))
            return await continuation(details._replace(metadata=metadata), request)

    @contextlib.asynccontextmanager
    async def connect(address: str, node: str) -> AsyncIterator[PeerChannel]:
        async with grpc.aio.insecure_channel(address, interceptors=[Name()]) as channel:
            yield PeerChannel(
                channel=channel, certificate_digest=certificate_digest(name), peer=incarnation(node)
            )

    return connect


def certificate_digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def incarnation(node: str) -> PeerIncarnation:
    return PeerIncarnation(spiffe_id=f"spiffe://sealane/fabric/{node}", incarnation=bytes(16))


def identify(context: Any) -> Peer:
    node = str(dict(context.invocation_metadata())["node"])
    return Peer(
        node=node, certificate_digest=certificate_digest(node), incarnation=incarnation(node)
    )


Change = Callable[[Offer], Offer]
ChangeAnswer = Callable[[Answer], Answer]


@contextlib.asynccontextmanager
async def fabric(
    config: FabricSettings,
    name: str,
    *,
    change_offer: Change = lambda offer: offer,
    change_answer: ChangeAnswer = lambda answer: answer,
    change_digest: Callable[[bytes], bytes] = lambda digest: digest,
) -> AsyncIterator[Fabric]:
    """Run one fabric; its exchange may be tampered with on the way out or back."""
    honest: EstablishWith = establish_over(named_peer(name))

    async def establish(address: str, node: str, offer: Offer) -> Established:
        established = await honest(address, node, change_offer(offer))
        return replace(
            established,
            answer=change_answer(established.answer),
            certificate_digest=change_digest(established.certificate_digest),
        )

    service = FabricService(config, node=name, establish_with=establish)
    server = grpc.aio.server(interceptors=[CallInterceptor(Metrics(), None)])
    add_SessionsServicer_to_server(SessionsServicer(service), server)
    add_SessionPeerServicer_to_server(SessionPeerServicer(service, identify=identify), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    async with service.running():
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield Fabric(name, service, SessionsStub(channel), address)
        finally:
            await server.stop(0)
