"""The broker's service: isolated tenants, sealed keys, leases granted once."""

import dataclasses
import datetime as dt
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from brokers import running_broker, token_of
from sealane.crypto.certificates import Subject
from sealane.crypto.hpke import Context, open_signed
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.lease import COUNTER_END, LEASE_COUNTERS
from sealane.daemon.broker.service import BrokerService
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


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerService]:
    async with running_broker(tmp_path / "b.sqlite") as service:
        yield service


async def _register(broker: BrokerService, caller: Subject = GATEWAY) -> str:
    answer = await broker.register_volume(
        caller, request_id=str(uuid.uuid4()), display_name="", size_bytes=4096, target_node="s"
    )
    return broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor).volume_id


async def test_authority_survives_a_restart_and_needs_its_key(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    async with running_broker(path) as first:
        anchor = first.authority.anchor_pem
    async with running_broker(path) as again:
        assert again.authority.anchor_pem == anchor
        assert again.leases.arena.start_epoch == 2
    with pytest.raises(VerificationError) as caught:
        async with running_broker(path, kek=b"\1" * 32):
            pass
    assert caught.value.reason == "key.wrap.invalid"


async def test_same_request_registers_once(broker: BrokerService) -> None:
    async def register(
        caller: Subject = GATEWAY,
        size_bytes: int = 4096,
        target_node: str = "s",
        *,
        any_target: bool = False,
    ) -> tuple[bytes, bool]:
        answer = await broker.register_volume(
            caller,
            request_id=REQUEST,
            display_name="d",
            size_bytes=size_bytes,
            target_node=target_node,
            any_target=any_target,
        )
        return answer.volume.descriptor, answer.is_new

    first, is_new = await register()
    assert is_new
    assert await register() == (first, False)
    assert await register(target_node="s2", any_target=True) == (first, False)
    with pytest.raises(UsageError) as caught:
        await register(target_node="s2")
    assert caught.value.reason == "volume.request.exists"
    found = await broker.descriptor_by_request(GATEWAY, REQUEST)
    assert found.descriptor == first
    with pytest.raises(UsageError) as caught:
        await broker.descriptor_by_request(_subject(tenant="other"), REQUEST)
    assert caught.value.reason == "volume.not_found"
    assert (await register(_subject(tenant="other")))[1]
    with pytest.raises(UsageError) as caught:
        await register(size_bytes=8192)
    assert caught.value.reason == "volume.request.exists"
    volume_id = broker_pb2.VolumeDescriptor.FromString(first).volume_id
    await broker.unregister_volume(GATEWAY, volume_id)
    with pytest.raises(UsageError):
        await broker.descriptor_by_request(GATEWAY, REQUEST)
    again, is_new = await register()
    assert is_new
    assert again != first


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
        broker.leases.grant(caller, volume_id=volume_id, key_epoch=1, request_id=bytes(16)),
    ):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.reason == "volume.not_found"


async def test_other_key_epoch_is_refused(broker: BrokerService) -> None:
    volume_id = await _register(broker)
    for call in (broker.release_key, broker.leases.grant):
        with pytest.raises(UsageError) as caught:
            await call(GATEWAY, volume_id=volume_id, key_epoch=2, request_id=bytes(16))
        assert caught.value.reason == "volume.key_epoch"


async def test_key_of_a_deleted_volume_is_gone(broker: BrokerService) -> None:
    volume_id = await _register(broker)
    await broker.unregister_volume(GATEWAY, volume_id)
    with pytest.raises(UsageError) as caught:
        await broker.release_key(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=bytes(16))
    assert caught.value.reason == "volume.not_found"


async def test_a_return_is_believed_from_the_holder_only_and_frees_no_counter(
    broker: BrokerService,
) -> None:
    volume_id = await _register(broker)
    request = bytes(15) + b"r"
    first = await broker.leases.grant(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request)
    arena = (broker.leases.arena.broker_instance, broker.leases.arena.start_epoch)

    token = token_of(broker, first)
    books = broker.registry.grants

    async def give_back(
        caller: Subject = GATEWAY,
        volume_id: str = volume_id,
        arena: tuple[int, int] = arena,
        touched: int = 256,
        return_token: bytes = token,
    ) -> int:
        return await broker.leases.take_back(
            caller,
            volume_id=volume_id,
            arena=arena,
            lease_id=first.lease_id,
            touched=touched,
            return_token=return_token,
        )

    for arguments, reason in (
        ({"arena": (arena[0], arena[1] + 1)}, "lease.return.arena"),
        ({"caller": dataclasses.replace(GATEWAY, incarnation=b"x" * 16)}, "lease.return.holder"),
        ({"touched": 255}, "lease.return.malformed"),
        ({"volume_id": await _register(broker)}, "lease.return.holder"),
        ({"return_token": bytes(16)}, "lease.return.holder"),
        ({"return_token": b""}, "lease.return.holder"),
    ):
        with pytest.raises((LeaseError, VerificationError)) as caught:
            await give_back(**arguments)  # type: ignore[arg-type]
        assert caught.value.reason == reason
        # Neither the lease records nor the answers kept for retries have changed.
        (entry,), _ = await books.page(limit=10)
        assert entry.record.touched is None
        again = await broker.leases.grant(
            GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request
        )
        assert again.lease_id == first.lease_id
    assert await give_back() == LEASE_COUNTERS
    with pytest.raises(LeaseError):
        await give_back()
    # Returned counters are never granted again, not even to a late retry of the same request.
    await broker.leases.grant(
        GATEWAY, volume_id=volume_id, key_epoch=1, request_id=bytes(15) + b"s"
    )
    await broker.leases.grant(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request)
    page, _ = await books.page(limit=10)
    assert sorted((e.record.counter_start, e.record.counter_end) for e in page) == [
        (256 + i * LEASE_COUNTERS, 256 + (i + 1) * LEASE_COUNTERS) for i in range(3)
    ]


async def test_leases_of_one_start_never_overlap_and_a_retry_gets_its_own(
    broker: BrokerService,
) -> None:
    volume_id = await _register(broker)
    requests = [bytes([i]) * 16 for i in range(5)]
    for request in requests:
        await broker.leases.grant(GATEWAY, volume_id=volume_id, key_epoch=1, request_id=request)
    free = broker.leases.arena.counters_free(uuid.UUID(volume_id))
    assert free == COUNTER_END - 256 - 5 * LEASE_COUNTERS
    first = await broker.leases.grant(
        GATEWAY, volume_id=volume_id, key_epoch=1, request_id=requests[0]
    )
    assert broker.leases.arena.counters_free(uuid.UUID(volume_id)) == free
    assert (first.broker_instance, first.start_epoch) == (3, 1)
    other = _subject()
    with pytest.raises(UsageError) as caught:
        await broker.leases.grant(
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
    monkeypatch.setattr("sealane.daemon.broker.registry.VOLUMES_PER_TENANT_MAX", 2)
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


async def _resized(broker: BrokerService, volume_id: str, size: int) -> tuple[int, int]:
    """Begin and finish a resize; return the sector counts seen by target and gateways."""
    begun = await broker.begin_resize(GATEWAY, volume_id, size_bytes=size)
    finished = await broker.finish_resize(GATEWAY, volume_id, size_bytes=size)
    told = [broker_pb2.VolumeDescriptor.FromString(s.descriptor) for s in (begun, finished)]
    return told[0].sector_count, told[1].sector_count


async def test_volume_grows_when_it_is_stored_so(broker: BrokerService) -> None:
    made = await _register_mode(broker, "", target_node="s")
    size = made.sector_count * 4096
    signed = await broker.begin_resize(GATEWAY, made.volume_id, size_bytes=2 * size)
    begun = broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
    assert begun.sector_count == 2 * made.sector_count
    still = broker_pb2.VolumeDescriptor.FromString(
        (await broker.descriptor(GATEWAY, made.volume_id)).descriptor
    )
    assert still.sector_count == made.sector_count, "nobody has said that it is stored so"
    for _ in range(2):
        signed = await broker.finish_resize(GATEWAY, made.volume_id, size_bytes=2 * size)
        grown = broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
        assert grown.sector_count == 2 * made.sector_count
    assert await _resized(broker, made.volume_id, 2 * size) == (begun.sector_count,) * 2
    changed = ("sector_count", "key_epoch")
    for descriptor in (made, grown):
        for name in changed:
            descriptor.ClearField(name)
    assert grown == made


async def test_request_that_made_a_volume_gives_it_also_when_it_has_grown(
    broker: BrokerService,
) -> None:
    async def register(size_bytes: int) -> broker_pb2.VolumeDescriptor:
        answer = await broker.register_volume(
            GATEWAY,
            request_id=REQUEST,
            display_name="d",
            size_bytes=size_bytes,
            target_node="s",
        )
        return broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor)

    made = await register(4096)
    await _resized(broker, made.volume_id, 8192)
    again = await register(4096)
    assert (again.volume_id, again.sector_count) == (made.volume_id, 2)
    with pytest.raises(UsageError) as caught:
        await register(8192)
    assert caught.value.reason == "volume.request.exists", "it asked for another size"


async def test_size_that_a_volume_can_not_take_is_refused(broker: BrokerService) -> None:
    made = await _register_mode(broker, "", target_node="s")
    size = 4 * made.sector_count * 4096
    await _resized(broker, made.volume_id, size)
    for wrong, reason in (
        (size - 4096, "volume.resize.smaller"),
        (size + 1, "volume.size"),
        (0, "volume.size"),
        ((1 << 52) + 4096, "volume.size"),
    ):
        with pytest.raises(UsageError) as caught:
            await broker.begin_resize(GATEWAY, made.volume_id, size_bytes=wrong)
        assert caught.value.reason == reason
    with pytest.raises(UsageError) as caught:
        await broker.finish_resize(GATEWAY, made.volume_id, size_bytes=2 * size)
    assert caught.value.reason == "volume.resize.state"
    await broker.begin_resize(GATEWAY, made.volume_id, size_bytes=2 * size)
    await broker.begin_resize(GATEWAY, made.volume_id, size_bytes=3 * size)
    with pytest.raises(UsageError) as caught:
        await broker.finish_resize(GATEWAY, made.volume_id, size_bytes=2 * size)
    assert caught.value.reason == "volume.resize.state", "another one was begun since"


async def test_volume_of_mode_off_keeps_its_size(broker: BrokerService) -> None:
    made = await _register_mode(broker, "off", target_node="s")
    await broker.finish_filling(GATEWAY, made.volume_id)
    with pytest.raises(UsageError) as caught:
        await broker.begin_resize(GATEWAY, made.volume_id, size_bytes=1 << 40)
    assert caught.value.reason == "volume.resize.mode"


async def test_only_who_a_volume_belongs_to_resizes_it(broker: BrokerService) -> None:
    made = await _register_mode(broker, "", target_node="s")
    third = await _register_mode(broker, "local", target_node="g", third_party="array")
    for caller, volume_id, reason in (
        (_subject(tenant="other"), made.volume_id, "volume.not_found"),
        (_subject(node="other"), third.volume_id, "volume.owner.refused"),
    ):
        for call in (broker.begin_resize, broker.finish_resize):
            with pytest.raises((UsageError, VerificationError)) as caught:
                await call(caller, volume_id, size_bytes=1 << 40)
            assert caught.value.reason == reason
