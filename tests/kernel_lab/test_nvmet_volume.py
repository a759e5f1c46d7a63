"""A volume on Linux's own NVMe/TCP target: the gateway's mode local, folded."""

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attached_hosts import host_of, new_secret
from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from permits import own_authorized
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.gateway.grants import VolumeKey
from sealane.daemon.gateway.third_party import ThirdPartyStores
from sealane.daemon.gateway.third_party_link import ThirdParty
from sealane.errors import VerificationError
from sealane.transport.nvme.handshake import Digests
from sealane.transport.nvme.initiator import VolumeQueue
from target.third_party import Broker, arena

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

NQN = "nqn.2024-01.org.example:kernel"
GATEWAY = "nqn.2026-11.dev.sealane:gateway:g"
HOST = "nqn.2026-11.dev.sealane:host"
SIZE_MIB = 64
PORT = 4420
SECTORS = 4096
PAGE = 4096


@dataclass
class Volume:
    """A volume that can be attached repeatedly."""

    directory: Path
    volume_id: uuid.UUID = field(default_factory=uuid.uuid4)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    store_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    attachments: int = 0
    broker: Broker = field(default_factory=Broker)

    def stores(self, guest: Guest) -> ThirdPartyStores:
        party = ThirdParty(
            name="kernel",
            traddr="127.0.0.1",
            trsvcid=guest.forwarded_port(PORT),
            subsystem_nqn=NQN,
            namespace_id=1,
            digests=Digests(header=True, data=True),
        )
        return ThirdPartyStores(
            [party], host_nqn=GATEWAY, directory=self.directory, authorized=own_authorized
        )

    async def create(self, guest: Guest) -> None:
        stores = self.stores(guest)
        async with stores.running():
            store_key = bytearray(self.store_key)
            await stores.create(
                "kernel",
                self.volume_id,
                sector_count=SECTORS,
                store_key=store_key,
                open_device=self.broker.open,
            )

    @contextlib.asynccontextmanager
    async def attached(self, guest: Guest) -> AsyncIterator[VolumeQueue]:
        stores = self.stores(guest)
        gateway = Gateway(traddr="127.0.0.1", trsvcid=0)
        self.attachments += 1
        async with stores.running():
            await gateway.start()
            store_key = bytearray(self.store_key)
            try:
                back = await stores.attach(
                    "kernel",
                    self.volume_id,
                    sector_count=SECTORS,
                    store_key=store_key,
                    open_device=self.broker.open,
                )
            except BaseException:
                await gateway.stop()
                raise
            try:
                port = await gateway.attach(
                    VolumeKey(
                        volume_id=self.volume_id,
                        generation=1,
                        sector_count=SECTORS,
                        keys={1: bytearray(self.key)},
                    ),
                    counters=[arena(self.attachments)],
                    secret=new_secret(),
                    host_nqn=HOST,
                    open_queue=back.open_queue,
                )
                async with host_of(port, HOST) as host:
                    queue = await host.open_queue(1)
                    yield queue
                    await queue.close()
                await port.detach()
            finally:
                await back.close()
                await gateway.stop()


def test_volume_on_linux_comes_back_after_detach_and_deallocate(lab: Lab, tmp_path: Path) -> None:
    volume = Volume(tmp_path / "third-party")
    content = secrets.token_bytes(2 << 20)

    async def work(guest: Guest) -> None:
        await volume.create(guest)
        async with volume.attached(guest) as queue:
            await queue.write(5, content)
            await queue.flush()
            await queue.deallocate([(100, 20)])
            await queue.compare_and_write(7, content[2 * PAGE : 3 * PAGE], b"w" * PAGE)
        async with volume.attached(guest) as queue:
            back = bytearray(len(content))
            await queue.read(5, back)
        expected = bytearray(content)
        expected[2 * PAGE : 3 * PAGE] = b"w" * PAGE
        expected[95 * PAGE : 115 * PAGE] = bytes(20 * PAGE)
        assert back == expected

    lab.run(
        f"nvmet_disk {SIZE_MIB} {PAGE}",
        f"nvmet_subsystem {NQN}",
        f"nvmet_listen {NQN}",
        "call work",
        calls={"work": lambda guest: asyncio.run(work(guest))},
        options={"forward": (f"0:{PORT}",)},
    )


def test_disk_put_back_while_detached_is_refused(lab: Lab, tmp_path: Path) -> None:
    volume = Volume(tmp_path / "third-party")

    async def write(guest: Guest, content: bytes) -> None:
        async with volume.attached(guest) as queue:
            await queue.write(7, content * PAGE)
            await queue.flush()

    async def older(guest: Guest) -> None:
        await volume.create(guest)
        await write(guest, b"1")

    async def put_back(guest: Guest) -> None:
        with pytest.raises(VerificationError) as caught:
            await write(guest, b"3")
        assert caught.value.reason == "store.rolled_back"

    async def newest(guest: Guest) -> None:
        async with volume.attached(guest) as queue:
            back = bytearray(PAGE)
            await queue.read(7, back)
        assert back == b"2" * PAGE

    lab.run(
        f"nvmet_disk {SIZE_MIB} {PAGE}",
        f"nvmet_subsystem {NQN}",
        f"nvmet_listen {NQN}",
        "call older",
        "dd if=/dev/nullb0 of=/tmp/older bs=1M iflag=direct status=none",
        "call newer",
        "dd if=/dev/nullb0 of=/tmp/newest bs=1M iflag=direct status=none",
        "dd if=/tmp/older of=/dev/nullb0 bs=1M oflag=direct status=none",
        "call put_back",
        "dd if=/tmp/newest of=/dev/nullb0 bs=1M oflag=direct status=none",
        "call newest",
        calls={
            "older": lambda guest: asyncio.run(older(guest)),
            "newer": lambda guest: asyncio.run(write(guest, b"2")),
            "put_back": lambda guest: asyncio.run(put_back(guest)),
            "newest": lambda guest: asyncio.run(newest(guest)),
        },
        options={"forward": (f"0:{PORT}",)},
    )
