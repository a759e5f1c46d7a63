"""The policy in force: kept in the broker's store, replaced by newer versions its owners signed.

A version number is used once: a new policy must have a higher one. After a change every node
attests again: results under older versions are refused after `REAPPRAISAL_SECONDS`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from sealane.crypto.attestation.policy import NO_POLICY, Policy
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.owners import POLICY_LABEL, Owners, parse_signatures
from sealane.daemon.broker.owners_keeper import OwnersKeeper
from sealane.daemon.broker.policy import parse_policy
from sealane.daemon.broker.records import POLICY_NAME, PolicyRecord, Stored
from sealane.daemon.broker.registry import Registry
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, UsageError, VerificationError

# Grace period: nodes learn of the change with their next response. A node that the new policy
# refuses in the meantime has no time left.
REAPPRAISAL_SECONDS: Final = 30

CHANGED: Final = "attestation.policy.changed"

# Upper bound on how late a broker notices another broker's policy if a watch is lost.
REFRESH_SECONDS: Final = 5


class PolicyKeeper:
    """Owner of the policy in force. `changed` is called with each new one."""

    def __init__(
        self,
        registry: Registry,
        *,
        owners: OwnersKeeper,
        audit: Audit,
        changed: Callable[[Policy], None],
    ) -> None:
        """Accept policies that a threshold of `owners` signed; any if there are none."""
        self._registry = registry
        self.owners = owners
        self._audit = audit
        self._changed = changed
        self._stored: Stored[PolicyRecord] | None = None
        self._changed_ns = 0
        self._changing = asyncio.Lock()
        self.policy = NO_POLICY
        self.signed_by: list[str] = []
        """Names of the owners who signed the policy in force."""

    @property
    def document(self) -> bytes:
        """The document in force; empty before there is one."""
        return b"" if self._stored is None else self._stored.record.document

    @property
    def owners_version(self) -> int:
        """Version of the owners who had to sign it."""
        return 0 if self._stored is None else self._stored.record.owners_version

    async def offer(self, document: bytes, signature: bytes, *, source: str) -> None:
        """Load the stored policy, or the operator's file if newer; at startup and at SIGHUP.

        An older file is ignored: `sealanectl policy apply` has replaced it. So are the signatures
        of the one in force, whose owners may have changed since.
        """
        await self.refresh()
        offered = parse_policy(document, source=source)
        if offered.version < self.policy.version:
            get_logger().warning(
                "policy_file_is_older", file=offered.version, in_force=self.policy.version
            )
        elif offered.digest != self.policy.digest:
            await self.apply(document, signature, source=source, subject="configuration")

    async def refresh(self) -> None:
        """Adopt policy and owners in the store, for example after another broker's change.

        VerificationError `policy.rolled_back` if it is older than the one in force here; errors of
        `OwnersKeeper.refresh`.
        """
        stored = await self._registry.policies.get(POLICY_NAME)
        # Afterwards: then the owners who signed it are among them.
        await self.owners.refresh()
        if stored is None:
            return
        if self._stored is not None and stored.record == self._stored.record:
            # Maybe stored again, under another record key: at the revision that a commit compares.
            self._stored = stored
            return
        record, source = stored.record, "the stored policy"
        owners = self.owners.history.of_policy(record.version, owners_version=record.owners_version)
        policy, signers = _accepted(record.document, record.signature, by=owners, source=source)
        if policy.version < self.policy.version:
            raise VerificationError(
                "policy.rolled_back",
                f"the store holds policy version {policy.version}, but version "
                f"{self.policy.version} was already in force",
            )
        self._enact(policy, stored, signers)

    async def keep_refreshed(self) -> None:
        """Follow other brokers' changes; never returns, ends with VerificationError only.

        The store reports changes. It is also polled, in case a report is lost.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self._follow), name="policy-watch")
            tasks.create_task(self._repeat(self.refresh), name="policy-refresh")

    async def _follow(self) -> None:
        revision = await self._registry.store.revision()
        await self.refresh()
        async for _ in self._registry.policies.watch(from_revision=revision + 1):
            await self.refresh()

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except UnavailableError as error:
                get_logger().error(
                    "policy_not_refreshed", reason=error.reason, message=error.args[0]
                )
            await asyncio.sleep(REFRESH_SECONDS)

    async def apply(
        self, document: bytes, signature: bytes, *, source: str, subject: str
    ) -> Policy:
        """Put a policy into force, record that in the audit log, and return it.

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
        await self.refresh()
        owners, owners_version = self.owners.current, self.owners.version
        owners_compares, owners_puts = self.owners.kept()
        policy, signers = _accepted(document, signature, by=owners, source=source)
        before = self.policy
        if policy.version <= before.version:
            raise UsageError(
                "policy.version.used",
                f"{source}: version {policy.version}; allowed: above {before.version}, the one in "
                "force",
            )
        # Recorded before it is in force: nothing is granted under a policy without a record.
        await self._audit.record(
            "policy.apply",
            subject=subject,
            outcome="done",
            version=policy.version,
            digest=policy.digest,
            version_before=before.version,
            digest_before=before.digest,
            signed=owners is not None,
            owners_version=owners_version,
            signers=sorted(signers),
        )
        record = PolicyRecord(
            version=policy.version,
            document=document,
            signature=signature,
            owners_version=owners_version,
        )
        revision = await self._registry.commit(
            [self._registry.policies.unchanged(POLICY_NAME, self._stored), *owners_compares],
            self._registry.policies.sealed(POLICY_NAME, record) | owners_puts,
        )
        if revision is None:
            raise UsageError(
                "policy.version.used",
                f"{source}: another policy or other owners were put into force in the meantime",
            )
        self._enact(policy, Stored(record, revision, POLICY_NAME), signers)
        if owners_puts:
            await self.owners.refresh()
        return policy

    def check_version(self, version: int, *, now_ns: int) -> bool:
        """Refuse a result under an older policy, some time after the change; return True if soon.

        VerificationError `attestation.policy.changed`: attest again.
        """
        grace_ns = REAPPRAISAL_SECONDS * 10**9
        if version != self.policy.version and now_ns - self._changed_ns >= grace_ns:
            raise VerificationError(
                CHANGED,
                f"attested under policy version {version}, but version {self.policy.version} is "
                "in force: attest again",
            )
        return version != self.policy.version

    def _enact(
        self, policy: Policy, stored: Stored[PolicyRecord], signers: Mapping[str, str]
    ) -> None:
        self.policy = policy
        self.signed_by = sorted(signers.values())
        self._stored = stored
        self._changed_ns = monotonic_ns()
        get_logger().info("policy_in_force", version=policy.version, digest=policy.digest.hex())
        self._changed(policy)


def _accepted(
    document: bytes, signature: bytes, *, by: Owners | None, source: str
) -> tuple[Policy, dict[str, str]]:
    """Return the policy in a signed document, and the owners who signed it: names by key id.

    Errors of `Owners.verify` and `parse_policy`.
    """
    signers: dict[str, str] = {}
    if by is not None:
        signatures = parse_signatures(signature, source=source)
        found = by.verify(POLICY_LABEL, document, signatures, what=source)
        signers = {key_id: by.by_id[key_id].name for key_id in found}
    return parse_policy(document, source=source), signers
