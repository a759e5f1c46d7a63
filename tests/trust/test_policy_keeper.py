"""The policy in force: signed by its owner, with growing versions; nodes are reappraised."""

from pathlib import Path
from typing import Any, Self

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker.policy_owners import owners_of
from brokers import MemoryAudit, not_covered
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import policy_keeper
from sealane.daemon.broker.owners import POLICY_LABEL, sign_document
from sealane.daemon.broker.owners_keeper import OwnersKeeper
from sealane.daemon.broker.policy import POLICY_BYTES_MAX, cautions, parse_policy
from sealane.daemon.broker.policy_keeper import REAPPRAISAL_SECONDS, PolicyKeeper
from sealane.daemon.broker.records import POLICY_NAME, PolicyRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import Error, UsageError, VerificationError

OWNER = Ed25519PrivateKey.generate()
REFERENCE = """
[[reference]]
name = "{name}"
evidence = "snp"
product = "Milan"
roles = ["gateway"]
measurements = {{ measurement = ["00"], host_data = "any" }}
tcb = {{ snp = 8 }}
tcb_statuses = []
advisories = []
properties = {{ vmpl = [0] }}
flags = {{ debug = true }}
certified_keys = []
secondary = []
accepted_tier = "warning"
"""


def sign_policy(content: bytes, key: Ed25519PrivateKey) -> bytes:
    return sign_document(POLICY_LABEL, content, key)


def document(version: int, more: str = "") -> bytes:
    return f"version = {version}\n{more}".encode()


class World:
    def __init__(self, directory: Path, owner: Ed25519PrivateKey | None = OWNER) -> None:
        self.directory = directory
        self.owner = owner
        self.audit = MemoryAudit()
        self.seen: list[int] = []

    async def __aenter__(self) -> Self:
        self.store = SqliteStore(self.directory / "broker.sqlite")
        self.registry = await Registry.open(self.store, WrappingKey(bytes(32)), node="b")
        self.keeper = self.another()
        return self

    def another(self) -> PolicyKeeper:
        return PolicyKeeper(
            self.registry,
            owners=OwnersKeeper(
                self.registry,
                configured=None if self.owner is None else owners_of(self.owner),
                cover=not_covered,
                audit=self.audit,
            ),
            audit=self.audit,
            changed=lambda policy: self.seen.append(policy.version),
        )

    async def __aexit__(self, *_: object) -> None:
        await self.registry.close()

    async def apply(self, content: bytes, signature: bytes | None = None) -> None:
        signed = sign_policy(content, OWNER) if signature is None else signature
        await self.keeper.apply(content, signed, source="p", subject="operator")


async def refused(awaitable: Any) -> str:
    with pytest.raises(Error) as caught:
        await awaitable
    return caught.value.reason


async def test_newer_policy_of_the_owner_is_put_into_force_and_recorded(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.apply(document(3))
        await world.apply(document(4))
        assert (world.keeper.policy.version, world.seen) == (4, [3, 4])
        assert world.keeper.document == document(4)
        last = world.audit.records[-1]
        assert (last["kind"], last["version_before"], last["version"]) == ("policy.apply", 3, 4)


@pytest.mark.parametrize("signature", [b"", bytes(64), b"x" * 200])
async def test_policy_without_its_owners_signature_is_refused(
    tmp_path: Path, signature: bytes
) -> None:
    async with World(tmp_path) as world:
        assert await refused(world.apply(document(1), signature)) == "policy.signature"
        assert world.keeper.policy.version == 0
        assert world.audit.records[-1]["reason"] == "policy.signature"
        other = sign_policy(document(2), OWNER)
        assert await refused(world.apply(document(1), other)) == "policy.signature"


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_version_is_used_once(tmp_path: Path, version: int) -> None:
    async with World(tmp_path) as world:
        await world.apply(document(3))
        again = document(version, "# another")
        assert await refused(world.apply(again)) == "policy.version.used"


async def test_restart_keeps_what_was_applied_and_takes_a_newer_file(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.apply(document(3))
        for version, expected in ((2, 3), (3, 3), (5, 5)):
            keeper = world.another()
            content = document(version)
            await keeper.offer(content, sign_policy(content, OWNER), source="p")
            assert keeper.policy.version == expected
        changed = document(5, "# changed in place")
        start = world.another().offer(changed, sign_policy(changed, OWNER), source="p")
        assert await refused(start) == "policy.version.used"


async def test_unsigned_file_stops_the_start(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        start = world.another().offer(document(1), b"", source="p")
        assert await refused(start) == "policy.signature"
    (tmp_path / "d").mkdir()
    async with World(tmp_path / "d", owner=None) as world:
        await world.keeper.offer(document(1), b"", source="p")
        assert world.audit.records[-1]["signed"] is False


async def test_change_by_another_broker_is_taken_over_and_a_roll_back_refused(
    tmp_path: Path,
) -> None:
    async with World(tmp_path) as world:
        other = world.another()
        await world.apply(document(1))
        await other.refresh()
        assert other.policy.version == 1
        before = await world.registry.policies.get(POLICY_NAME)
        assert before is not None
        await world.apply(document(2))
        await other.refresh()
        await world.registry.commit((), world.registry.policies.sealed(POLICY_NAME, before.record))
        assert await refused(other.refresh()) == "policy.rolled_back"
        assert other.policy.version == 2


async def test_results_under_an_older_policy_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(tmp_path) as world:
        monkeypatch.setattr(policy_keeper, "monotonic_ns", lambda: 10**9)
        await world.apply(document(1))
        await world.apply(document(2))
        end = 10**9 + REAPPRAISAL_SECONDS * 10**9
        world.keeper.check_version(2, now_ns=end)
        world.keeper.check_version(1, now_ns=end - 1)
        for version in (1, 3, 0):
            with pytest.raises(VerificationError) as caught:
                world.keeper.check_version(version, now_ns=end)
            assert caught.value.reason == "attestation.policy.changed"


REQUIRED = ("tcb", "measurements", "properties", "advisories", "tcb_statuses", "secondary")


@pytest.mark.parametrize("field", [*REQUIRED, "certified_keys", "accepted_tier", "product"])
def test_reference_values_without_a_field_are_refused(field: str) -> None:
    lines = REFERENCE.format(name="n").splitlines()
    text = "\n".join(line for line in lines if not line.startswith(f"{field} ="))
    with pytest.raises(UsageError) as caught:
        parse_policy(document(1, text), source="p")
    assert (
        str(caught.value) == f"p: reference.0.{field}: missing; it has no default [config.missing]"
    )


@pytest.mark.parametrize(
    "text",
    [
        REFERENCE.format(name="n") * 2,
        REFERENCE.format(name="n").replace('"snp"', '"software"'),
        REFERENCE.format(name="n").replace('["00"]', '["0"]'),
        REFERENCE.format(name="n").replace('["00"]', '["GG"]'),
        REFERENCE.format(name="n").replace('"any"', '"all"'),
        REFERENCE.format(name="n").replace("snp = 8", "snp = -1"),
        REFERENCE.format(name="n").replace('"warning"', '"contraindicated"'),
        '[[hardware]]\nid = "chip-id:XX"\nnodes = ["a"]\nroles = ["gateway"]\ntenant = "t"\n',
        '[[hardware]]\nid = "chip-id:00"\nnodes = []\nroles = ["gateway"]\ntenant = "t"\n',
        2 * '[[hardware]]\nid = "c:00"\nnodes = ["a"]\nroles = ["gateway"]\ntenant = "t"\n',
        "#" * POLICY_BYTES_MAX,
        "\xff",
        "x = [" * 5000,
    ],
)
def test_policies_with_a_fault_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(document(1, text), source="p")


def test_risky_choices_are_named() -> None:
    text = (
        REFERENCE.format(name="n") + "[software]\nallowed = true\n"
        '[[hardware]]\nid = "c:00"\nnodes = ["a"]\nroles = ["fabric"]\ntenant = "t"\n'
    )
    found = cautions(
        parse_policy(document(1, text), source="p"), safe_flags={"snp": {"debug": False}}
    )
    for words in ("software", "debug = true", "any host_data", "Milan", "tier warning", "fabric"):
        assert any(words in line for line in found), words


async def test_stored_policy_must_be_signed(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        record = PolicyRecord(version=1, document=document(1), signature=bytes(64))
        table = world.registry.policies
        await world.registry.commit((), table.sealed(POLICY_NAME, record))
        assert await refused(world.keeper.refresh()) == "policy.signature"
        assert world.keeper.policy.version == 0
