"""gRPC face of `Nodes`: what this daemon is; Unix socket only."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import datetime as dt
from collections.abc import Mapping, Sequence

from google.protobuf import timestamp_pb2

from sealane import __version__
from sealane.daemon.calls import Context
from sealane.daemon.identity import Identity
from sealane.protocol.v1 import nodes_pb2, nodes_pb2_grpc


class NodesServicer(nodes_pb2_grpc.NodesServicer):
    """Answers `sealanectl status`."""

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
    ) -> None:
        self._node = node
        self._roles = roles
        self._identities = identities
        self._addresses = addresses
        self._evidence = evidence
        self._is_development = is_development
        self._started = started

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
        if self._identities:
            earliest = min(i.certificate.not_valid_after_utc for i in self._identities)
            answer.certificate_expire_time.CopyFrom(_timestamp(earliest))
        return answer


def _timestamp(moment: dt.datetime) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp
