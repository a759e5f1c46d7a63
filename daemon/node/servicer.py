"""gRPC service `Nodes`: identity and state of this daemon; Unix socket only."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf import timestamp_pb2

from sealane import __version__
from sealane.crypto.roles import Role
from sealane.daemon.node.drain import DrainState, NodeDrain
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.target_view import TargetView
from sealane.daemon.runtime.authorizers import RESULT_KEY, VERIFIER_KEY, Context
from sealane.daemon.runtime.space import Space
from sealane.protocol.v1 import nodes_pb2, nodes_pb2_grpc

_USES_MAX: Final = 100
FABRIC_ADDRESS: Final = "fabric_control"
_DRAIN_STATES: Final = {
    DrainState.SERVING: nodes_pb2.NodeDrain.SERVING,
    DrainState.DRAINING: nodes_pb2.NodeDrain.DRAINING,
    DrainState.OVERDUE: nodes_pb2.NodeDrain.OVERDUE,
    DrainState.DRAINED: nodes_pb2.NodeDrain.DRAINED,
}


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
        drain: NodeDrain,
        seen_by: Callable[[Context], int | None],
        targets: Callable[[], Sequence[TargetView]] = tuple,
    ) -> None:
        """Show the node. Jobs, whom `seen_by` names, see less.

        `spaces` and `targets` don't block.
        """
        self._targets = targets
        self._node = node
        self._roles = roles
        self._identities = identities
        self._addresses = addresses
        self._evidence = evidence
        self._is_development = is_development
        self._started = started
        self._drain = drain
        self._seen_by = seen_by
        self._spaces = spaces

    async def GetNode(self, request: nodes_pb2.GetNodeRequest, context: Context) -> nodes_pb2.Node:
        """Return the node."""
        if self._seen_by(context) is None:
            answer = self._shown(self._roles, self._addresses)
            answer.drain.CopyFrom(_drain_message(self._drain))
            answer.spaces.extend(map(_space, self._spaces()))
            answer.targets.extend(map(_target, self._targets()))
            return answer
        # Jobs learn of this node what its peers know: name, address, certificate, evidence.
        address = self._addresses.get(FABRIC_ADDRESS)
        return self._shown(
            [role for role in self._roles if role == Role.FABRIC],
            {} if address is None else {FABRIC_ADDRESS: address},
        )

    def _shown(self, roles: Sequence[str], addresses: Mapping[str, str]) -> nodes_pb2.Node:
        answer = nodes_pb2.Node(
            node=self._node,
            version=__version__,
            roles=roles,
            evidence_driver=self._evidence,
            development=self._is_development,
            addresses=addresses,
            start_time=_timestamp(self._started),
        )
        # A barred role has no certificate.
        shown = [identity for identity in self._identities if identity.role in roles]
        certified = [identity for identity in shown if identity.has_certificate]
        if certified:
            earliest = min(i.certificate.not_valid_after_utc for i in certified)
            answer.certificate_expire_time.CopyFrom(_timestamp(earliest))
        answer.identities.extend(map(_role_identity, certified))
        return answer

    async def DrainNode(
        self, request: nodes_pb2.DrainNodeRequest, context: Context
    ) -> nodes_pb2.NodeDrain:
        """Begin to drain; `GetNode` shows the progress."""
        await self._drain.begin(request.timeout_seconds)
        return _drain_message(self._drain)

    async def UndrainNode(
        self, request: nodes_pb2.UndrainNodeRequest, context: Context
    ) -> nodes_pb2.NodeDrain:
        """End the drain."""
        await self._drain.end()
        return _drain_message(self._drain)


def _drain_message(drain: NodeDrain) -> nodes_pb2.NodeDrain:
    uses = drain.uses()
    answer = nodes_pb2.NodeDrain(
        state=_DRAIN_STATES[drain.state],
        seconds_left=drain.seconds_left(),
        uses=[
            nodes_pb2.DrainUse(role=use.role, name=use.name, detail=use.detail, ends=use.ends)
            for use in uses[:_USES_MAX]
        ],
        uses_total=len(uses),
    )
    if drain.started is not None:
        answer.start_time.CopyFrom(_timestamp(drain.started))
    return answer


def _role_identity(identity: Identity) -> nodes_pb2.RoleIdentity:
    metadata = identity.metadata
    return nodes_pb2.RoleIdentity(
        role=identity.role,
        certificate=identity.certificate.public_bytes(Encoding.DER),
        token=str(metadata.get(RESULT_KEY, "")),
        verifier_certificate=bytes(metadata.get(VERIFIER_KEY, b"")),  # type: ignore[arg-type]
        trust_anchors=[each.public_bytes(Encoding.DER) for each in identity.anchors.certificates],
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


def _target(view: TargetView) -> nodes_pb2.Target:
    return nodes_pb2.Target(
        node=view.node,
        address=view.address,
        state=view.state,
        reason=view.reason or "",
        detail=view.detail,
        free_bytes=view.free_bytes,
        capacity_bytes=view.capacity_bytes,
    )


def _timestamp(moment: dt.datetime) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp
