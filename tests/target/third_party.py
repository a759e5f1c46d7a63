"""A gateway and a third-party target: an ordinary namespace in a file."""

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attached_hosts import host_of, new_secret
from permits import own_authorized
from sealane.crypto.lease import CounterRange
from sealane.daemon.device.anchors.anchor import Anchored, Change, changed
from sealane.daemon.device.anchors.broker import BrokerAnchor
from sealane.daemon.device.third_party import OpenDevice, VolumeDevice
from sealane.daemon.gateway.data_path import AttachedVolume, Gateway, GatewaySettings
from sealane.daemon.gateway.grants import VolumeKey
from sealane.daemon.gateway.third_party import ThirdPartyStores, ThirdPartyVolume
from sealane.daemon.gateway.third_party_link import ThirdParty
from sealane.daemon.nvme.exported import Exported, Provider
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.nvme.subsystem_config import SubsystemConfig
from sealane.daemon.target.subsystems import PlainSubsystems
from sealane.errors import UnavailableError, VerificationError
from sealane.transport.nvme.handshake import Digests
from sealane.transport.nvme.initiator import VolumeQueue

NQN = "nqn.2026-11.dev.sealane:disks"
GATEWAY = "nqn.2026-11.dev.sealane:gateway:g"
HOST = "nqn.2026-11.dev.sealane:host"
SECTORS = 256
PAGE = 4096
INVALID_OPCODE = 0x001
LOG_START, LOG_PAGES = 3, 4096
NODES_START = LOG_START + LOG_PAGES
SLOTS = SECTORS + 4096 + 1024
LEAVES = -(-SECTORS // 75) + -(-SLOTS // 32768)
SLOTS_START = NODES_START + 2 * -(-LEAVES // 248) + 2 * LEAVES
PAGES = SLOTS_START + SLOTS
IN_PLACE_PAGES = LOG_START + LOG_PAGES + 2 * 1 + 2 * -(-SECTORS // 340)


def arena(start_epoch: int) -> CounterRange:
    """Return the counters of one attachment."""
    return CounterRange(
        broker_instance=1, start_epoch=start_epoch, counter_start=1, counter_end=1 << 36
    )


class Broker:
    """The broker's side of a volume's anchor: its records and the current opening."""

    def __init__(self) -> None:
        self.records: dict[str, Anchored] = {}
        self.floor = 0
        self.epoch = 0
        self.is_initialised = False
        self.is_silent = False
        self.was_asked = asyncio.Event()

    async def open(self) -> VolumeDevice:
        self.epoch += 1
        epoch = self.epoch
        return VolumeDevice(
            BrokerAnchor(
                self.records,
                floor=self.floor,
                advance=lambda changes: self._advance(epoch, changes),
            ),
            is_believed=not self.is_initialised,
            tell_anchored=self._confirm,
            tell_closed=self._close,
        )

    async def _advance(self, epoch: int, changes: Sequence[Change]) -> None:
        self.was_asked.set()
        if self.is_silent:
            raise UnavailableError("broker.unreachable", "silent")
        if epoch != self.epoch:
            raise VerificationError("device.fenced", f"opening {epoch} is over")
        self.records, self.floor = changed(self.records, changes, floor=self.floor)

    async def _confirm(self) -> None:
        self.is_initialised = True

    async def _close(self) -> None:
        pass


class Nothing(Provider):
    """A provider without subsystems of its own."""

    def find(self, subsystem_nqn: str) -> Exported | None:
        assert subsystem_nqn
        return None


@dataclass
class Attached:
    port: AttachedVolume
    back: ThirdPartyVolume


@dataclass
class World:
    plain: PlainSubsystems
    gateway: Gateway
    stores: ThirdPartyStores
    image: Path
    fences: list[float] = field(default_factory=list)
    volume_id: uuid.UUID = field(default_factory=uuid.uuid4)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    store_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    is_off: bool = False
    attachments: int = 0
    metadata: bool = False
    broker: Broker = field(default_factory=Broker)
    is_anchored: bool = True
    back: ThirdPartyVolume | None = None
    port: AttachedVolume | None = None
    """The newest attachment."""

    @property
    def open_device(self) -> OpenDevice | None:
        return self.broker.open if self.is_anchored and not self.is_off else None

    def config(self, pages: int = PAGES) -> SubsystemConfig:
        namespace = {
            "nsid": 1,
            "store": "inline" if self.metadata else "file",
            "metadata_bytes": 64 if self.metadata else 0,
            "path": str(self.image),
            "size_bytes": pages * PAGE,
        }
        return SubsystemConfig.model_validate(
            {"nqn": NQN, "hosts": [{"nqn": GATEWAY}], "namespaces": [namespace]}
        )

    async def create(self) -> None:
        await self.stores.create(
            "disks",
            self.volume_id,
            sector_count=SECTORS,
            store_key=bytearray(self.store_key),
            freshness=not self.is_off,
            open_device=self.open_device,
        )

    async def open(self) -> ThirdPartyVolume:
        return await self.stores.attach(
            "disks",
            self.volume_id,
            sector_count=SECTORS,
            store_key=bytearray(self.store_key),
            freshness=not self.is_off,
            open_device=self.open_device,
        )

    @contextlib.asynccontextmanager
    async def attached(self) -> AsyncIterator[VolumeQueue]:
        """Attach the volume and connect a host."""
        back = self.back = await self.open()
        self.attachments += 1
        port = await self.gateway.attach(
            VolumeKey(
                volume_id=self.volume_id,
                generation=1,
                sector_count=SECTORS,
                keys={1: bytearray(self.key)},
                fully_sealed=self.is_off,
            ),
            counters=[arena(self.attachments)],
            secret=new_secret(),
            host_nqn=HOST,
            open_queue=back.open_queue,
        )
        self.port = port
        try:
            async with host_of(port, HOST) as host:
                queue = await host.open_queue(1)
                try:
                    yield queue
                finally:
                    await queue.close()
        finally:
            await port.detach()
            await back.close()

    def pages(self, first: int, count: int) -> bytes:
        with self.image.open("rb") as file:
            file.seek(first * PAGE)
            return file.read(count * PAGE)

    def put(self, first: int, content: bytes) -> None:
        with self.image.open("r+b") as file:
            file.seek(first * PAGE)
            file.write(content)

    def used_slots(self) -> list[int]:
        content = self.pages(SLOTS_START, SLOTS)
        return [n for n in range(SLOTS) if any(content[n * PAGE : (n + 1) * PAGE])]


@contextlib.asynccontextmanager
async def third_party_world(
    directory: Path, *, metadata: bool = False, hold_seconds: float = 60.0
) -> AsyncIterator[World]:
    listener = Listener(Nothing(), traddr="127.0.0.1", trsvcid=0, offers_digests=True)
    await listener.start()
    plain = PlainSubsystems(listener)
    traddr, trsvcid = listener.address
    fences: list[float] = []

    async def wait(seconds: float) -> None:
        fences.append(seconds)

    party = ThirdParty(
        name="disks",
        traddr=traddr,
        trsvcid=trsvcid,
        subsystem_nqn=NQN,
        namespace_id=1,
        digests=Digests(header=True, data=True),
    )
    stores = ThirdPartyStores(
        [party],
        host_nqn=GATEWAY,
        directory=directory / "third-party",
        authorized=own_authorized,
        sleep=wait,
    )
    gateway = Gateway(
        traddr="127.0.0.1", trsvcid=0, settings=GatewaySettings(hold_seconds=hold_seconds)
    )
    await gateway.start()
    try:
        async with stores.running():
            made = World(plain, gateway, stores, directory / "image", fences, metadata=metadata)
            await plain.apply([made.config()])
            yield made
    finally:
        await gateway.stop()
        await plain.close()
        await listener.stop()


async def read(queue: VolumeQueue, lba: int, sectors: int) -> bytes:
    into = bytearray(sectors * PAGE)
    await queue.read(lba, into)
    return bytes(into)
