"""The broker's store and service: durable start epoch, tenants apart, leases once."""

import contextlib
import dataclasses
import datetime as dt
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.certificates import Subject
from sealane.crypto.hpke import Context, open_signed
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.keys import WrappingKey
from sealane.crypto.lease import LEASE_COUNTERS, START_EPOCH_MAX
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.store import BrokerStore, VolumeRecord
from sealane.daemon.metrics import Metrics
from sealane.errors import LeaseError, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2

KEM = X25519KemKey.create()
REQUEST = "00000000-0000-4000-8000-000000000001"


def _subject(role: str = "gateway", node: str = "g", tenant: str = "t") -> Subject:
    return Subject(
        node=node,
        role=role,
        tenant=tenant,
        incarnation=bytes(range(16)),
        kem_public_key=KEM.public_key,
    )


GATEWAY = _subject()


def _record(tenant: str = "t") -> VolumeRecord:
    return VolumeRecord(
        volume_id=uuid.uuid4(),
        tenant=tenant,
        display_name="d",
        sector_count=1,
        target_node="s",
        generation=1,
        key_epoch=1,
    )


def _broker(path: Path, kek: bytes = bytes(32)) -> BrokerService:
    return BrokerService(
        BrokerStore(path), WrappingKey(kek), node="b", instance=3, metrics=Metrics()
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerService]:
    service = _broker(tmp_path / "b.sqlite")
    yield service
    service.close()


async def _register(broker: BrokerService, caller: Subject = GATEWAY) -> str:
    answer = await broker.register_volume(
        caller, request_id=str(uuid.uuid4()), display_name="", size_bytes=4096, target_node="s"
    )
    return broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor).volume_id


def test_start_epoch_is_durable_and_never_served_twice(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    seen = []
    for _ in range(4):
        store = BrokerStore(path)
        seen.append(store.next_start_epoch())
        store.close()
    assert seen == [1, 2, 3, 4]


def test_start_epoch_survives_the_loss_of_the_process(tmp_path: Path) -> None:
    store = BrokerStore(tmp_path / "b.sqlite")
    store.next_start_epoch()
    # What a crash leaves is what is in the files now, without an orderly close.
    for file in tmp_path.glob("b.sqlite*"):
        shutil.copy(file, tmp_path / file.name.replace("b.", "copy."))
    store.close()
    copy = BrokerStore(tmp_path / "copy.sqlite")
    assert copy.next_start_epoch() == 2
    copy.close()


@pytest.mark.xfail(strict=True, reason="no anchor yet: docs/threat-model.md, C2 and C6")
def test_rolled_back_store_does_not_repeat_a_start_epoch(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    BrokerStore(path).close()
    backup = path.read_bytes()
    served = []
    for _ in range(2):
        path.write_bytes(backup)
        store = BrokerStore(path)
        served.append(store.next_start_epoch())
        store.close()
    assert served[0] != served[1]


def test_start_epochs_run_out_loudly(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    BrokerStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE start SET epoch = ?", (START_EPOCH_MAX,))
    db.close()
    store = BrokerStore(path)
    with pytest.raises(LeaseError) as caught:
        store.next_start_epoch()
    store.close()
    assert caught.value.reason == "lease.start_epoch.exhausted"


def test_second_broker_on_one_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    store = BrokerStore(path)
    store.next_start_epoch()
    with pytest.raises(UnavailableError) as caught:
        BrokerStore(path)
    store.close()
    assert caught.value.reason == "broker.store.locked"


def test_store_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(VerificationError) as caught:
        BrokerStore(path)
    assert caught.value.reason == "broker.store.malformed"


def test_store_keeps_itself_to_its_owner(tmp_path: Path) -> None:
    store = BrokerStore(tmp_path / "b.sqlite")
    assert (tmp_path / "b.sqlite").stat().st_mode & 0o777 == 0o600
    store.close()


def test_same_request_registers_once(tmp_path: Path) -> None:
    store = BrokerStore(tmp_path / "b.sqlite")
    first, is_new = store.register(_record(), request_id=REQUEST)
    assert is_new
    assert store.register(_record(), request_id=REQUEST) == (first, False)
    assert store.register(_record("other"), request_id=REQUEST)[1]
    with pytest.raises(UsageError) as caught:
        store.register(
            VolumeRecord(
                volume_id=uuid.uuid4(),
                tenant="t",
                display_name="d",
                sector_count=2,
                target_node="s",
                generation=1,
                key_epoch=1,
            ),
            request_id=REQUEST,
        )
    assert caught.value.reason == "volume.request.exists"
    store.unregister(first.volume_id)
    assert store.register(_record(), request_id=REQUEST)[1]
    store.close()


def test_authority_survives_a_restart_and_needs_its_key(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    first = _broker(path)
    anchor = first.authority.anchor_pem
    first.close()
    again = _broker(path)
    assert again.authority.anchor_pem == anchor
    assert again.arena.start_epoch == 2
    again.close()
    with pytest.raises(VerificationError) as caught:
        _broker(path, kek=b"\1" * 32)
    assert caught.value.reason == "key.wrap.invalid"


async def test_key_opens_for_its_recipient_and_is_stable(broker: BrokerService) -> None:
    volume_id = await _register(broker)
    keys = []
    for request in (bytes(16), b"\1" * 16):
        secret = await broker.release_key(
            GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request
        )
        context = Context(
            purpose="volume key",
            recipient=GATEWAY.spiffe_id,
            incarnation=GATEWAY.incarnation,
            request_id=request,
            volume_id=volume_id,
            key_epoch=1,
        )
        keys.append(
            open_signed(
                secret,
                private_key=KEM,
                context=context,
                signer=broker.authority.signing_key.public_key(),
            )
        )
    assert keys[0] == keys[1]
    assert len(keys[0]) == 32


@pytest.mark.parametrize(
    "caller",
    [
        _subject(tenant="other"),
        _subject(role="target", node="another"),
        _subject(role="fabric"),
    ],
)
async def test_volume_is_unknown_to_whom_it_does_not_concern(
    broker: BrokerService, caller: Subject
) -> None:
    volume_id = await _register(broker)
    for call in (
        broker.descriptor(caller, volume_id),
        broker.unregister_volume(caller, volume_id),
        broker.release_key(caller, volume_id=volume_id, key_epoch=1, request_id=bytes(16)),
        broker.grant_lease(caller, volume_id=volume_id, key_epoch=1, request_id=bytes(16)),
    ):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.reason == "volume.not_found"


async def test_other_key_epoch_is_refused(broker: BrokerService) -> None:
    volume_id = await _register(broker)
    for call in (broker.release_key, broker.grant_lease):
        with pytest.raises(UsageError) as caught:
            await call(GATEWAY, volume_id=volume_id, key_epoch=2, request_id=bytes(16))
        assert caught.value.reason == "volume.key_epoch"


async def test_key_of_a_deleted_volume_is_gone(broker: BrokerService) -> None:
    volume_id = await _register(broker)
    await broker.unregister_volume(GATEWAY, volume_id)
    with pytest.raises(UsageError) as caught:
        await broker.release_key(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=bytes(16))
    assert caught.value.reason == "volume.not_found"


async def test_a_returned_lease_goes_out_again_and_a_late_retry_does_not_get_it(
    broker: BrokerService,
) -> None:
    volume_id = await _register(broker)
    request = bytes(15) + b"r"
    first = await broker.grant_lease(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request)
    arena = (broker.arena.broker_instance, broker.arena.start_epoch)

    async def give_back(
        caller: Subject = GATEWAY, arena: tuple[int, int] = arena, touched: int = 256
    ) -> int:
        return await broker.return_lease(
            caller, volume_id=volume_id, arena=arena, lease_id=first.lease_id, touched=[touched]
        )

    for arguments, reason in (
        ({"arena": (arena[0], arena[1] + 1)}, "lease.return.arena"),
        ({"caller": dataclasses.replace(GATEWAY, incarnation=b"x" * 16)}, "lease.return.holder"),
        ({"touched": 255}, "lease.return.malformed"),
    ):
        with pytest.raises(LeaseError) as caught:
            await give_back(**arguments)  # type: ignore[arg-type]
        assert caught.value.reason == reason
    assert await give_back() == LEASE_COUNTERS
    with pytest.raises(LeaseError):
        await give_back()
    # The counters of the first lease are somebody else's now.
    second = await broker.grant_lease(
        GATEWAY, volume_id=volume_id, key_epoch=1, request_id=bytes(15) + b"s"
    )
    again = await broker.grant_lease(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request)
    assert len({first.lease_id, second.lease_id, again.lease_id}) == 3


async def test_leases_of_one_start_never_overlap_and_a_retry_gets_its_own(
    broker: BrokerService,
) -> None:
    volume_id = await _register(broker)
    requests = [bytes([i]) * 16 for i in range(5)]
    for request in requests:
        await broker.grant_lease(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request)
    after = broker.arena.grant(1, incarnation=bytes(16)).ranges[0]
    assert after.counter_start == 256 + 5 * LEASE_COUNTERS
    first = await broker.grant_lease(
        GATEWAY, volume_id=volume_id, key_epoch=1, request_id=requests[0]
    )
    next_one = broker.arena.grant(1, incarnation=bytes(16)).ranges[0]
    assert next_one.counter_start == after.counter_end
    assert (first.broker_instance, first.start_epoch) == (3, 1)
    other = _subject()
    with pytest.raises(UsageError) as caught:
        await broker.grant_lease(
            other,
            volume_id=await _register(broker),
            key_epoch=1,
            request_id=requests[0],
        )
    assert caught.value.reason == "lease.request.exists"


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, (1 << 40) * 4096 + 4096])
async def test_impossible_size_is_refused(broker: BrokerService, size: int) -> None:
    with pytest.raises(UsageError) as caught:
        await broker.register_volume(
            GATEWAY, request_id=REQUEST, display_name="", size_bytes=size, target_node="s"
        )
    assert caught.value.reason == "volume.size"


@pytest.mark.parametrize("target", ["", "S", "s" * 64, "s/../t", "s" * 100_000])
async def test_target_that_cannot_be_named_is_refused(broker: BrokerService, target: str) -> None:
    with pytest.raises(UsageError) as caught:
        await broker.register_volume(
            GATEWAY, request_id=REQUEST, display_name="", size_bytes=4096, target_node=target
        )
    assert caught.value.reason == "volume.target"
    assert len(str(caught.value)) < 200


async def test_number_of_a_tenants_volumes_is_bounded(
    broker: BrokerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.broker.store.VOLUMES_PER_TENANT_MAX", 2)
    first = await _register(broker)
    await _register(broker)
    with pytest.raises(UnavailableError) as caught:
        await _register(broker)
    assert caught.value.reason == "volume.limit"
    await _register(broker, _subject(tenant="other"))
    await broker.unregister_volume(GATEWAY, first)
    await _register(broker)


async def test_pages_list_each_volume_once(broker: BrokerService) -> None:
    made = {await _register(broker) for _ in range(5)}
    await _register(broker, _subject(tenant="other"))
    found: list[str] = []
    token = ""
    while True:
        page, token = await broker.descriptors(GATEWAY, page_size=2, page_token=token)
        found += [broker_pb2.VolumeDescriptor.FromString(v.descriptor).volume_id for v in page]
        assert len(page) <= 2
        if not token:
            break
    assert len(found) == 5
    assert set(found) == made


def test_certificates_of_the_authority_live_ten_minutes(broker: BrokerService) -> None:
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    leaf = broker.authority.issue(GATEWAY, key, now=now)
    assert leaf.not_valid_after_utc - now == dt.timedelta(minutes=10)


def test_store_of_the_version_without_modes_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    store = BrokerStore(path)
    record, _ = store.register(_record(), request_id=REQUEST)
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE volumes DROP COLUMN mode")
        db.execute("ALTER TABLE volumes DROP COLUMN third_party")
        db.execute("ALTER TABLE volumes DROP COLUMN fully_sealed")
        db.execute("ALTER TABLE volumes DROP COLUMN filling_gateway")
        db.execute("PRAGMA user_version=1")
    for _ in range(2):
        store = BrokerStore(path)
        assert store.volume(record.volume_id) == record
        store.close()


async def _register_mode(
    broker: BrokerService, mode: str, *, target_node: str, third_party: str = ""
) -> broker_pb2.VolumeDescriptor:
    answer = await broker.register_volume(
        GATEWAY,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node=target_node,
        mode=mode,
        third_party=third_party,
    )
    return broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor)


@pytest.mark.parametrize(
    ("mode", "third_party"), [("", "array"), ("local", ""), ("none", "array"), ("OFF", "")]
)
async def test_mode_that_does_not_fit_its_place_is_refused(
    broker: BrokerService, mode: str, third_party: str
) -> None:
    with pytest.raises(UsageError) as caught:
        await _register_mode(broker, mode, target_node="g", third_party=third_party)
    assert caught.value.reason == "volume.mode"


async def test_volume_of_mode_off_is_attached_by_nobody_before_its_gateway_has_filled_it(
    broker: BrokerService,
) -> None:
    made = await _register_mode(broker, "off", target_node="s")
    assert (made.mode, made.fully_sealed, made.filling_gateway) == ("off", True, "g")
    with pytest.raises(VerificationError) as caught:
        await broker.finish_filling(_subject(node="other"), made.volume_id)
    assert caught.value.reason == "volume.filling.refused"
    for _ in range(2):
        signed = await broker.finish_filling(GATEWAY, made.volume_id)
        filled = broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
        assert (filled.fully_sealed, filled.filling_gateway) == (True, "")


async def test_volume_on_a_third_party_is_its_gateways_alone_in_every_mode(
    broker: BrokerService,
) -> None:
    other = _subject(node="other")
    for mode in ("local", "off"):
        made = await _register_mode(broker, mode, target_node="g", third_party="array")
        with pytest.raises(VerificationError) as caught:
            await broker.release_key(
                other, volume_id=made.volume_id, key_epoch=1, request_id=bytes(16)
            )
        assert caught.value.reason == "volume.owner.refused"
    shared = await _register_mode(broker, "off", target_node="s")
    with pytest.raises(UnavailableError) as caught_filling:
        await broker.release_key(
            other, volume_id=shared.volume_id, key_epoch=1, request_id=bytes(16)
        )
    assert caught_filling.value.reason == "volume.filling"
    await broker.finish_filling(GATEWAY, shared.volume_id)
    await broker.release_key(other, volume_id=shared.volume_id, key_epoch=1, request_id=bytes(16))
