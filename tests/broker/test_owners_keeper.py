"""The owners in force: changed by documents they sign, by a reset, and never back."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import pytest
from cryptography.hazmat.primitives import serialization
from structlog.testing import capture_logs

from broker.policy_owners import new_keys, owners_of, signed_owners, signed_policy
from brokers import MemoryAudit
from control_plane import write_key
from sealane.crypto.attestation.policy import Policy
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.check import check_broker
from sealane.daemon.broker.owners import Owners, key_id_of, owners_document
from sealane.daemon.broker.owners_keeper import OwnersKeeper, version_name
from sealane.daemon.broker.policy_keeper import PolicyKeeper
from sealane.daemon.broker.record_key_rotation import RecordKeyRotation
from sealane.daemon.broker.records import POLICY_NAME, PolicyOwnersRecord, PolicyRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.config import BrokerConfig
from sealane.errors import Error

A, B, C, D = new_keys(4)
FIRST = owners_of(A, B, C, threshold=2)
SECOND = owners_of(A, C, D, threshold=2, version=1)


class World:
    """A store, and brokers on it with configurations of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.audit = MemoryAudit()
        self.covered: list[int] = []
        self.enacted: list[Policy] = []

    async def __aenter__(self) -> Self:
        store = SqliteStore(self.directory / "broker.sqlite")
        self.registry = await Registry.open(store, WrappingKey(bytes(32)), node="b")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.registry.close()

    async def _cover(self, revision: int) -> None:
        self.covered.append(revision)

    async def replace_record_key(self) -> None:
        rotation = RecordKeyRotation(self.registry, cover=self._cover, audit=self.audit)
        await rotation.begin((await rotation.progress()).number)
        await rotation.proceed()

    async def broker(self, configured: Owners | None = FIRST) -> PolicyKeeper:
        """Return the keeper of a broker that starts; its policies are in `enacted`."""
        owners = OwnersKeeper(
            self.registry, configured=configured, cover=self._cover, audit=self.audit
        )
        keeper = PolicyKeeper(
            self.registry, owners=owners, audit=self.audit, changed=self.enacted.append
        )
        await keeper.refresh()
        return keeper


async def refused(awaitable: Any) -> str:
    with pytest.raises(Error) as caught:
        await awaitable
    return caught.value.reason


async def apply(keeper: PolicyKeeper, version: int, *keys: Any) -> None:
    await keeper.apply(*signed_policy(version, *keys), source="p", subject="operator")


async def replace(keeper: PolicyKeeper, owners: Owners, *keys: Any) -> None:
    await keeper.owners.replace(*signed_owners(owners, *keys), subject="operator")


async def test_owners_are_exchanged_and_the_former_ones_refused(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker()
        await apply(one, 1, A, B)
        await replace(one, SECOND, A, C)
        assert world.covered
        last = world.audit.records[-1]
        assert (last["kind"], last["outcome"], last["version"]) == (
            "policy.owners.replace",
            "done",
            1,
        )
        ids = [sorted(owners.by_id) for owners in (SECOND, FIRST)]
        assert [last["owners"], last["owners_before"]] == ids
        assert last["threshold_before"] == 2
        assert last["signers"] == sorted(key_id_of(key.public_key()) for key in (A, C))
        assert last["digest"] == hashlib.sha256(owners_document(SECOND)).digest()
        for broker in (one, two):
            assert await refused(apply(broker, 2, A, B)) == "policy.signature"
            assert world.audit.records[-1]["reason"] == "policy.signature"
        await two.refresh()
        assert (two.owners.version, two.policy.version, two.owners_version) == (1, 1, 0)
        await apply(two, 2, A, D)
        assert two.signed_by == ["o0", "o2"]
        signers = sorted(key_id_of(key.public_key()) for key in (A, D))
        assert world.audit.records[-1]["signers"] == signers
        await one.refresh()
        assert (one.policy.version, one.owners_version) == (2, 1)


async def test_a_policy_stays_in_force_when_its_signers_left(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        one = await world.broker()
        await apply(one, 1, B, C)
        await replace(one, SECOND, A, C)
        for configured in (FIRST, SECOND):
            again = await world.broker(configured)
            document, signatures = signed_policy(1, B, C)
            await again.offer(document, signatures, source="p")
            assert again.policy.version == 1
            newer = again.offer(*signed_policy(2, B, C), source="p")
            assert await refused(newer) == "policy.signature"


async def test_a_change_needs_both_thresholds_and_the_next_version(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        broker = await world.broker()
        assert await refused(replace(broker, SECOND, A, B)) == "policy.signature"
        assert await refused(replace(broker, SECOND, C, D)) == "policy.signature"
        assert world.audit.records[-1]["kind"] == "policy.owners.replace"
        assert world.audit.records[-1]["outcome"] == "refused"
        for version in (0, 2):
            skipping = owners_of(A, C, D, threshold=2, version=version)
            assert await refused(replace(broker, skipping, A, C)) == "policy.owners.version"
        await replace(broker, SECOND, A, C)
        done = len(world.audit.records)
        await replace(broker, SECOND, A, C)
        assert len(world.audit.records) == done
        back = owners_of(A, B, C, threshold=2, version=1)
        assert await refused(replace(broker, back, A, C)) == "policy.owners.version"
        third = owners_of(D, threshold=1, version=2)
        for keys in ((A, C), (B, D)):
            assert await refused(replace(broker, third, *keys)) == "policy.signature"
        await replace(broker, third, A, D)


async def test_a_repeated_change_is_covered_though_it_was_interrupted(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        broker = await world.broker()
        await replace(broker, SECOND, A, C)
        before = [*world.covered]
        await replace(broker, SECOND, A, C)
        assert world.covered == [*before, before[-1]]


async def test_configuration_has_to_name_owners_of_some_version(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await replace(await world.broker(), SECOND, A, C)
        await world.broker(SECOND)
        await world.broker(FIRST)
        for other in (owners_of(A, B, C, threshold=1), owners_of(D), None):
            assert await refused(world.broker(other)) == "policy.owners.configuration"


async def test_a_broker_refuses_owners_whom_its_own_did_not_sign(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        broker = await world.broker()
        table = world.registry.policy_owners
        for version, owners in ((0, FIRST), (1, SECOND)):
            document, signatures = signed_owners(owners, C, D)
            record = PolicyOwnersRecord(version=version, document=document, signatures=signatures)
            await world.registry.commit((), table.sealed(version_name(version), record))
        assert await refused(broker.refresh()) == "policy.owners.configuration"
        assert await refused(world.broker()) == "policy.owners.configuration"
        assert broker.owners.current == FIRST


async def test_missing_versions_are_noticed(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        broker = await world.broker()
        await replace(broker, SECOND, A, C)
        await replace(broker, owners_of(A, C, threshold=2, version=2), A, C)
        table = world.registry.policy_owners
        await world.registry.commit((), deletes=[table.key(version_name(1))])
        assert await refused(world.broker()) == "policy.owners.history"
        await world.registry.commit((), deletes=[table.key(version_name(2))])
        assert await refused(broker.refresh()) == "policy.owners.rolled_back"


async def test_records_stored_again_under_another_record_key_change_nothing(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker()
        await apply(one, 1, A, B)
        await replace(one, SECOND, A, C)
        await two.refresh()
        world.enacted.clear()
        await world.replace_record_key()
        for broker in (one, two):
            await broker.refresh()
            assert broker.owners.version == 1
        # Nodes needn't attest again: no policy was enacted.
        assert not world.enacted
        await apply(one, 2, A, D)
        await replace(two, owners_of(A, C, threshold=2, version=2), A, C)


async def test_a_policy_of_unknown_owners_is_refused(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        broker = await world.broker()
        await replace(broker, SECOND, A, C)
        await apply(broker, 1, A, D)
        table = world.registry.policy_owners
        names = [table.key(version_name(version)) for version in (0, 1)]
        await world.registry.commit((), deletes=names)
        assert await refused(world.broker()) == "policy.owners.history"


async def test_owners_who_lost_their_keys_are_reset_by_the_configuration(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        one, two, away = [await world.broker() for _ in range(3)]
        await apply(one, 1, A, B)
        new = owners_of(D)
        assert await refused(one.owners.reset(new.digest, subject="o")) == "policy.owners.other"
        for broker in (one, two):
            broker.owners.configure(new)
            assert not broker.owners.is_configured
            assert broker.owners.current == FIRST
        assert await refused(one.owners.reset(FIRST.digest, subject="o")) == "policy.owners.other"
        await one.owners.reset(new.digest, subject="o")
        last = world.audit.records[-1]
        assert (last["kind"], last["outcome"]) == ("policy.owners.reset", "done")
        done, covered = len(world.audit.records), len(world.covered)
        await one.owners.reset(new.digest, subject="o")
        assert (len(world.audit.records), len(world.covered)) == (done, covered + 1)
        await two.refresh()
        assert await refused(apply(two, 2, A, B)) == "policy.signature"
        await apply(two, 2, D)
        # The others still name the former owners, and must not follow.
        assert await refused(away.refresh()) == "policy.owners.configuration"
        assert await refused(world.broker(FIRST)) == "policy.owners.configuration"
        assert (await world.broker(new)).policy.version == 2


async def test_owners_come_by_a_reset_where_policies_were_unsigned(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        broker = await world.broker(None)
        await broker.apply(b"version = 1\n", b"", source="p", subject="operator")
        assert await refused(replace(broker, SECOND, A, C)) == "policy.owners.none"
        assert await refused(broker.owners.reset(b"", subject="o")) == "policy.owners.none"
        broker.owners.configure(FIRST)
        await broker.owners.reset(FIRST.digest, subject="o")
        # The policy in force is unsigned, which is nothing that these owners accepted.
        await broker.refresh()
        assert await refused(world.broker(FIRST)) == "policy.owners.configuration"
        assert await refused(apply(broker, 2)) == "policy.signature"
        await apply(broker, 2, A, B)
        assert (await world.broker(FIRST)).policy.version == 2


@pytest.mark.parametrize("first", [FIRST, owners_of(A)])
@pytest.mark.parametrize("foreign", [owners_of(D), owners_of(A, D), None])
async def test_a_reset_there_and_back_brings_no_policy_into_force(
    tmp_path: Path, first: Owners, foreign: Owners | None
) -> None:
    """One broker's operator names other owners, and afterwards the former ones again."""
    by = [] if foreign is None else [D]
    async with World(tmp_path) as world:
        running = await world.broker(first)
        if first is FIRST:
            # Owners are stored, so the foreign ones come by a reset.
            await apply(running, 1, A, B)
            theirs = await world.broker(first)
            theirs.owners.configure(foreign or owners_of(D))
            await theirs.owners.reset((foreign or owners_of(D)).digest, subject="o")
            by = [D]
        else:
            theirs = await world.broker(foreign)
        await apply(theirs, 2, *by)
        theirs.owners.configure(first)
        await theirs.owners.reset(first.digest, subject="o")
        before = running.policy.version
        assert await refused(running.refresh()) == "policy.owners.configuration"
        assert running.policy.version == before
        assert await refused(world.broker(first)) == "policy.owners.configuration"
        # A policy that they signed themselves is one to start with.
        await apply(theirs, 3, A, B)
        assert (await world.broker(first)).policy.version == 3


async def test_brokers_start_after_a_reset_and_a_policy_of_the_new_owners(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        one = await world.broker()
        await apply(one, 1, A, B)
        new = owners_of(C, D, threshold=2)
        one.owners.configure(new)
        await one.owners.reset(new.digest, subject="o")
        await one.refresh()
        assert await refused(world.broker(new)) == "policy.owners.configuration"
        await apply(one, 2, C, D)
        await replace(one, owners_of(D, version=2), C, D)
        for configured in (new, owners_of(D)):
            assert (await world.broker(configured)).policy.version == 2


async def test_the_first_policy_of_several_owners_stores_them(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker()
        await apply(one, 1, A, B)
        await two.refresh()
        assert (one.owners.version, two.policy.version) == (0, 1)
        wide, low = owners_of(A, B, C, D, threshold=2), owners_of(A, B, C)
        for other in (wide, low, owners_of(A, B, threshold=2), None):
            assert await refused(world.broker(other)) == "policy.owners.configuration"
        await apply(two, 2, B, C)
        await replace(two, SECOND, A, C)
        assert (await world.broker()).owners.version == 1


def before_the_record(
    world: World, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Awaitable[Any]]
) -> None:
    """Do something before the next change is in the audit log, so before it is committed."""
    record = world.audit.record

    async def worked_meanwhile(kind: str, **detail: Any) -> None:
        monkeypatch.setattr(world.audit, "record", record)
        await work()
        await record(kind, **detail)

    monkeypatch.setattr(world.audit, "record", worked_meanwhile)


async def test_a_broker_with_other_owners_does_not_store_them_after_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker(owners_of(A, D))
        before_the_record(
            world, monkeypatch, lambda: world.registry.commit((), one.owners.kept()[1])
        )
        assert await refused(apply(two, 1, D)) == "policy.version.used"
        assert await refused(two.refresh()) == "policy.owners.configuration"


async def test_one_owner_is_stored_by_a_change_only(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await apply(await world.broker(owners_of(A)), 1, A)
        assert await world.registry.policy_owners.get(version_name(0)) is None


@pytest.mark.parametrize("policies", [1, 2])
async def test_a_policy_after_a_change_is_not_judged_by_the_former_owners(
    tmp_path: Path, policies: int
) -> None:
    """A broker of an earlier release, which doesn't know of the change, has accepted it."""
    async with World(tmp_path) as world:
        one = await world.broker()
        for version in range(1, policies + 1):
            await apply(one, version, A, B)
        await replace(one, SECOND, A, C)
        document, signature = signed_policy(policies + 1, A, B)
        record = PolicyRecord(version=policies + 1, document=document, signature=signature)
        table = world.registry.policies
        await world.registry.commit((), table.sealed(POLICY_NAME, record))
        assert await refused(one.refresh()) == "policy.owners.history"
        assert await refused(world.broker(SECOND)) == "policy.owners.history"


async def test_a_change_of_owners_knows_the_policy_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker()
        await apply(two, 1, A, B)
        commit = world.registry.commit

        async def applied_meanwhile(*arguments: Any) -> int | None:
            monkeypatch.setattr(world.registry, "commit", commit)
            await apply(two, 2, A, B)
            return await commit(*arguments)

        monkeypatch.setattr(world.registry, "commit", applied_meanwhile)
        assert await refused(replace(one, SECOND, A, C)) == "policy.owners.version"
        await replace(one, SECOND, A, C)
        assert (await world.broker()).policy.version == 2


def test_a_check_compares_a_policy_with_the_configuration_before_there_is_a_store(
    tmp_path: Path,
) -> None:
    document, signatures = signed_policy(1, D)
    (tmp_path / "policy.toml").write_bytes(document)
    (tmp_path / "policy.toml.sig").write_bytes(signatures)
    (tmp_path / "owner.pem").write_bytes(
        A.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    write_key(tmp_path / "kek", bytes(32))
    config = BrokerConfig(
        policy_file=str(tmp_path / "policy.toml"),
        policy_owner_key=str(tmp_path / "owner.pem"),
        key_file=str(tmp_path / "kek"),
    )
    with pytest.raises(Error) as caught:
        check_broker(config, tmp_path)
    assert caught.value.reason == "policy.signature"
    # Afterwards the store may have other owners, who signed it.
    (tmp_path / "broker.sqlite").touch()
    with capture_logs() as logs:
        check_broker(config, tmp_path)
    [warning] = logs
    assert (warning["event"], warning["signed"]) == ("policy_lacks_signatures", 0)
    (tmp_path / "policy.toml.sig").write_bytes(b"{garbage" * 20)
    with pytest.raises(Error) as caught:
        check_broker(config, tmp_path)
    assert caught.value.reason == "policy.signature.malformed"


async def test_a_reload_with_other_owners_changes_nothing_by_itself(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker()
        two.owners.configure(owners_of(D))
        assert await refused(apply(two, 1, D)) == "policy.signature"
        # It goes on with those that it trusted, and follows their changes.
        await replace(one, SECOND, A, C)
        await two.refresh()
        assert two.owners.version == 1
        two.owners.configure(SECOND)
        assert two.owners.is_configured


async def test_no_policy_is_accepted_under_owners_that_another_broker_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker()
        await apply(one, 1, A, B)
        before_the_record(world, monkeypatch, lambda: replace(two, SECOND, A, C))
        assert await refused(apply(one, 2, A, B)) == "policy.version.used"
        stored = await world.registry.policies.get(POLICY_NAME)
        assert stored is not None
        assert stored.record.version == 1


async def test_of_two_changes_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(tmp_path) as world:
        one, two = await world.broker(), await world.broker()
        await apply(one, 1, A, B)
        before_the_record(world, monkeypatch, lambda: replace(two, SECOND, A, C))
        other = owners_of(A, B, threshold=2, version=1)
        assert await refused(replace(one, other, A, B)) == "policy.owners.version"
        await one.refresh()
        current = one.owners.current
        assert current is not None
        assert current.digest == SECOND.digest
