"""Which owners the policy has: kept in the brokers' store, changed while brokers run.

At first they are those of each broker's configuration. From the first policy of several owners on,
or the first change, the store has every version of them, and the configuration only says where a
broker's trust begins (sealane.daemon.broker.owners_history). So neither the store alone nor one
broker's file alone can change them.

The order of events of a change (docs/operate/policy-owners.md):

1. The document is verified: by the threshold of the present owners and by that of the next ones.
2. It is recorded in the audit log.
3. One commit stores it as the next version, with the number of the policy in force, on condition
   that there is no version with that number, and that this policy is still the one in force.
   A policy's commit has the first condition, so no policy is accepted under owners who are retired.
4. A head covers the commit: a store from before it is refused as rolled back.

A reset is the same without signatures: for owners who lost their keys. It takes what the
configuration names, so a broker whose configuration names others refuses it.
"""

import asyncio
import hashlib

from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.owners import (
    OWNERS_VERSION_MAX,
    Owners,
    owners_document,
    parse_owners,
    parse_signatures,
    verify_succession,
)
from sealane.daemon.broker.owners_history import FIRST, configured_history, trusted_history
from sealane.daemon.broker.records import POLICY_NAME, PolicyOwnersRecord, Stored
from sealane.daemon.broker.refusals import refusals_recorded
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import Compare
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UsageError, VerificationError


def version_name(version: int) -> str:
    """Return the name of a version's record."""
    return f"{version:04}"


class OwnersKeeper:
    """The policy's owners, as one of the store's brokers knows them."""

    def __init__(
        self, registry: Registry, *, configured: Owners | None, cover: Cover, audit: Audit
    ) -> None:
        """Trust `configured` at first; None: no owners, for development only."""
        self._registry = registry
        self._table = registry.policy_owners
        self._cover = cover
        self._audit = audit
        self._changing = asyncio.Lock()
        self._stored: list[Stored[PolicyOwnersRecord]] = []
        self.history = configured_history(configured)
        self.configured = configured

    @property
    def current(self) -> Owners | None:
        """The owners who must sign now; None: nobody must."""
        return self.history.current

    @property
    def version(self) -> int:
        """Version of the present owners; 0 if they are the configuration's, or there are none."""
        return self.history.last

    @property
    def is_configured(self) -> bool:
        """Whether the configuration names owners of some version; if not, a start is refused."""
        if self.configured is None:
            return self.current is None
        return self.configured.digest in {each.digest for each in self.history.owners.values()}

    def kept(self) -> tuple[list[Compare], dict[str, bytes]]:
        """Return compares and puts for a policy's commit: the present owners are still the last.

        The first policy of several owners stores them, too. From then on a broker whose
        configuration names others, or fewer of them, doesn't start.
        """
        compares, current = [self._no_later()], self.current
        if self._stored or current is None or len(current.by_id) == 1:
            return compares, {}
        absent, first = self._first(current)
        return [*compares, absent], first

    def _no_later(self) -> Compare:
        return Compare(self._table.key(version_name(self._next)), 0)

    def _first(self, owners: Owners) -> tuple[Compare, dict[str, bytes]]:
        """Return the put of version 0, and its compare: no other broker has put its own."""
        name = version_name(FIRST)
        record = PolicyOwnersRecord(version=FIRST, document=owners_document(owners))
        return Compare(self._table.key(name), 0), self._table.sealed(name, record)

    @property
    def _next(self) -> int:
        return self.version + 1

    def configure(self, configured: Owners | None) -> None:
        """Take what the configuration names after a reload; it changes no owners in force."""
        self.configured = configured
        if not self.is_configured:
            get_logger().error(
                "policy_owners_differ",
                in_force=self.version,
                message="the configuration names other owners of the policy than any in force: "
                "correct it, or put them into force with `sealanectl owners reset`; the broker "
                "can't be restarted like this",
            )

    async def refresh(self) -> None:
        """Adopt later owners in the store.

        VerificationError `policy.owners.configuration`: this broker has no reason to trust them;
        `policy.owners.rolled_back`: the newest known ones are no longer there.
        """
        before = None
        # Another task may adopt owners while this one reads.
        while before is not self._stored:
            before = self._stored
            if before and not await self._is_there(before[-1]):
                raise VerificationError(
                    "policy.owners.rolled_back",
                    f"the store no longer has version {self.version} of the policy's owners",
                )
            found = await self._after(before[-1].name if before else "")
        if found:
            self._adopt([*self._stored, *found])

    async def _is_there(self, known: Stored[PolicyOwnersRecord]) -> bool:
        # A replacement of the record key stores the same record again, at a later revision.
        found = await self._table.get(known.name)
        return found is not None and found.record == known.record

    async def _after(self, name: str) -> list[Stored[PolicyOwnersRecord]]:
        return [stored async for stored in self._table.records(after=name)]

    def _adopt(self, stored: list[Stored[PolicyOwnersRecord]]) -> None:
        # Not only the configuration, which may be another one since a reload.
        trusted = [owners for owners in (self.configured, self.current) if owners is not None]
        self.history = trusted_history([each.record for each in stored], trusted=trusted)
        self._stored = stored
        get_logger().info("policy_owners_in_force", version=self.version)

    async def replace(self, document: bytes, signatures: bytes, *, subject: str) -> Owners:
        """Put the owners that a signed document names into force; idempotent.

        UsageError `config.…`, `policy.owners.…`; VerificationError `policy.signature`.
        """
        async with (
            self._changing,
            refusals_recorded(self._audit, "policy.owners.replace", subject=subject),
        ):
            await self.refresh()
            current = self.current
            if current is None:
                raise UsageError(
                    "policy.owners.none",
                    "this broker accepts unsigned policies, so nobody can sign who owns them: name "
                    "owners in its configuration, reload, and `sealanectl owners reset`",
                )
            if self._stored and self._stored[-1].record.document == document:
                return await self._covered(current)
            after = parse_owners(document, source="the owners' document")
            if after.version != self._next:
                raise UsageError(
                    "policy.owners.version",
                    f"the owners' document has version {after.version}; allowed: {self._next}, "
                    "one above those in force",
                )
            signed = parse_signatures(signatures, source="the owners' signatures")
            signers = verify_succession(current, after, document, signed)
            record = PolicyOwnersRecord(
                version=after.version, document=document, signatures=signatures
            )
            return await self._store(
                record, kind="policy.owners.replace", subject=subject, signers=signers
            )

    async def reset(self, digest: bytes, *, subject: str) -> Owners:
        """Put the configuration's owners into force, whose digest the caller knows; idempotent.

        UsageError `policy.owners.none`, `policy.owners.other`.
        """
        async with (
            self._changing,
            refusals_recorded(self._audit, "policy.owners.reset", subject=subject),
        ):
            await self.refresh()
            configured, current = self.configured, self.current
            if configured is None:
                raise UsageError(
                    "policy.owners.none",
                    "this broker's configuration names no owners of the policy: set "
                    "broker.policy_owners on every broker, and reload them",
                )
            if configured.digest != digest:
                raise UsageError(
                    "policy.owners.other",
                    "this broker's configuration names other owners than were shown: look again",
                )
            if current is not None and current.digest == digest:
                return await self._covered(current)
            document = owners_document(_numbered(configured, self._next))
            record = PolicyOwnersRecord(version=self._next, document=document)
            return await self._store(record, kind="policy.owners.reset", subject=subject)

    async def _covered(self, current: Owners) -> Owners:
        """Return `current` once a head covers it, for a change that was interrupted before."""
        if self._stored:
            await self._cover(self._stored[-1].revision)
        return current

    async def _store(
        self,
        record: PolicyOwnersRecord,
        *,
        kind: str,
        subject: str,
        signers: frozenset[str] = frozenset(),
    ) -> Owners:
        """Record a change, commit it, and adopt it once a rollback of it would be noticed."""
        before, after = self.current, parse_owners(record.document, source="owners")
        # Recorded before they are in force: nothing is accepted from them without a record.
        await self._audit.record(
            kind,
            subject=subject,
            outcome="done",
            version=after.version,
            digest=hashlib.sha256(record.document).digest(),
            threshold=after.threshold,
            threshold_before=0 if before is None else before.threshold,
            owners=sorted(after.by_id),
            owners_before=[] if before is None else sorted(before.by_id),
            signers=sorted(signers),
        )
        table, policies = self._table, self._registry.policies
        policy = await policies.get(POLICY_NAME)
        in_force = 0 if policy is None else policy.record.version
        compares = [self._no_later(), policies.unchanged(POLICY_NAME, policy)]
        puts = table.sealed(
            version_name(after.version), record.model_copy(update={"policy_version": in_force})
        )
        if not self._stored and before is not None:
            absent, first = self._first(before)
            compares, puts = [*compares, absent], puts | first
        revision = await self._registry.commit(compares, puts)
        if revision is None:
            raise UsageError(
                "policy.owners.version",
                "another policy or other owners were put into force in the meantime",
            )
        await self._cover(revision)
        await self.refresh()
        return after


def _numbered(owners: Owners, version: int) -> Owners:
    if version > OWNERS_VERSION_MAX:
        raise UsageError(
            "policy.owners.version", f"version {version}; allowed: up to {OWNERS_VERSION_MAX}"
        )
    return Owners(version=version, threshold=owners.threshold, by_id=owners.by_id)
