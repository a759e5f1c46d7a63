"""A target and a gateway on loopback with one volume, for tests of both."""

import asyncio
import contextlib
import random
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from attached_hosts import host_of, new_secret
from patience import PATIENCE_SECONDS
from sealane.crypto.lease import CounterRange
from sealane.daemon.gateway.data_path import AttachedVolume, Gateway, GatewaySettings
from sealane.daemon.gateway.grants import QueueGrant, VolumeKey
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.target.data_path import Target
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.transport.nvme.initiator import HostController, VolumeQueue

HOST = "nqn.2014-08.org.nvmexpress:uuid:0f0f0f0f-0000-4000-8000-000000000001"
GATEWAY = "nqn.2026-11.dev.sealane:gateway:g1"
BLOCK = 4160
SECTORS = 8192
MEBIBYTE = 1 << 20
INTERNAL_ERROR = 0x006
COMPARE_FAILURE = 0x285


def counters(*, start_epoch: int = 1, counter_end: int = 1 << 36) -> CounterRange:
    """Return the counters of a lease."""
    return CounterRange(
        broker_instance=1, start_epoch=start_epoch, counter_start=1, counter_end=counter_end
    )


@dataclass(slots=True, kw_only=True)
class World:
    target: Target
    gateway: Gateway
    attached: AttachedVolume
    volume_id: uuid.UUID
    path: Path | None
    attach: Callable[[bytes, CounterRange], Awaitable[AttachedVolume]]
    """Attach the volume again, with this key and these counters, after it was detached."""
    grants: list[QueueGrant] = field(default_factory=list)
    via: tuple[str, int] | None = None
    newest_epoch: int = 1

    def grant(
        self,
        queue_id: int,
        *,
        epoch: int | None = None,
        host_nqn: str = GATEWAY,
        is_read_only: bool = False,
        gateway: PeerIncarnation | None = None,
    ) -> QueueGrant:
        """Grant a queue, as the control channel does; `epoch` None is the newest."""
        epoch = self.newest_epoch if epoch is None else epoch
        self.newest_epoch = max(epoch, self.newest_epoch)
        secret, ticket = secrets.token_bytes(32), secrets.token_bytes(16)
        self.target.admit_queue(
            ticket,
            volume_id=self.volume_id,
            host_nqn=host_nqn,
            queue_id=queue_id,
            secret=bytearray(secret),
            association_epoch=epoch,
            incarnation=7,
            gateway=gateway,
            permit=None,
            is_read_only=is_read_only,
        )
        traddr, trsvcid = self.via or self.target.address
        grant = QueueGrant(
            ticket=ticket,
            secret=bytearray(secret),
            association_epoch=epoch,
            target_incarnation=7,
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self.target.subsystem_nqn(self.volume_id),
            host_nqn=GATEWAY,
        )
        self.grants.append(grant)
        return grant

    def host(self, *, host_nqn: str = HOST) -> HostController:
        return host_of(self.attached, host_nqn)

    def back_host(self, *, host_nqn: str = GATEWAY) -> HostController:
        traddr, trsvcid = self.target.address
        return HostController(
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self.target.subsystem_nqn(self.volume_id),
            host_nqn=host_nqn,
        )

    @contextlib.asynccontextmanager
    async def queue(self) -> AsyncIterator[VolumeQueue]:
        async with self.host() as host:
            queue = await host.open_queue(1)
            try:
                yield queue
            finally:
                await queue.close()

    async def reason(self, reason: str, *, at_target: bool = False) -> None:
        """Wait until an event with this reason is reported."""
        await self.event(lambda event: event.reason == reason, at_target=at_target)

    async def event(
        self, matches: Callable[[StorageEvent], bool], *, at_target: bool = False
    ) -> None:
        """Wait until this event is reported."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                taken = (
                    self.target.take_events(self.volume_id)
                    if at_target
                    else self.attached.take_events()
                )
                if any(matches(event) for event in taken):
                    return
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def make_world(
    directory: Path | None,
    *,
    lease: CounterRange | None = None,
    settings: GatewaySettings | None = None,
    store_kind: Literal["emulated", "file", "inline", "memory"] = "file",
) -> AsyncIterator[World]:
    target = Target(
        traddr="127.0.0.1",
        trsvcid=0,
        store_kind="memory" if directory is None and store_kind == "file" else store_kind,
        drive="evo870" if store_kind == "emulated" else None,
        directory=directory,
    )
    gateway = Gateway(traddr="127.0.0.1", trsvcid=0, settings=settings)
    await target.start()
    await gateway.start()
    volume_id = uuid.uuid4()
    await target.create_volume(volume_id, sector_count=SECTORS)

    async def open_queue(
        queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        await target.close_older_queues(volume_id, GATEWAY, association_epoch)
        target.require_milestone(volume_id, milestone)
        grant = made.grant(queue_id, epoch=association_epoch)
        return replace(grant, confirmed=milestone, milestone=target.milestone(volume_id))

    async def attach(sealing_key: bytes, lease: CounterRange) -> AttachedVolume:
        key = VolumeKey(
            volume_id=volume_id,
            generation=1,
            sector_count=SECTORS,
            keys={1: bytearray(sealing_key)},
        )
        attached = await gateway.attach(
            key,
            counters=[lease],
            secret=new_secret(),
            host_nqn=HOST,
            open_queue=open_queue,
        )
        assert not any(key.keys[1])
        return attached

    attached = await attach(secrets.token_bytes(32), lease or counters())
    made = World(
        target=target,
        gateway=gateway,
        attached=attached,
        volume_id=volume_id,
        path=target.store_path(volume_id),
        attach=attach,
    )
    try:
        yield made
    finally:
        await gateway.stop()
        await target.stop()


def data(size: int) -> bytes:
    return random.Random(5).randbytes(size)
