"""All versions of the policy's owners in a store, and which of them a broker trusts.

Trust begins at the versions whose owners the broker's configuration names. From there it goes to
the next and to the former version, wherever the document between them is signed by both. So a
reset, which has no signatures, ends it; and what was accepted under owners between two resets
counts only where the configuration names them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sealane.daemon.broker.owners import Owners, parse_owners, parse_signatures, verify_succession
from sealane.daemon.broker.records import PolicyOwnersRecord
from sealane.errors import VerificationError

FIRST: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersHistory:
    """The owners of each version, the trusted versions, and the policy in force at each change.

    Version 0 are the first owners; without it, policies needed no signature at first.
    """

    owners: Mapping[int, Owners]
    trusted: Collection[int]
    policy_versions: Mapping[int, int]

    @property
    def last(self) -> int:
        """The version of the present owners; 0 if there are none."""
        return max(self.owners, default=FIRST)

    @property
    def current(self) -> Owners | None:
        """The owners who must sign now; None: nobody must."""
        return self.owners.get(self.last)

    def of_policy(self, policy_version: int, *, owners_version: int) -> Owners | None:
        """Return who had to sign this policy, which a broker accepted; None: nobody.

        VerificationError `policy.owners.history`: no broker of this release can have accepted it
        under these owners; `policy.owners.configuration`: these owners aren't trusted.
        """
        if not FIRST <= owners_version <= self.last:
            raise VerificationError(
                "policy.owners.history",
                f"the policy was signed by owners {owners_version}, whom the store doesn't have",
            )
        if owners_version < self.last:
            retired_at = self.policy_versions[owners_version + 1]
            if policy_version > retired_at:
                raise VerificationError(
                    "policy.owners.history",
                    f"policy {policy_version} was accepted under owners {owners_version}, who were "
                    f"replaced when policy {retired_at} was in force: a broker of an earlier "
                    "release may have accepted it",
                )
        if self.owners and owners_version not in self.trusted:
            raise VerificationError(
                "policy.owners.configuration",
                f"policy {policy_version} was accepted under owners {owners_version}, whom this "
                "broker has no reason to trust: between them and its configuration's there was a "
                "reset. Have the present owners sign a newer policy, and apply it at a broker that "
                "runs",
            )
        return self.owners.get(owners_version)


def configured_history(configured: Owners | None) -> OwnersHistory:
    """Return the history before there is one in the store."""
    owners = {} if configured is None else {FIRST: configured}
    return OwnersHistory(owners=owners, trusted=frozenset(owners), policy_versions={})


def trusted_history(
    records: Sequence[PolicyOwnersRecord], *, trusted: Collection[Owners]
) -> OwnersHistory:
    """Return the history in the store, if trust in `trusted` leads to its last version.

    `records` are all versions in order; the first has number 0, or 1 if the policy had no owners
    before. VerificationError `policy.owners.configuration`, `policy.owners.history`.
    """
    owners = _parsed(records)
    last = max(owners)
    digests = {each.digest for each in trusted}
    found = {version for version, each in owners.items() if each.digest in digests}
    if not found:
        raise VerificationError(
            "policy.owners.configuration",
            "this broker's configuration doesn't name owners of the policy who are, or were, those "
            f"of the store, which has versions up to {last}",
        )
    signed = {record.version for record in records if _is_signed(record, owners)}
    for version in range(min(found) + 1, last + 1):
        if version - 1 in found and version in signed:
            found.add(version)
    for version in range(last, min(owners), -1):
        if version in found and version in signed:
            found.add(version - 1)
    if last not in found:
        raise VerificationError(
            "policy.owners.configuration",
            f"version {max(found) + 1} of the policy's owners is not signed by those of version "
            f"{max(found)}: it was a reset, but this broker's configuration names owners from "
            "before it",
        )
    return OwnersHistory(
        owners=owners,
        trusted=frozenset(found),
        policy_versions={record.version: record.policy_version for record in records},
    )


def _parsed(records: Sequence[PolicyOwnersRecord]) -> dict[int, Owners]:
    parsed: dict[int, Owners] = {}
    for number, record in enumerate(records, start=min(records[0].version, 1)):
        owners = parse_owners(record.document, source=f"owners {number} in the store")
        if record.version != number or owners.version != number:
            raise VerificationError(
                "policy.owners.history", f"the store has no version {number} of the policy's owners"
            )
        parsed[number] = owners
    return parsed


def _is_signed(record: PolicyOwnersRecord, owners: Mapping[int, Owners]) -> bool:
    """Return whether a version is signed by the owners before it and by its own."""
    version = record.version
    if version - 1 not in owners:
        return False
    signatures = parse_signatures(record.signatures, source=f"owners {version} in the store")
    try:
        verify_succession(owners[version - 1], owners[version], record.document, signatures)
    except VerificationError:
        return False
    return True
