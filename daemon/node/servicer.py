"""gRPC service `Nodes`: identity and state of this daemon; Unix socket only."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import asyncio
import datetime as dt
from collections.abc import Callable, Mapping, Sequence

from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf import timestamp_pb2

from sealane import __version__
from sealane.daemon.node.identity import Identity
from sealane.daemon.runtime.calls import RESULT_KEY, VERIFIER_KEY, Context
from sealane.daemon.runtime.space import Space
from sealane.protocol.v1 import nodes_pb2, nodes_pb2_grpc


class NodesServicer(nodes_pb2_grpc.NodesServicer):
    """Answers `sealanectl status` and `attest show self`."""

    def __init__(
        self,
        *,
        node: str,
        roles: Sequence[str],
        identities: Sequence[Identity],
        addresses: Mapping[str, str],
        evidence: str,
        is_development: bool,
        started: dt.datetime,
        spaces: Callable[[], Sequence[Space]],
    ) -> None:
        self._node = node
        self._roles = roles
        self._identities = identities
        self._addresses = addresses
        self._evidence = evidence
        self._is_development = is_development
        self._started = started
        self._spaces = spaces

    async def GetNode(self, request: nodes_pb2.GetNodeRequest, context: Context) -> nodes_pb2.Node:
        """Return the node."""
        answer = nodes_pb2.Node(
            node=self._node,
            version=__version__,
            roles=self._roles,
            evidence_driver=self._evidence,
            development=self._is_development,
            addresses=self._addresses,
            start_time=_timestamp(self._started),
        )
        # A barred role has no certificate.
        certified = [identity for identity in self._identities if identity.has_certificate]
        if certified:
            earliest = min(i.certificate.not_valid_after_utc for i in certified)
            answer.certificate_expire_time.CopyFrom(_timestamp(earliest))
        answer.identities.extend(map(_shown, certified))
        answer.spaces.extend(map(_space, await asyncio.to_thread(self._spaces)))
        return answer


def _shown(identity: Identity) -> nodes_pb2.RoleIdentity:
    metadata = identity.metadata
    return nodes_pb2.RoleIdentity(
        role=identity.role,
        certificate=identity.certificate.public_bytes(Encoding.DER),
        token=str(metadata.get(RESULT_KEY, "")),
        verifier_certificate=bytes(metadata.get(VERIFIER_KEY, b"")),  # type: ignore[arg-type]
        trust_anchor=identity.anchor.public_bytes(Encoding.DER),
    )


def _space(space: Space) -> nodes_pb2.Space:
    return nodes_pb2.Space(
        place=space.place,
        directory=str(space.directory),
        capacity_bytes=space.capacity,
        free_bytes=space.free,
        reserve_bytes=space.reserve,
        promised_bytes=space.promised,
        state=space.state,
    )


def _timestamp(moment: dt.datetime) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp
