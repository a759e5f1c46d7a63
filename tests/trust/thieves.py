"""A thief with a node's TLS key, leaf and attestation result, but no key that opens secrets."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from patience import PATIENCE_SECONDS
from sealane.crypto.certificates import server_name
from sealane.daemon.node.channels import open_channel
from sealane.errors import Error
from sealane.protocol.status import error_of
from trust.insider import Insider

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class LeafThief:
    """Makes calls as the victim over its own connection."""

    victim: Insider

    @contextlib.asynccontextmanager
    async def channel(self, address: str, node: str, role: str) -> AsyncIterator[grpc.aio.Channel]:
        """Open a channel to `role` of `node`."""
        identity = self.victim.identity
        pins = [] if role == "broker" else await self.victim.trust.leaves(node, role)
        roots = [leaf.public_bytes(Encoding.PEM) for leaf in pins or identity.anchors.certificates]
        credentials = grpc.ssl_channel_credentials(
            root_certificates=b"".join(roots),
            private_key=identity.keys.tls.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
            ),
            certificate_chain=identity.certificate.public_bytes(Encoding.PEM),
        )
        metadata = tuple(identity.metadata.items())
        async with open_channel(address, server_name(node, role), credentials, metadata) as channel:
            yield channel


async def outcome(
    channel: grpc.aio.Channel,
    method: str,
    request: bytes,
    *,
    metadata: Metadata = (),
    is_streamed: bool = False,
) -> str:
    """Make a call with these bytes; return the reason of its refusal, or an empty string."""
    try:
        if is_streamed:
            stream = channel.unary_stream(method)(request, metadata=metadata)
            await anext(aiter(stream))
        else:
            await channel.unary_unary(method)(request, metadata=metadata, timeout=PATIENCE_SECONDS)
    except grpc.aio.AioRpcError as refused:
        error: Error = error_of(refused, peer="the server")
        return error.reason
    return ""
