"""The broker writes refusals and grants to its audit log before it answers."""

import asyncio
import datetime as dt
import uuid
from typing import Any, cast

import pytest

from brokers import MemoryAudit, operator_of
from patience import PATIENCE_SECONDS
from sealane.daemon.broker import refusals
from sealane.daemon.broker.refusals import (
    CALLER_KINDS_MAX,
    KINDS_MAX,
    STRANGER_KINDS_MAX,
    TEXT_MAX,
    SummedAudit,
    refusals_recorded,
)
from sealane.daemon.gateway.volumes import Via
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2, broker_pb2_grpc, operator_pb2
from volume_control import HOST, World, create

GATEWAY = "spiffe://sealane/gateway/g"


def of_kind(world: World, kind: str) -> list[dict[str, Any]]:
    records = cast("MemoryAudit", world.broker.audit).records
    return [record for record in records if record["kind"] == kind]


async def test_the_life_of_a_volume_is_recorded_without_a_secret(world: World) -> None:
    volume_id = await create(world, str(uuid.uuid4()))
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    key = world.gateway.attached[0].keys[1]
    await world.volumes.detach(volume_id)
    await world.volumes.delete(volume_id)
    for kind in ("lease.grant", "key.release", "volume.unregister"):
        (record,) = of_kind(world, kind)
        assert (record["subject"], record["volume_id"]) == (GATEWAY, volume_id)
        assert record["outcome"] in {"granted", "done"}
        assert key not in record.values()
        assert key.hex() not in map(str, record.values())


async def test_refusals_are_recorded_with_their_reason_and_bounded(world: World) -> None:
    volume_id = await create(world, str(uuid.uuid4()))
    for asked in (volume_id, "x" * 4000):
        request = broker_pb2.GetVolumeKeyRequest(volume_id=asked, key_epoch=1, request_id=bytes(16))
        with pytest.raises(UsageError):
            async with world.identities["stranger"].channel(
                world.addresses["broker"], "b", "broker"
            ) as channel:
                await broker_pb2_grpc.BrokerStub(channel).GetVolumeKey(request)
    first, second = of_kind(world, "key.release")
    assert (first["outcome"], first["reason"]) == ("refused", "volume.not_found")
    assert (first["subject"], first["tenant"]) == ("spiffe://sealane/gateway/x", "other")
    assert second["volume_id"] == "x" * TEXT_MAX


async def test_a_rotation_and_its_refusal_are_recorded(world: World) -> None:
    volume_id = await create(world, str(uuid.uuid4()))
    operator = operator_of(world.broker)

    async def rotate(name: str) -> None:
        request = operator_pb2.RotateVolumeKeyRequest(volume_id=name)
        await operator.RotateVolumeKey(request, None)  # type: ignore[arg-type]

    await rotate(f"volumes/{volume_id}")
    with pytest.raises(UsageError):
        await rotate(str(uuid.uuid4()))
    done, refused = of_kind(world, "key.rotate")
    assert (done["outcome"], done["key_epoch"]) == ("done", 2)
    assert (refused["outcome"], refused["reason"]) == ("refused", "volume.not_found")


class FullLog:
    """A log on a full device."""

    async def record(self, kind: str, **_: object) -> None:
        raise UnavailableError("audit.unwritable", f"no space for {kind}")


async def test_a_refusal_that_cannot_be_recorded_is_a_failure() -> None:
    with pytest.raises(UnavailableError) as caught:
        async with refusals_recorded(FullLog(), "key.release", subject="s"):
            raise VerificationError("volume.owner.refused", "not yours")
    assert caught.value.reason == "audit.unwritable"


async def test_calls_refused_alike_are_recorded_once_and_then_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = [dt.datetime(2026, 1, 1, 0, 0, second, tzinfo=dt.UTC) for second in range(6)]
    monkeypatch.setattr(refusals, "utc_now", iter(moments).__next__)
    audit = MemoryAudit()
    summed = SummedAudit(audit)
    for subject in ("unknown", "unknown", GATEWAY, "unknown", "unknown"):
        await summed.refused_call("/m", subject, "certificate.expired")
    # The first of each kind is logged before the answer.
    assert [(r["subject"], r.get("count")) for r in audit.records] == [
        ("unknown", None),
        (GATEWAY, None),
    ]
    await summed.close()
    (last,) = audit.records[2:]
    assert last == {
        "kind": "call",
        "subject": "unknown",
        "outcome": "refused",
        "reason": "certificate.expired",
        "method": "/m",
        "count": 3,
        "first": moments[1].isoformat(),
        "last": moments[4].isoformat(),
    }


def _refusals(audit: MemoryAudit) -> int:
    return sum(cast("int", record.get("count", 1)) for record in audit.records)


async def test_a_flood_of_refused_calls_leaves_a_bounded_number_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "SUMMARY_SECONDS", 0.02)
    audit = MemoryAudit()
    summed = SummedAudit(audit)
    for number in range(50 * KINDS_MAX):
        await summed.refused_call("/m", f"spiffe://sealane/gateway/g{number}", "call.role.refused")
        await summed.refused_call("/m", "unknown", "certificate.issuer")
    assert len(audit.records) <= KINDS_MAX + 1
    async with asyncio.timeout(PATIENCE_SECONDS):
        while _refusals(audit) < 100 * KINDS_MAX:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)
    assert len(audit.records) <= 2 * (KINDS_MAX + 1)
    # In a new minute, callers are recorded individually again.
    await summed.refused_call("/m", GATEWAY, "call.role.refused")
    assert audit.records[-1]["subject"] == GATEWAY
    await summed.close()


async def test_strangers_crowd_nobody_out_whatever_name_they_claim() -> None:
    audit = MemoryAudit()
    summed = SummedAudit(audit)
    for number in range(4000):
        await summed.record(
            "attestation.challenge",
            subject=f"spiffe://sealane/gateway/claimed{number}",
            outcome="refused",
            reason="attestation.type.refused",
            address=f"198.51.{number % 100}.{number % 250}",
            message=f"{number}",
        )
    assert len(audit.records) == STRANGER_KINDS_MAX + 1
    assert audit.records[-1]["subject"] == "strangers"
    # A prefix counts as one unknown caller.
    assert len({str(r["address"]).rpartition(".")[0] for r in audit.records}) == len(audit.records)
    await summed.record(
        "key.release", subject=GATEWAY, outcome="refused", reason="volume.not_found", volume_id="v"
    )
    assert audit.records[-1]["subject"] == GATEWAY
    await summed.close()
    assert _refusals(audit) == 4001


async def test_an_attested_caller_is_told_apart_by_what_it_asked_for_up_to_a_bound() -> None:
    audit = MemoryAudit()
    summed = SummedAudit(audit)
    for number in range(100):
        await summed.record(
            "key.release",
            subject=GATEWAY,
            outcome="refused",
            reason="volume.not_found",
            volume_id=f"v{number}",
        )
    recorded = [r for r in audit.records if r["subject"] == GATEWAY]
    assert [r["volume_id"] for r in recorded] == [f"v{n}" for n in range(CALLER_KINDS_MAX)]
    await summed.close()
    assert _refusals(audit) == 100
    # Every grant is recorded.
    for _ in range(100):
        await summed.record("key.release", subject=GATEWAY, outcome="granted", volume_id="v")
    assert sum(r["outcome"] == "granted" for r in audit.records) == 100


async def test_calls_that_fail_the_checks_of_every_call_are_recorded(world: World) -> None:
    identity = world.identities["target"]
    for _ in range(3):
        with pytest.raises(VerificationError):
            async with identity.channel(world.addresses["broker"], "b", "broker") as channel:
                await broker_pb2_grpc.BrokerStub(channel).GetVolumeKey(
                    broker_pb2.GetVolumeKeyRequest()
                )
    await world.refusals.close()
    first, summed = of_kind(world, "call")
    assert (first["subject"], first["reason"]) == (identity.subject.spiffe_id, "call.role.refused")
    assert first["method"] == "/sealane.v1.Broker/GetVolumeKey"
    assert summed["count"] == 2
