"""gRPC services for policy and audit log, on the broker's Unix socket."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from google.protobuf import empty_pb2

from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.owners import Owners, owners_document
from sealane.daemon.broker.policy_keeper import PolicyKeeper
from sealane.daemon.runtime.authorizers import Context
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.v1 import policy_pb2, policy_pb2_grpc

_PART_BYTES: Final = 1 << 16
EXPORT_SECONDS: Final = 900.0
"""The longest time for an export: no segment of the log is removed meanwhile."""


class PoliciesServicer(policy_pb2_grpc.PoliciesServicer):
    """Returns the policy in force and replaces it."""

    def __init__(self, keeper: PolicyKeeper) -> None:
        self._keeper = keeper

    async def GetPolicy(
        self, request: empty_pb2.Empty, context: Context
    ) -> policy_pb2.PolicyInForce:
        """Return the document in force."""
        return self._in_force()

    async def ApplyPolicy(
        self, request: policy_pb2.ApplyPolicyRequest, context: Context
    ) -> policy_pb2.PolicyInForce:
        """Put a newer policy into force."""
        await self._keeper.apply(
            request.document, request.signature, source="the policy", subject="operator"
        )
        return self._in_force()

    async def GetPolicyOwners(
        self, request: empty_pb2.Empty, context: Context
    ) -> policy_pb2.PolicyOwners:
        """Return who owns the policy."""
        return self._owners()

    async def ReplacePolicyOwners(
        self, request: policy_pb2.ReplacePolicyOwnersRequest, context: Context
    ) -> policy_pb2.PolicyOwners:
        """Put the owners of a signed document into force."""
        await self._keeper.owners.replace(request.document, request.signatures, subject="operator")
        return self._owners()

    async def ResetPolicyOwners(
        self, request: policy_pb2.ResetPolicyOwnersRequest, context: Context
    ) -> policy_pb2.PolicyOwners:
        """Put the owners of this broker's configuration into force."""
        await self._keeper.owners.reset(request.configured_digest, subject="operator")
        return self._owners()

    def _in_force(self) -> policy_pb2.PolicyInForce:
        policy = self._keeper.policy
        return policy_pb2.PolicyInForce(
            version=policy.version,
            digest=policy.digest,
            document=self._keeper.document,
            signed_by=self._keeper.signed_by,
            owners_version=self._keeper.owners_version,
        )

    def _owners(self) -> policy_pb2.PolicyOwners:
        owners = self._keeper.owners
        configured = owners.configured
        return policy_pb2.PolicyOwners(
            version=owners.version,
            document=_document(owners.current),
            configured_document=_document(configured),
            configured_digest=b"" if configured is None else configured.digest,
            is_configured=owners.is_configured,
        )


def _document(owners: Owners | None) -> bytes:
    return b"" if owners is None else owners_document(owners)


class AuditLogServicer(policy_pb2_grpc.AuditLogServicer):
    """Exports the audit log."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    async def ExportAudit(
        self, request: empty_pb2.Empty, context: Context
    ) -> AsyncIterator[policy_pb2.AuditPart]:
        """Stream the acknowledged records; each part holds the head that they end at."""
        head = self._log.head
        ends = time.monotonic() + EXPORT_SECONDS
        with self._log.reading() as segments:
            read = segments[0].before.sequence
            for segment in segments:
                with segment.path.open("rb") as file:
                    while read < head.sequence:
                        if time.monotonic() >= ends:
                            raise UnavailableError(
                                "audit.export.late",
                                f"the caller took more than {EXPORT_SECONDS:.0f} s for the log",
                            )
                        lines = await asyncio.to_thread(file.readlines, _PART_BYTES)
                        if not lines:
                            break
                        part = lines[: head.sequence - read]
                        read += len(part)
                        yield policy_pb2.AuditPart(
                            lines=b"".join(part),
                            head_sequence=head.sequence,
                            head_digest=head.digest,
                        )
        if read != head.sequence:
            raise VerificationError(
                "audit.truncated",
                f"{self._log.path}: has {read} of the {head.sequence} records that were "
                "acknowledged: the log was truncated",
            )
        yield policy_pb2.AuditPart(head_sequence=head.sequence, head_digest=head.digest)
