"""Every grant, refusal and key release at the broker is in its audit log before it is answered."""

import uuid
from typing import cast

import pytest

from sealane.crypto.audit import Record, verify_log
from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.operator_servicer import OperatorServicer
from sealane.daemon.broker.recorded import recorded
from sealane.daemon.volumes import Via
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2, broker_pb2_grpc, operator_pb2
from volume_control import HOST, World, create

GATEWAY = "spiffe://sealane/gateway/g"


def records(world: World) -> list[Record]:
    lines = world.audit.path.read_bytes().splitlines()
    verify_log(lines, signer=world.broker.authority.signing_key.public_key())
    return [Record.decode(line) for line in lines]


def of_kind(world: World, kind: str) -> list[Record]:
    return [record for record in records(world) if record.kind == kind]


async def test_the_life_of_a_volume_is_recorded_without_a_secret(world: World) -> None:
    volume_id = await create(world, str(uuid.uuid4()))
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    key = world.gateway.attached[0].keys[1]
    await world.volumes.detach(volume_id)
    await world.volumes.delete(volume_id)
    said = [
        (r.kind, r.outcome, r.subject)
        for r in records(world)
        if r.detail.get("volume_id") == volume_id
    ]
    assert said == [
        (kind, "granted", GATEWAY)
        for kind in ("volume.register", "lease.grant", "key.release", "volume.unregister")
    ]
    log = world.audit.path.read_bytes()
    assert key.hex().encode() not in log
    assert key not in log


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
    assert (first.outcome, first.reason) == ("refused", "volume.not_found")
    assert first.subject == "spiffe://sealane/gateway/x"
    assert first.detail["tenant"] == "other"
    assert second.detail["volume_id"] == "x" * 128


async def test_a_rotation_is_the_operators(world: World) -> None:
    volume_id = await create(world, str(uuid.uuid4()))
    operator = OperatorServicer(world.broker, world.audit)

    async def rotate(name: str) -> None:
        request = operator_pb2.RotateVolumeKeyRequest(volume_id=name)
        await operator.RotateVolumeKey(request, None)  # type: ignore[arg-type]

    await rotate(f"volumes/{volume_id}")
    with pytest.raises(UsageError):
        await rotate(str(uuid.uuid4()))
    done, refused = of_kind(world, "key.rotate")
    assert (done.subject, done.outcome, done.detail["key_epoch"]) == ("operator", "granted", 2)
    assert (refused.outcome, refused.reason) == ("refused", "volume.not_found")


class FullLog:
    """A log on a device that is full."""

    async def record(self, kind: str, **_: object) -> None:
        raise UnavailableError("audit.unwritable", f"no space for {kind}")


async def test_what_cannot_be_recorded_is_not_answered() -> None:
    log = cast("AuditLog", FullLog())
    with pytest.raises(UnavailableError) as caught:
        async with recorded(log, "key.release", subject="s"):
            pass
    assert caught.value.reason == "audit.unwritable"
    with pytest.raises(UnavailableError):
        async with recorded(log, "key.release", subject="s"):
            raise VerificationError("volume.owner.refused", "not yours")
