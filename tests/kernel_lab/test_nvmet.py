"""Our initiator attaches Linux's own NVMe/TCP target."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import pytest

from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from sealane.errors import Error, UnavailableError
from sealane.protocol.nvme.authentication.errors import AuthenticationError
from sealane.protocol.nvme.authentication.secret import HashFunction, HostSecret
from sealane.protocol.nvme.constants import DISCOVERY_NQN
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.discovery import discover
from sealane.transport.nvme.initiator import HostController

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

NQN = "nqn.2024-01.org.example:kernel"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4333-8444-555555555555"
SIZE_MIB = 64
BLOCK_BYTES = 4096
PORT = 4420


def _host(
    guest: Guest, *, subsystem_nqn: str = NQN, credentials: Credentials | None = None
) -> HostController:
    return HostController(
        traddr="127.0.0.1",
        trsvcid=guest.forwarded_port(PORT),
        subsystem_nqn=subsystem_nqn,
        host_nqn=HOST_NQN,
        keep_alive_ms=10_000,
        credentials=credentials,
    )


def _serve(lab: Lab, work: Callable[[Guest], Awaitable[None]], *setup: str) -> None:
    """Run `work` while the guest serves."""
    lab.run(
        f"nvmet_disk {SIZE_MIB} {BLOCK_BYTES}",
        f"nvmet_subsystem {NQN}",
        *setup,
        f"nvmet_listen {NQN}",
        "call work",
        calls={"work": lambda guest: asyncio.run(_awaited(work(guest)))},
        options={"forward": (f"0:{PORT}",)},
    )


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def _write_and_read(host: HostController, sizes: tuple[int, ...]) -> None:
    """Write each size at a place of its own, and then read all of them."""
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


@pytest.mark.parametrize(
    ("hash_name", "group", "transform", "both_ways"),
    [
        ("hmac(sha256)", "null", None, False),
        ("hmac(sha256)", "ffdhe2048", HashFunction.SHA256, True),
        ("hmac(sha384)", "ffdhe3072", HashFunction.SHA384, True),
        ("hmac(sha512)", "ffdhe8192", HashFunction.SHA512, False),
    ],
)
def test_host_authenticates(
    lab: Lab, hash_name: str, group: str, transform: HashFunction | None, both_ways: bool
) -> None:
    host_secret = HostSecret.generate(secrets.token_bytes, transform=transform)
    controller_secret = HostSecret.generate(secrets.token_bytes, transform=transform)
    right = Credentials(
        secret=host_secret, controller_secret=controller_secret if both_ways else None
    )
    wrong = Credentials(secret=HostSecret.generate(secrets.token_bytes, transform=transform))

    async def work(guest: Guest) -> None:
        with pytest.raises(Error):
            await _write_and_read(_host(guest), (BLOCK_BYTES,))
        # nvmet says so and closes at once: which of them a host sees first is chance.
        with pytest.raises((AuthenticationError, UnavailableError)):
            await _write_and_read(_host(guest, credentials=wrong), (BLOCK_BYTES,))
        await _write_and_read(_host(guest, credentials=right), (BLOCK_BYTES, 128 << 10))

    other = str(controller_secret) if both_ways else "''"
    # Quoted for the guest's shell.
    words = [str(host_secret), other, f"'{hash_name}'", group]
    _serve(lab, work, f"nvmet_host {NQN} {HOST_NQN} {' '.join(words)}")


def test_target_that_cannot_authenticate_is_refused(lab: Lab) -> None:
    host_secret, expected = (HostSecret.generate(secrets.token_bytes) for _ in range(2))
    other = HostSecret.generate(secrets.token_bytes)
    credentials = Credentials(secret=host_secret, controller_secret=expected)

    async def work(guest: Guest) -> None:
        with pytest.raises(AuthenticationError):
            await _write_and_read(_host(guest, credentials=credentials), (BLOCK_BYTES,))

    _serve(lab, work, f"nvmet_host {NQN} {HOST_NQN} {host_secret!s} {other!s}")


def test_discovery_names_the_subsystem(lab: Lab) -> None:
    async def work(guest: Guest) -> None:
        async with _host(guest, subsystem_nqn=DISCOVERY_NQN) as host:
            found = await discover(host)
        assert [path.subsystem_nqn for path in found if not path.is_discovery] == [NQN]

    _serve(lab, work)
