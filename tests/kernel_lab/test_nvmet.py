"""Our initiator attaches Linux's own NVMe/TCP target."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine

import pytest

from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from sealane.errors import Error
from sealane.transport.nvme.initiator import HostController

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

NQN = "nqn.2024-01.org.example:kernel"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4333-8444-555555555555"
SIZE_MIB = 64
BLOCK_BYTES = 4096
PORT = 4420


def _host(guest: Guest) -> HostController:
    return HostController(
        traddr="127.0.0.1",
        trsvcid=guest.forwarded_port(PORT),
        subsystem_nqn=NQN,
        host_nqn=HOST_NQN,
        keep_alive_ms=10_000,
    )


def _serve(lab: Lab, work: Callable[[Guest], Coroutine[None, None, None]], *setup: str) -> None:
    """Run `work` while the guest serves."""
    lab.run(
        f"nvmet_disk {SIZE_MIB} {BLOCK_BYTES}",
        f"nvmet_subsystem {NQN}",
        *setup,
        f"nvmet_listen {NQN}",
        "call work",
        calls={"work": _synchronous(work)},
        options={"forward": (f"0:{PORT}",)},
    )


def _synchronous(work: Callable[[Guest], Coroutine[None, None, None]]) -> Callable[[Guest], None]:
    return lambda guest: asyncio.run(work(guest))


async def _write_and_read(host: HostController, sizes: tuple[int, ...]) -> None:
    """Write each size at its own position, then read all of them."""
    async with host:
        assert host.identity.subsystem_nqn == NQN
        namespace = await host.identify_namespace()
        assert namespace.block_bytes == BLOCK_BYTES
        assert namespace.block_count == (SIZE_MIB << 20) // BLOCK_BYTES
        assert await host.request_queues(1) >= 1
        queue = await host.open_queue(1)
        lba, written = 5, []
        for size in sizes:
            data = secrets.token_bytes(size)
            await queue.write(lba, data)
            written.append((lba, data))
            lba += size // BLOCK_BYTES
        await queue.flush()
        for place, data in written:
            back = bytearray(len(data))
            await queue.read(place, back)
            assert back == data, f"{len(data)} bytes at LBA {place}"
        await queue.close()


@pytest.mark.lab_short
def test_blocks_of_every_size_come_back(lab: Lab) -> None:
    # nvmet never asks for the data of a write of 16 KiB or less: it must be in the capsule.
    sizes = tuple(kib << 10 for kib in (4, 8, 12, 16, 20, 24, 64, 128, 1024, 4096))
    _serve(lab, lambda guest: _write_and_read(_host(guest), sizes))


def test_what_was_written_is_there_when_the_target_is_back(lab: Lab) -> None:
    data = secrets.token_bytes(64 << 10)

    async def write(guest: Guest) -> None:
        async with _host(guest) as host:
            queue = await host.open_queue(1)
            await queue.write(3, data)
            await queue.close()

    async def refused(guest: Guest) -> None:
        with pytest.raises(Error):
            await _host(guest).connect()

    async def read(guest: Guest) -> None:
        async with _host(guest) as host:
            queue = await host.open_queue(1)
            back = bytearray(len(data))
            await queue.read(3, back)
            await queue.close()
        assert back == data

    calls = {"write": write, "refused": refused, "read": read}
    lab.run(
        f"nvmet_disk {SIZE_MIB} {BLOCK_BYTES}",
        f"nvmet_subsystem {NQN}",
        f"nvmet_listen {NQN}",
        "call write",
        f"nvmet_drop {NQN}",
        "call refused",
        f"nvmet_offer {NQN}",
        "call read",
        calls={name: _synchronous(call) for name, call in calls.items()},
        options={"forward": (f"0:{PORT}",)},
    )
