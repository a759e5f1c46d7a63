"""Snapshots of a broker's store, and what a restore changes: a restore is a rollback."""

import asyncio
import datetime as dt
import io
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from broker.policy_owners import new_keys, owners_of, signed, signed_owners
from broker.restoring import ANCHOR, Place
from brokers import MemoryAudit, succession_of
from control_plane import sealanectl, short_directory, write_key
from sealane.crypto.keys import WrappingKey
from sealane.crypto.lease import EPOCH_COUNTERS_MAX
from sealane.crypto.snapshot import (
    CONTENT_BYTES_MAX,
    PART_BYTES_MAX,
    RecipientKey,
    digest_of,
    parse_recipient,
    read_snapshot,
    sealed_snapshot,
)
from sealane.daemon.broker import snapshot as snapshots
from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.authority import AUTHORITY_KEY
from sealane.daemon.broker.key_epochs import KeyEpochs
from sealane.daemon.broker.opening import OpenedBroker
from sealane.daemon.broker.owners import POLICY_LABEL
from sealane.daemon.broker.owners_keeper import version_name
from sealane.daemon.broker.records import (
    AnchorRecord,
    DeviceRecord,
    DeviceRequestRecord,
    NodeRecord,
    Opening,
    PolicyOwnersRecord,
    PolicyRecord,
    VolumeRecord,
    instance_name,
)
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.restore import _fill, filled
from sealane.daemon.broker.restored import (
    ANCHOR_NUMBERS_AHEAD,
    EPOCH_BASE_MIN,
    FENCING_EPOCHS_AHEAD,
    KEY_EPOCHS_AHEAD,
    Accepted,
)
from sealane.daemon.broker.snapshot import RECORDS_BYTES_MAX, Snapshots, _pieces, decoded
from sealane.daemon.broker.store.contract import (
    KEY_BYTES_MAX,
    STATE_KEY,
    VALUE_BYTES_MAX,
    Store,
)
from sealane.daemon.broker.store.state import SetHash, State
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import Error, LeaseError, UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind
from vendors.authority import p256, root

NAME = "name-of-a-volume-which-nobody-else-may-learn"
VOLUME = uuid.UUID(int=1)
DEVICE = uuid.UUID(int=2)
DELETED, WORN = uuid.UUID(int=3), uuid.UUID(int=4)


@pytest.fixture
def place() -> Iterator[Place]:
    with short_directory() as root:
        yield Place(root)


async def filled_store(opened: OpenedBroker) -> None:
    """Put one record of each kind that a restore changes."""
    registry = opened.service.registry
    (await registry.tenant_key("t", 0))[:] = bytes(32)
    volume = VolumeRecord(
        volume_id=VOLUME,
        tenant="t",
        display_name=NAME,
        sector_count=1,
        target_node="s",
        generation=1,
        key_epoch=3,
        counters_leased=7,
    )
    worn = volume.model_copy(update={"volume_id": WORN, "key_epoch": 256})
    deleted = volume.model_copy(update={"volume_id": DELETED, "is_deleted": True})
    device, same_key = await registry.new_device(DEVICE, owner="s")
    device = device.model_copy(
        update={
            "anchor": AnchorKind.BROKER,
            "is_initialised": True,
            "opening": Opening(node="s", incarnation=b"i", fencing_epoch=1),
        }
    )
    await registry.commit(
        [same_key],
        {
            **registry.volumes.sealed(str(VOLUME), volume),
            **registry.volumes.sealed(str(WORN), worn),
            **registry.volumes.sealed(str(DELETED), deleted),
            **registry.devices.sealed(str(DEVICE), device),
            **registry.anchors.sealed(f"{DEVICE}/catalogue", AnchorRecord(number=9, blob=b"b")),
            **registry.device_requests.sealed("s", DeviceRequestRecord(is_next_authorized=True)),
            **registry.nodes.sealed("gateway/g", NodeRecord(node="g", role="gateway")),
            **registry.nodes.sealed("target/s", NodeRecord(node="s", role="target")),
        },
    )


async def taken(place: Place) -> bytes:
    async with place.opened() as opened:
        await filled_store(opened)
        return await place.snapshot(opened)


async def test_restored_store_is_served_and_is_safe_whatever_happened_since(place: Place) -> None:
    snapshot = await taken(place)
    assert NAME.encode() not in snapshot
    place.lose()
    before = dt.datetime.now(dt.UTC)
    restore = await place.restore(snapshot, accepted=Accepted(nodes=["g"]))
    assert restore.revision.held_nodes == ("s",)
    assert restore.revision.held_devices == (DEVICE,)
    assert restore.revision.unwritable_volumes == (WORN,)
    async with place.opened() as opened:
        registry = opened.service.registry
        arena = opened.instance.arena
        assert arena.broker_instance == 7
        assert arena.start_epoch > EPOCH_BASE_MIN
        volume = (await registry.volume(VOLUME)).record
        assert (volume.display_name, volume.key_epoch) == (NAME, 3 + KEY_EPOCHS_AHEAD)
        assert volume.counters_leased == 0
        worn = (await registry.volume(WORN)).record
        assert (worn.key_epoch, worn.counters_leased) == (256, EPOCH_COUNTERS_MAX)
        gateway = await registry.nodes.get("gateway/g")
        target = await registry.nodes.get("target/s")
        assert gateway is not None
        assert target is not None
        assert gateway.record.revocation is None
        assert gateway.record.restored_at is not None
        assert gateway.record.restored_at >= before
        assert target.record.revocation is not None
        assert await registry.anchors.get(f"{DEVICE}/catalogue") is None
        assert await registry.device_requests.get("s") is None
        device = await registry.devices.get(str(DEVICE))
        assert device is not None
        check_device(device.record, is_initialised=True)
    log = (place.state / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in log].count("broker.restore") == 1
    async with place.opened() as opened:
        assert opened.instance.arena.start_epoch == arena.start_epoch + 1
    log = (place.state / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in log].count("broker.restore") == 1


def check_device(device: DeviceRecord, *, is_initialised: bool) -> None:
    assert device.is_initialised is is_initialised
    assert device.fencing_epoch == 1 + FENCING_EPOCHS_AHEAD
    assert device.anchor_floor == 9 + ANCHOR_NUMBERS_AHEAD
    assert device.opening is not None
    assert device.opening.until is not None


async def test_only_a_device_accepted_by_name_is_accepted_as_it_is_found(place: Place) -> None:
    snapshot = await taken(place)
    place.lose()
    restore = await place.restore(snapshot, accepted=Accepted(devices=[DEVICE]))
    assert restore.revision.held_devices == ()
    async with place.opened() as opened:
        device = await opened.service.registry.devices.get(str(DEVICE))
        assert device is not None
        check_device(device.record, is_initialised=False)


async def test_snapshot_from_the_middle_of_a_rotation_needs_both_keys_and_goes_on(
    place: Place,
) -> None:
    config, following = place.root / "broker.toml", place.root / "kek2"
    write_key(following, b"2" * 32)
    without = config.read_text()
    config.write_text(f'{without}[broker.next_key]\nkey_file = "{following}"\n')
    async with place.opened() as opened:
        await filled_store(opened)
        await opened.rewrapping.begin()
        snapshot = await place.snapshot(opened)
    place.lose()
    both = config.read_text()
    config.write_text(both.partition("[broker.next_key]")[0])
    with pytest.raises(UsageError) as caught:
        place.prepared(snapshot)
    assert caught.value.reason == "broker.key.missing"
    config.write_text(both)
    restore = await place.restore(snapshot)
    ids = [WrappingKey(path.read_bytes()).key_id for path in (following, place.root / "kek")]
    assert restore.key_ids == tuple(ids)
    async with place.opened() as opened:
        await opened.rewrapping.proceed()
        progress = await opened.rewrapping.progress()
        assert (progress.key_id, progress.left) == (ids[0], 0)
        assert progress.retired == (ids[1],)
        assert await opened.service.registry.tenant_key("t", 0)


async def test_second_restore_of_a_snapshot_repeats_nothing_of_the_first(place: Place) -> None:
    """A holder that was revoked after the first one doesn't have the key after the second."""
    snapshot = await taken(place)
    place.lose()
    await place.restore(snapshot)
    async with place.opened() as opened:
        registry = opened.service.registry
        held = (await registry.volume(VOLUME)).record.key_epoch
        epochs = KeyEpochs(registry)
        await epochs.note_holder("spiffe://sealane/gateway/evil", VOLUME, held)
        await epochs.rotate_held_by("spiffe://sealane/gateway/evil")
        used = (await registry.volume(VOLUME)).record.key_epoch
        second = await place.snapshot(opened)
    place.lose(instance=8)
    await place.restore(snapshot, restored_before=1)
    async with place.opened() as opened:
        registry = opened.service.registry
        volume = (await registry.volume(VOLUME)).record
        assert volume.key_epoch == 3 + 2 * KEY_EPOCHS_AHEAD > used > held
        device = await registry.devices.get(str(DEVICE))
        assert device is not None
        assert device.record.fencing_epoch == 1 + 2 * FENCING_EPOCHS_AHEAD
        assert device.record.anchor_floor == 9 + 2 * ANCHOR_NUMBERS_AHEAD
        third = await place.snapshot(opened)
    # A snapshot knows of the restores before it, and only of these.
    place.lose(instance=9)
    for known, content in ((1, second), (2, third)):
        with pytest.raises(UsageError) as caught:
            place.prepared(content, restored_before=known - 1)
        assert caught.value.reason == "broker.restore.count"
    await place.restore(third, restored_before=2)
    async with place.opened() as opened:
        volume = (await opened.service.registry.volume(VOLUME)).record
        assert volume.key_epoch == 3 + 3 * KEY_EPOCHS_AHEAD


async def test_volume_with_too_few_key_epochs_left_gets_no_leases(place: Place) -> None:
    async with place.opened() as opened:
        registry = opened.service.registry
        await filled_store(opened)
        stored = await registry.volume(WORN)
        near = stored.record.model_copy(update={"key_epoch": 250})
        await registry.commit(puts=registry.volumes.sealed(str(WORN), near))
        snapshot = await place.snapshot(opened)
    place.lose()
    restore = await place.restore(snapshot)
    assert restore.revision.unwritable_volumes == (WORN,)
    async with place.opened() as opened:
        worn = (await opened.service.registry.volume(WORN)).record
        assert (worn.key_epoch, worn.counters_leased) == (256, EPOCH_COUNTERS_MAX)
        with pytest.raises(LeaseError) as caught:
            worn.with_lease(1)
        assert caught.value.reason == "lease.key_exhausted"


async def test_retired_instances_hold_up_no_rotation(place: Place) -> None:
    snapshot = await taken(place)
    place.lose()
    await place.restore(snapshot)
    config, following = place.root / "broker.toml", place.root / "kek2"
    write_key(following, b"2" * 32)
    config.write_text(f'{config.read_text()}[broker.next_key]\nkey_file = "{following}"\n')
    async with place.opened() as opened:
        await opened.rewrapping.begin()
        await opened.rewrapping.proceed()
        progress = await opened.rewrapping.progress()
        assert [*progress.held] == [instance_name(7)]
        assert progress.key_id == WrappingKey(following.read_bytes()).key_id


@pytest.mark.parametrize(
    ("anchor", "is_initialised"), [(None, False), (AnchorKind.TPM2, True), (AnchorKind.FILE, False)]
)
async def test_device_whose_anchor_is_elsewhere_stays_as_it_is(
    place: Place, anchor: AnchorKind | None, is_initialised: bool
) -> None:
    """One that was never opened can be; an anchor in a TPM can't be given up by accepting it."""
    async with place.opened() as opened:
        registry = opened.service.registry
        await filled_store(opened)
        stored = await registry.devices.get(str(DEVICE))
        assert stored is not None
        update = {"anchor": anchor, "is_initialised": is_initialised, "opening": None}
        device = stored.record.model_copy(update=update)
        await registry.commit(puts=registry.devices.sealed(str(DEVICE), device))
        snapshot = await place.snapshot(opened)
    place.lose()
    with pytest.raises(UsageError) as caught:
        place.prepared(snapshot, accepted=Accepted(devices=[DEVICE]))
    assert caught.value.reason == "broker.restore.device"
    restore = await place.restore(snapshot)
    assert restore.revision.held_devices == ()
    async with place.opened() as opened:
        stored = await opened.service.registry.devices.get(str(DEVICE))
        assert stored is not None
        assert (stored.record.anchor, stored.record.is_initialised) == (anchor, is_initialised)
        assert stored.record.fencing_epoch == 1 + FENCING_EPOCHS_AHEAD


async def test_retired_instance_is_refused_even_with_new_counters(place: Place) -> None:
    snapshot = await taken(place)
    place.lose()
    await place.restore(snapshot)
    path = place.root / "broker.toml"
    path.write_text(path.read_text().replace("instance = 7", "instance = 1"))
    with pytest.raises(UsageError) as caught:
        async with place.opened():
            pass
    assert caught.value.reason == "broker.instance.retired"


def _truncated(content: bytes) -> list[bytes]:
    return [content[:length] for length in (0, 7, 40, 500, len(content) // 2, len(content) - 1)]


def _flipped(content: bytes) -> list[bytes]:
    """Flip one bit at a time: all over the head, then here and there."""
    places = [*range(900), *range(900, len(content), 97), *range(len(content) - 80, len(content))]
    return [
        content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for at in places
        if at < len(content)
    ]


@pytest.mark.parametrize(
    "spoilt", [_truncated, _flipped, lambda content: [content + b"\0", content + content]]
)
async def test_file_that_is_not_as_it_was_written_is_refused(
    spoilt: Callable[[bytes], list[bytes]], place: Place
) -> None:
    snapshot = await taken(place)
    anchor, key = place.anchor, place.recipient
    for content in spoilt(snapshot):
        with pytest.raises(Error) as caught:
            read_snapshot(io.BytesIO(content), key=key, anchor=anchor)
        assert caught.value.reason.startswith("broker.snapshot.")
        assert caught.value.exit_code == 3 or caught.value.reason == "broker.snapshot.version"


async def test_snapshot_of_others_or_for_others_is_refused(place: Place) -> None:
    snapshot = await taken(place)
    with short_directory() as root:
        other = Place(root)
        await taken(other)
        other_anchor = other.anchor
    place.lose()
    with pytest.raises(VerificationError) as caught:
        read_snapshot(io.BytesIO(snapshot), key=place.recipient, anchor=other_anchor)
    assert caught.value.reason == "broker.snapshot.anchor"
    with pytest.raises(VerificationError) as caught:
        read_snapshot(io.BytesIO(snapshot), key=RecipientKey.create(), anchor=place.anchor)
    assert caught.value.reason == "broker.snapshot.recipient"
    (place.root / "kek").write_bytes(bytes(32))
    with pytest.raises(VerificationError) as caught:
        place.prepared(snapshot)
    assert caught.value.reason == "key.wrap.invalid"
    assert [*place.state.glob("broker.sqlite*")] == []


async def test_snapshot_taken_before_the_broker_follows_a_step_can_be_restored(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.opened() as opened:
        registry = opened.service.registry
        steps = succession_of(registry)
        await steps.announce()
        monkeypatch.setattr(Authorities, "become", lambda *_: None)
        await steps.switch()
        snapshot = await place.snapshot(opened)
        stored = (await registry.authority_record()).record
        anchor = x509.load_der_x509_certificate(stored.certificate)
        assert registry.authority.certificate != anchor
    (place.root / ANCHOR).write_bytes(anchor.public_bytes(Encoding.PEM))
    place.lose()
    await place.restore(snapshot)


async def test_snapshot_of_a_later_format_is_refused_as_such(place: Place) -> None:
    snapshot = await taken(place)
    later = snapshot[:8] + b"\0\2" + snapshot[10:]
    with pytest.raises(UsageError) as caught:
        read_snapshot(io.BytesIO(later), key=place.recipient, anchor=place.anchor)
    assert caught.value.reason == "broker.snapshot.version"


async def test_nothing_leaves_before_it_is_in_the_audit_log(place: Place) -> None:
    class Full(MemoryAudit):
        async def record(self, kind: str, **_: object) -> None:  # type: ignore[override]
            raise UnavailableError("audit.unwritable", f"no space for {kind}")

    public = place.recipient.kem.public_key
    async with place.opened() as opened:
        registry, metrics = opened.service.registry, Metrics()
        refused = Snapshots(registry, node="broker", audit=Full(), metrics=metrics)
        with pytest.raises(UnavailableError):
            await anext(aiter(refused.take(public)))
        audit = MemoryAudit()
        snapshots = Snapshots(registry, node="broker", audit=audit, metrics=metrics)
        with pytest.raises(UsageError):
            await anext(aiter(snapshots.take(public[1:])))
        with pytest.raises(VerificationError) as caught:
            await anext(aiter(snapshots.take(bytes(32))))  # a point of low order
        assert caught.value.reason == "key.kem.invalid"
        assert audit.records == []
        async for _ in snapshots.take(public):
            pass
    (record,) = audit.records
    assert (record["kind"], record["outcome"]) == ("broker.snapshot", "done")
    assert metrics.broker.snapshots._value.get() == 1
    assert metrics.broker.last_snapshot._value.get() > 0


async def test_store_larger_than_a_snapshot_may_be_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that can't be restored would be worse than none."""
    assert PART_BYTES_MAX > 2 * (KEY_BYTES_MAX + VALUE_BYTES_MAX), "parts are half full at least"
    parts = 2 * CONTENT_BYTES_MAX // PART_BYTES_MAX
    assert RECORDS_BYTES_MAX + 16 * parts <= CONTENT_BYTES_MAX
    snapshot = await taken(place)
    _, content = read_snapshot(io.BytesIO(snapshot), key=place.recipient, anchor=place.anchor)
    async with place.opened() as opened:
        monkeypatch.setattr(snapshots, "RECORDS_BYTES_MAX", len(content) // 2)
        with pytest.raises(UsageError) as caught:
            await place.snapshot(opened)
        assert caught.value.reason == "broker.snapshot.size"


async def test_calls_go_on_while_a_copy_is_checked(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_in = []

    def state_of(self: SetHash, *arguments: Any, **options: Any) -> State:
        checked_in.append(threading.current_thread())
        return original(self, *arguments, **options)

    original = SetHash.state_of
    monkeypatch.setattr(SetHash, "state_of", state_of)
    await registry.store.copy()
    assert checked_in
    assert threading.main_thread() not in checked_in


async def test_snapshot_made_by_who_only_knows_the_recipient_is_refused(place: Place) -> None:
    snapshot = await taken(place)
    header, content = read_snapshot(io.BytesIO(snapshot), key=place.recipient, anchor=place.anchor)
    forged = b"".join(
        sealed_snapshot(
            header,
            [content[at : at + PART_BYTES_MAX] for at in range(0, len(content), PART_BYTES_MAX)],
            recipient=place.recipient.kem.public_key,
            signing_key=ec.generate_private_key(ec.SECP256R1()),
        )
    )
    with pytest.raises(VerificationError) as caught:
        read_snapshot(io.BytesIO(forged), key=place.recipient, anchor=place.anchor)
    assert caught.value.reason == "broker.snapshot.signature"


@pytest.mark.parametrize("spoil", ["drop", "schema", "stateless"])
async def test_records_that_are_no_state_of_this_version_are_refused(
    spoil: str, place: Place
) -> None:
    async with place.opened() as opened:
        await filled_store(opened)
        snapshot = await place.snapshot(opened)
        signing_key = opened.service.authority.signing_key
        header, content = read_snapshot(
            io.BytesIO(snapshot), key=place.recipient, anchor=place.anchor
        )
        entries = decoded(content)
        if spoil == "drop":
            del entries[f"volumes/{VOLUME}"]
        elif spoil == "stateless":
            del entries[STATE_KEY]
        else:
            header = replace(header, schema=header.schema + 1)
        changed = b"".join(
            sealed_snapshot(
                header,
                _pieces(entries),
                recipient=place.recipient.kem.public_key,
                signing_key=signing_key,
            )
        )
    place.lose()
    with pytest.raises(Error) as caught:
        place.prepared(changed)
    expected = "broker.snapshot.version" if spoil == "schema" else "broker.store.rolled_back"
    assert caught.value.reason == expected


@pytest.mark.parametrize("anchor", ["none", "a leaf's certificate"])
async def test_restore_needs_a_trust_anchor(place: Place, anchor: str) -> None:
    for name, content in (("snapshot", b""), ("key", place.recipient.pem())):
        write_key(place.root / name, content)
    leaf = root("stranger", p256()).issue("a leaf", p256()).pem
    (place.root / ANCHOR).write_bytes(b"" if anchor == "none" else leaf)
    refused = sealanectl(
        *("broker", "restore", place.root / "snapshot", "--config", place.root / "broker.toml"),
        *("--key", place.root / "key", "--trust-anchor", place.root / ANCHOR),
        *("--restored-before", "0", "--yes"),
    )
    assert refused.returncode == 3
    assert "certificate.anchor.malformed" in refused.stderr


async def test_restore_needs_an_empty_store_and_what_was_never_used(place: Place) -> None:
    snapshot = await taken(place)
    with pytest.raises(UsageError) as caught:
        place.prepared(snapshot)
    assert caught.value.reason == "broker.restore.instance"
    path = place.root / "broker.toml"
    path.write_text(path.read_text().replace("[broker]\n", "[broker]\ninstance = 7\n"))
    with pytest.raises(UsageError) as caught:
        place.prepared(snapshot)
    assert caught.value.reason == "broker.restore.counter"
    for counter in place.state.glob("*.counter"):
        counter.unlink()
    restore = place.prepared(snapshot)
    with pytest.raises(UsageError) as caught:
        await filled(restore, place.config)
    assert caught.value.reason == "broker.restore.store"
    with pytest.raises(UsageError) as caught:
        place.prepared(snapshot, accepted=Accepted(nodes=["nobody"]))
    assert caught.value.reason == "node.not_found"
    with pytest.raises(UsageError) as caught:
        place.prepared(snapshot, accepted=Accepted(devices=[VOLUME]))
    assert caught.value.reason == "device.not_found"


async def test_policy_must_be_newer_than_the_snapshot(place: Place) -> None:
    async with place.opened() as opened:
        registry = opened.service.registry
        await registry.commit(
            puts=registry.policies.sealed(
                "in-force", PolicyRecord(version=2, document=b"", signature=b"")
            )
        )
        snapshot = await place.snapshot(opened)
    place.lose()
    with pytest.raises(UsageError) as caught:
        place.prepared(snapshot)
    assert caught.value.reason == "broker.restore.policy"
    place.site.write_policy({"g": ["gateway"]})
    assert place.prepared(snapshot).revision.policy_version == 2


async def test_owners_of_the_snapshot_must_be_configured_and_sign_the_policy(place: Place) -> None:
    keys = new_keys(4)
    first = owners_of(*keys[:3], threshold=2)
    async with place.opened() as opened:
        table = opened.service.registry.policy_owners
        second = owners_of(*keys[1:], threshold=2, version=1)
        for owners, signers in ((first, ()), (second, keys[:3])):
            document, signatures = signed_owners(owners, *signers)
            record = PolicyOwnersRecord(
                version=owners.version, document=document, signatures=signatures
            )
            await opened.service.registry.commit(
                puts=table.sealed(version_name(owners.version), record)
            )
        snapshot = await place.snapshot(opened)
    place.lose()
    config = place.root / "broker.toml"
    unsigned = config.read_text()

    def refused() -> str:
        with pytest.raises(VerificationError) as caught:
            place.prepared(snapshot)
        return caught.value.reason

    assert refused() == "policy.owners.configuration"
    for i, key in enumerate(keys):
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (place.root / f"o{i}.pem").write_bytes(pem)

    def configure(*numbers: int) -> None:
        names = ", ".join(f'"{place.root}/o{i}.pem"' for i in numbers)
        owners = f"policy_owners = {{ keys = [{names}], threshold = 2 }}"
        config.write_text(unsigned.replace("allow_unsigned_policy = true", owners))

    policy = place.root / "policy.toml"
    signature = place.root / "policy.toml.sig"
    configure(0, 3)
    assert refused() == "policy.owners.configuration"
    for configured in ((0, 1, 2), (1, 2, 3)):
        configure(*configured)
        signature.write_bytes(signed(POLICY_LABEL, policy.read_bytes(), keys[:2]))
        assert refused() == "policy.signature"
        signature.write_bytes(signed(POLICY_LABEL, policy.read_bytes(), keys[2:]))
        place.prepared(snapshot)


async def test_restore_that_fails_leaves_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await taken(place)
    place.lose()

    def fail(path: Path, target: Path) -> Path:
        raise OSError(5, "Input/output error", f"{path} {target}")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(UnavailableError):
            await place.restore(snapshot)
    assert [*place.state.glob("broker.sqlite*")] == []
    await place.restore(snapshot)
    async with place.opened():
        pass


async def test_snapshot_is_one_revision_while_brokers_commit(registry: Registry) -> None:
    is_over = asyncio.Event()

    async def load(tenant: int) -> None:
        while not is_over.is_set():
            await registry.tenant_key(f"t{tenant}", 0)
            tenant += 8

    async with asyncio.TaskGroup() as tasks:
        for tenant in range(8):
            tasks.create_task(load(tenant))
        numbers = []
        for _ in range(5):
            entries, state = await registry.store.copy()
            assert len(entries) == state.count + 1
            numbers.append(state.number)
        is_over.set()
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]


async def test_any_store_is_filled(store: Store, place: Place) -> None:
    snapshot = await taken(place)
    place.lose()
    restore = place.prepared(snapshot)
    await _fill(store, restore)
    for key, value in restore.revision.entries.items():
        entry = await store.get(key)
        assert entry is not None
        assert entry.value == value
    with pytest.raises(UsageError) as caught:
        await _fill(store, restore)
    assert caught.value.reason == "broker.restore.store"
    assert AUTHORITY_KEY in restore.revision.entries


async def test_operator_restores_only_with_confirmation(place: Place) -> None:
    snapshot = await taken(place)
    place.lose()
    file, key = place.root / "snapshot", place.root / "recipient"
    file.write_bytes(snapshot)
    key.write_bytes(place.recipient.pem())
    key.chmod(0o600)
    arguments = (
        *("broker", "restore", file, "--config", place.root / "broker.toml", "--key", key),
        *("--trust-anchor", place.root / "trust-anchor.pem"),
        *("--restored-before", "0"),
    )
    key_id = WrappingKey((place.root / "kek").read_bytes()).key_id.hex()
    asked = await asyncio.to_thread(sealanectl, *arguments)
    assert asked.returncode == 2
    assert "confirmation.missing" in asked.stderr, asked.stderr
    assert "tenants' keys that were replaced since are in use again" in asked.stderr
    assert [*place.state.glob("broker.sqlite*")] == []
    file.write_bytes(snapshot[:-1])
    refused = await asyncio.to_thread(sealanectl, *arguments, "--yes")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (3, 1)
    file.write_bytes(snapshot)
    done = await asyncio.to_thread(sealanectl, "-o", "json", *arguments, "--yes")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["revoked nodes"] == ["g", "s"]
    assert outcome["key encryption keys"] == [key_id], "even if it was retired since"
    assert (outcome["restore"], outcome["broker instance"]) == (1, 7)
    assert outcome["base of start epochs"] >= EPOCH_BASE_MIN
    assert digest_of(place.recipient.kem.public_key) in snapshot.decode("latin-1")


async def test_pair_of_a_recipient_is_made_whole_or_not_at_all(place: Place) -> None:
    key, public = place.root / "recipient", place.root / "recipient.pub"
    public.write_bytes(b"another's")
    refused = await asyncio.to_thread(sealanectl, "key", "recipient", key)
    assert (refused.returncode, key.exists()) == (2, False)
    assert public.read_bytes() == b"another's"
    public.unlink()
    made = await asyncio.to_thread(sealanectl, "key", "recipient", key)
    assert made.returncode == 0, made.stderr
    private = RecipientKey.parse(key.read_bytes(), source="")
    assert parse_recipient(public.read_bytes(), source="") == private.kem.public_key
