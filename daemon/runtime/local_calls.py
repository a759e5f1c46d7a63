"""Which calls on the Unix sockets are whose: one table of all methods, and its check.

A method without a row is refused to everyone. `PEERS` marks the methods that nodes call over
mutual TLS (`authorizers.ALLOWED_ROLES`): no local caller may make them.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final

import structlog

from sealane.daemon.runtime.access import Parties
from sealane.daemon.runtime.origins import Origins
from sealane.daemon.runtime.parties import Party
from sealane.errors import VerificationError


class CallClass(StrEnum):
    """Who may make a call."""

    OPERATE = "operate"
    """Operators: it changes something, or returns a secret."""
    READ = "read"
    """Operators and readers."""
    USE = "use"
    """Operators and jobs: it uses the fabric, for the calling job."""
    OWN = "own"
    """Operators and readers, who see everything, and jobs, who see what is their user's."""
    PEERS = "peers"
    """Nobody on this machine."""


ALLOWED_PARTIES: Final[Mapping[CallClass, Parties]] = {
    CallClass.OPERATE: frozenset({Party.OPERATOR}),
    CallClass.READ: frozenset({Party.OPERATOR, Party.READER}),
    CallClass.USE: frozenset({Party.OPERATOR, Party.JOB}),
    CallClass.OWN: frozenset({Party.OPERATOR, Party.JOB, Party.READER}),
    CallClass.PEERS: frozenset(),
}


def _rows(call_class: CallClass, service: str, methods: str) -> Iterable[tuple[str, CallClass]]:
    return ((f"/{service}/{method}", call_class) for method in methods.split())


_OPERATE, _READ, _PEERS = CallClass.OPERATE, CallClass.READ, CallClass.PEERS
CALL_CLASSES: Final[Mapping[str, CallClass]] = dict(
    row
    for rows in (
        _rows(CallClass.OWN, "sealane.v1.Nodes", "GetNode"),
        _rows(_OPERATE, "sealane.v1.Nodes", "DrainNode UndrainNode"),
        _rows(CallClass.USE, "sealane.v1.Sessions", "ListenSession OpenSession CloseSession"),
        _rows(
            CallClass.OWN,
            "sealane.v1.Sessions",
            "GetSession ListSessions WatchSession GetFabric",
        ),
        _rows(_OPERATE, "sealane.v1.Sessions", "DrainFabric"),
        _rows(_READ, "sealane.v1.Volumes", "GetVolume ListVolumes WatchVolume"),
        _rows(
            _OPERATE,
            "sealane.v1.Volumes",
            "CreateVolume DeleteVolume AttachVolume TakeOverVolume DetachVolume ShareVolume"
            " UnshareVolume StartVolumeJob ChangeVolumeJob ResizeVolume CloneVolume",
        ),
        _rows(_READ, "sealane.v1.Offload", "ListAccelerators GetAccelerator"),
        _rows(
            _OPERATE,
            "sealane.v1.Offload",
            "ProbeAccelerator EnableAccelerator DisableAccelerator DrainAccelerator",
        ),
        _rows(_READ, "sealane.v1.Subsystems", "ListSubsystems GetSubsystem"),
        _rows(_READ, "sealane.v1.Policies", "GetPolicy GetPolicyOwners"),
        _rows(
            _OPERATE,
            "sealane.v1.Policies",
            "ApplyPolicy ReplacePolicyOwners ResetPolicyOwners",
        ),
        _rows(_READ, "sealane.v1.AuditLog", "ExportAudit"),
        _rows(
            _READ,
            "sealane.v1.Operator",
            "ListRegisteredVolumes ListLeases GetEncryptionKeys GetTenantKey ListTenantKeys"
            " GetAuthorities",
        ),
        _rows(
            _OPERATE,
            "sealane.v1.Operator",
            "RotateVolumeKey RotateEncryptionKey RotateRecordKey PrepareTenantKey RotateTenantKey"
            " ReplaceAuthority TakeSnapshot",
        ),
        _rows(_READ, "sealane.v1.DeviceRegistry", "ListDevices GetDevice"),
        _rows(_OPERATE, "sealane.v1.DeviceRegistry", "InitializeDevice MoveDevice ForgetDevice"),
        _rows(_READ, "sealane.v1.Membership", "ListNodes"),
        _rows(_OPERATE, "sealane.v1.Membership", "RevokeNode RestoreNode"),
        _rows(_PEERS, "sealane.v1.Attestation", "GetChallenge Attest"),
        _rows(_PEERS, "sealane.v1.CallKeys", "GetCallKey"),
        _rows(_PEERS, "sealane.v1.Trust", "GetPeer AuthorizePeers"),
        _rows(_PEERS, "sealane.v1.SessionPeer", "Establish"),
        _rows(
            _PEERS,
            "sealane.v1.Storage",
            "CreateNamespace DeleteNamespace ResizeNamespace OpenQueue ReleaseFailOverGroup"
            " GetNamespace BatchGetNamespaces GetTarget WatchEvents StartJob ChangeJob",
        ),
        _rows(
            _PEERS,
            "sealane.v1.Devices",
            "OpenDevice ConfirmDevice AdvanceAnchor CloseDevice ReportFindings ReportTakeOver",
        ),
        _rows(
            _PEERS,
            "sealane.v1.Broker",
            "RegisterVolume GetVolumeDescriptor ListVolumeDescriptors UnregisterVolume"
            " FinishFilling BeginResize FinishResize SetVolumeShare RemoveVolumeShare"
            " GetVolumeKey GrantLease ReturnLease",
        ),
        _rows(_READ, "grpc.health.v1.Health", "Check List Watch"),
        _rows(_READ, "grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
    )
    for row in rows
)


class LocalAuthorizer:
    """Checks callers of a Unix socket by the table, at each call and while a stream lasts."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins

    async def authorize(
        self,
        method: str,
        context: Any,
        digest: bytes,  # noqa: ARG002 - local calls need no proof
    ) -> None:
        """Raise VerificationError unless the call's user may make it.

        `call.operator.refused` for operators' calls and those without a row, `call.party.refused`
        for others, `call.origin.unknown` if the connection has ended. The uid is in the call's log
        lines from here on.
        """
        origin = self._origins.of(context)
        structlog.contextvars.bind_contextvars(uid=origin.user)
        call_class = CALL_CLASSES.get(method)
        if call_class is None:
            raise VerificationError(
                "call.operator.refused",
                f"nobody may make this call on this socket: {method} is in no list of its calls",
            )
        parties = origin.parties()
        if parties & ALLOWED_PARTIES[call_class]:
            return
        if call_class in (CallClass.OPERATE, CallClass.PEERS):
            raise VerificationError(
                "call.operator.refused",
                f"user {origin.user} may not make this call: it is not served to {_named(parties)}",
            )
        raise VerificationError(
            "call.party.refused",
            f"user {origin.user} may not make this call: it is served to "
            f"{_named(ALLOWED_PARTIES[call_class])}, not to {_named(parties)}",
        )

    async def reauthorize(self, method: str, context: Any) -> None:
        """Check the same for a running stream: a reload may have taken the right away."""
        await self.authorize(method, context, b"")


def _named(parties: Parties) -> str:
    return " and ".join(f"{party}s" for party in sorted(parties)) or "users that aren't listed"
