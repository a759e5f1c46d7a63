"""The policy in force: kept in the broker's store, replaced by newer versions its owner signed.

A version is used once: what is applied must have a higher one. After a change every node attests
again: results under older versions are refused after `REAPPRAISAL_SECONDS`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from sealane.crypto.attestation.policy import NO_POLICY, Policy
from sealane.crypto.encoding import fields, parse_fields
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.policy import OwnerKey, parse_policy, verify_owner
from sealane.daemon.clock import monotonic_ns
from sealane.daemon.files import write_durably
from sealane.daemon.logs import get_logger
from sealane.errors import UsageError, VerificationError

# Nodes are told at once; this is for those that do not listen.
REAPPRAISAL_SECONDS: Final = 30

CHANGED: Final = "attestation.policy.changed"

_STORED: Final = "sealane stored policy v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPolicy:
    """A document as its owner gave it."""

    document: bytes
    signature: bytes


class PolicyStore(Protocol):
    """Where the policy in force outlives the broker."""

    async def read(self) -> StoredPolicy | None:
        """Return what was stored last."""
        ...

    async def replace(self, policy: StoredPolicy, *, before: StoredPolicy | None) -> bool:
        """Store `policy`, durably, if `before` is still what is stored; whether it was."""
        ...


class FilePolicyStore:
    """Keeps the policy in a file, for the one broker whose it is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> StoredPolicy | None:
        """Return what the file holds; VerificationError `broker.store.malformed`."""
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
        except FileNotFoundError:
            return None
        parts = parse_fields(_STORED, content, count_max=2)
        if parts is None or len(parts) != 2:
            raise VerificationError("broker.store.malformed", f"{self._path}: not a stored policy")
        return StoredPolicy(document=parts[0], signature=parts[1])

    async def replace(self, policy: StoredPolicy, *, before: StoredPolicy | None) -> bool:
        """Replace the file."""
        if await self.read() != before:
            return False
        content = fields(_STORED, policy.document, policy.signature)
        await asyncio.to_thread(write_durably, self._path, content)
        return True


class PolicyKeeper:
    """Owns the policy in force. `changed` is called with each new one."""

    def __init__(
        self,
        store: PolicyStore,
        *,
        owner: OwnerKey | None,
        audit: Audit,
        changed: Callable[[Policy], None],
    ) -> None:
        """Without an `owner` documents need no signature: for development only."""
        self._store = store
        self._owner = owner
        self._audit = audit
        self._changed = changed
        self._stored: StoredPolicy | None = None
        self._changed_ns = 0
        self._changing = asyncio.Lock()
        self.policy = NO_POLICY

    @property
    def document(self) -> bytes:
        """The document in force; empty before there is one."""
        return b"" if self._stored is None else self._stored.document

    async def start(self, document: bytes, signature: bytes, *, source: str) -> None:
        """Take what is stored, or the operator's file if that is newer.

        An older file is left aside: the policy moved on by `sealanectl policy apply`.
        """
        await self.refresh()
        offered = self._accept(document, signature, source=source)
        if offered.version < self.policy.version:
            get_logger().warning(
                "policy_file_is_older", file=offered.version, in_force=self.policy.version
            )
        elif offered.digest != self.policy.digest:
            await self.apply(document, signature, source=source, subject="configuration")

    async def refresh(self) -> None:
        """Take over what the store holds by now: another broker's change, say."""
        stored = await self._store.read()
        if stored is not None and stored != self._stored:
            policy = self._accept(stored.document, stored.signature, source="the stored policy")
            self._enact(policy, stored)

    async def apply(
        self, document: bytes, signature: bytes, *, source: str, subject: str
    ) -> Policy:
        """Put a policy into force and record it; returns it.

        UsageError `config.…` or `policy.version.used`; VerificationError `policy.signature`.
        """
        async with self._changing:
            try:
                return await self._apply(document, signature, source=source, subject=subject)
            except (UsageError, VerificationError) as error:
                await self._audit.record(
                    "policy.apply", subject=subject, outcome="refused", reason=error.reason
                )
                raise

    async def _apply(
        self, document: bytes, signature: bytes, *, source: str, subject: str
    ) -> Policy:
        policy = self._accept(document, signature, source=source)
        await self.refresh()
        before = self.policy
        if policy.version <= before.version:
            raise UsageError(
                "policy.version.used",
                f"{source}: version {policy.version}; allowed: more than {before.version}, which "
                "is in force",
            )
        # Recorded before it is in force: nothing is granted by a policy without a record.
        await self._audit.record(
            "policy.apply",
            subject=subject,
            outcome="done",
            version=policy.version,
            digest=policy.digest,
            version_before=before.version,
            digest_before=before.digest,
            signed=self._owner is not None,
        )
        stored = StoredPolicy(document=document, signature=signature)
        if not await self._store.replace(stored, before=self._stored):
            raise UsageError(
                "policy.version.used", f"{source}: another policy was applied meanwhile"
            )
        self._enact(policy, stored)
        return policy

    def check_version(self, version: int, *, now_ns: int) -> None:
        """Refuse a result under an older policy, some time after the change.

        VerificationError `attestation.policy.changed`: attest again.
        """
        grace_ns = REAPPRAISAL_SECONDS * 10**9
        if version != self.policy.version and now_ns - self._changed_ns >= grace_ns:
            raise VerificationError(
                CHANGED,
                f"attested under policy version {version}, version {self.policy.version} is in "
                "force: attest again",
            )

    def _accept(self, document: bytes, signature: bytes, *, source: str) -> Policy:
        if self._owner is not None:
            verify_owner(document, signature, owner=self._owner)
        return parse_policy(document, source=source)

    def _enact(self, policy: Policy, stored: StoredPolicy) -> None:
        self.policy = policy
        self._stored = stored
        self._changed_ns = monotonic_ns()
        get_logger().info("policy_in_force", version=policy.version, digest=policy.digest.hex())
        self._changed(policy)
