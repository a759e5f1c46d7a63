"""Permission to open a secure queue; a newer association fences older ones."""

import contextlib
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest

from sealane import _native
from sealane.daemon.gateway.data_path import GatewaySettings
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.nvme.listener import Admission
from sealane.daemon.target.volume_subsystem import TargetSubsystem
from sealane.errors import ProtocolError, UnavailableError, VerificationError
from sealane.protocol.nvme.constants import DISCOVERY_NQN
from sealane.transport.nvme.discovery import discover
from sealane.transport.nvme.initiator import HostController, NvmeStatusError
from target.pair import GATEWAY, HOST, SECTORS, World, make_world

PEER = PeerIncarnation(spiffe_id="spiffe://sealane/t/gateway/g", incarnation=bytes(16))


async def test_wrong_host_is_refused(world: World) -> None:
    with pytest.raises(NvmeStatusError) as caught:
        await world.host(host_nqn=f"{HOST[:-1]}2").connect()
    assert caught.value.status == 0x184
    await world.reason("connect.host")


async def test_ticket_is_good_once(world: World) -> None:
    grant = world.grant(1)
    async with world.back_host() as host:
        (await host.connect_queue(1, ticket=grant.ticket)).close()
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError) as caught:
            await host.connect_queue(1, ticket=grant.ticket)
    assert caught.value.status == 0x182
    await world.reason("queue.ticket", at_target=True)


async def test_ticket_is_for_one_queue_id_and_host(world: World) -> None:
    grant = world.grant(1)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(2, ticket=grant.ticket)
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)
    with pytest.raises(NvmeStatusError):
        await world.back_host(host_nqn=HOST).connect()


async def test_no_ticket_no_queue(world: World) -> None:
    world.grant(1)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1)


async def test_expired_ticket_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealane.daemon.target.data_path.TICKET_SECONDS", 0.0)
    grant = world.grant(1)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)


async def test_a_ticket_of_another_admitted_host_is_refused_and_spent(world: World) -> None:
    other = f"{GATEWAY}:other"
    world.grant(1, host_nqn=other)
    grant = world.grant(1)
    async with world.back_host(host_nqn=other) as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)
    await world.reason("queue.ticket", at_target=True)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)


@pytest.mark.parametrize("by", [GATEWAY, f"{GATEWAY}:that-takes-its-place"])
async def test_a_queue_that_was_fenced_before_it_started_never_runs(
    world: World, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr("sealane.daemon.target.volume_subsystem.GATEWAYS_MAX", 1)
    grant = world.grant(1)
    admit = TargetSubsystem.admit

    async def fenced(self: TargetSubsystem, *args: Any) -> Admission:
        admission = await admit(self, *args)
        await world.target.close_older_queues(world.volume_id, by, 2)
        return admission

    monkeypatch.setattr(TargetSubsystem, "admit", fenced)
    async with world.back_host() as host:
        with contextlib.suppress(NvmeStatusError, UnavailableError):
            (await host.connect_queue(1, ticket=grant.ticket)).close()
    await world.reason("queue.epoch", at_target=True)
    assert world.target.statistics(world.volume_id)["queues_running"] == 0


async def lose_the_authorization(world: World) -> None:
    await world.target.fence_gateway(PEER, "authorization.lost")


async def grow(world: World) -> None:
    await world.target.resize_volume(world.volume_id, sector_count=2 * SECTORS)


@pytest.mark.parametrize("void", [lose_the_authorization, grow])
async def test_a_queue_whose_ticket_became_void_before_it_started_never_runs(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    void: Callable[[World], Awaitable[None]],
) -> None:
    grant = world.grant(1, gateway=PEER)
    unused = world.grant(2, gateway=PEER)
    admit = TargetSubsystem.admit

    async def voided(self: TargetSubsystem, *args: Any) -> Admission:
        admission = await admit(self, *args)
        monkeypatch.setattr(TargetSubsystem, "admit", admit)
        await void(world)
        return admission

    monkeypatch.setattr(TargetSubsystem, "admit", voided)
    async with world.back_host() as host:
        with contextlib.suppress(NvmeStatusError, UnavailableError):
            (await host.connect_queue(1, ticket=grant.ticket)).close()
    await world.reason("authorization.lost", at_target=True)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(2, ticket=unused.ticket)
    assert world.target.statistics(world.volume_id)["queues_running"] == 0


async def test_older_association_epochs_are_refused_and_closed() -> None:
    newer = 1 << 63
    async with (
        make_world(None, settings=GatewaySettings(hold_seconds=0.2)) as world,
        world.queue() as queue,
    ):
        await queue.write(0, bytes(4096))
        old = world.grant(2)
        await world.target.close_older_queues(world.volume_id, GATEWAY, newer)
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(0, bytes(4096))
        assert caught.value.status == 0x300
        await world.reason("queue.epoch")
        with pytest.raises(ProtocolError, match="older"):
            world.grant(1, epoch=1)
        async with world.back_host() as host:
            with pytest.raises(NvmeStatusError):
                await host.connect_queue(2, ticket=old.ticket)


async def test_secrets_are_wiped_once_the_queue_has_them(world: World) -> None:
    async with world.host() as host:
        connected = await host.connect_queue(1)
        assert not any(world.grants[-1].secret)
        connected.close()


def test_a_queue_secret_makes_one_queue_only() -> None:
    secret = bytearray(b"\x05" * 32)
    parameters = _native.SecureQueueParameters(
        secret=secret,
        volume_id=bytes(16),
        host_nqn=HOST,
        queue_id=1,
        association_epoch=1,
        incarnation=1,
    )
    assert secret == bytes(32)
    controller = _native.Controller(
        association=1, host_nqn=GATEWAY, host_id=bytes(16), controller_id=1
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for attempt in range(2):
            refused = pytest.raises(ValueError, match="used") if attempt else nullcontext()
            with refused:
                controller.start_queue(
                    ours.fileno(),
                    queue_id=1,
                    queue_depth=8,
                    h2c_data_max=8192,
                    in_capsule_max=8192,
                    transfer_max=8192,
                    secure=parameters,
                )
    controller.close()
    assert controller.queues_running() == 0


async def test_tickets_that_nobody_uses_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.target.data_path._TICKETS_MAX", 2)
    world.grant(1)
    world.grant(2)
    with pytest.raises(UnavailableError) as caught:
        world.grant(3)
    assert caught.value.reason == "queue.ticket"


async def test_secure_subsystems_are_not_discovered(world: World) -> None:
    world.grant(1)
    traddr, trsvcid = world.target.address
    async with HostController(
        traddr=traddr, trsvcid=trsvcid, subsystem_nqn=DISCOVERY_NQN, host_nqn=GATEWAY
    ) as host:
        assert [path.subsystem_nqn for path in await discover(host)] == [DISCOVERY_NQN]


async def test_host_must_authenticate(world: World) -> None:
    export = world.attached.export
    host = HostController(
        traddr=export.traddr,
        trsvcid=export.trsvcid,
        subsystem_nqn=export.subsystem_nqn,
        host_nqn=HOST,
    )
    with pytest.raises(VerificationError) as caught:
        await host.connect()
    assert caught.value.reason == "authentication.required"


async def test_an_association_has_one_access(world: World) -> None:
    writing, reading = world.grant(1), world.grant(2, is_read_only=True)
    async with world.back_host() as host:
        await host.request_queues(2)
        queue = await host.connect_queue(1, ticket=writing.ticket)
        with contextlib.suppress(NvmeStatusError, UnavailableError):
            (await host.connect_queue(2, ticket=reading.ticket)).close()
        await world.reason("queue.association", at_target=True)
        assert world.target.statistics(world.volume_id)["queues_running"] == 1
        queue.close()
