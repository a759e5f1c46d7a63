"""Our initiator with Linux's own target: authentication, digests, logs, reconnected paths."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.nvme.authentication import HashFunction, HostSecret
from sealane.protocol.nvme.constants import DISCOVERY_NQN, AnaState
from sealane.transport.nvme import (
    Address,
    ConnectionManager,
    Credentials,
    Digests,
    HostController,
    PathEvent,
    PathState,
    ReconnectPolicy,
    bulk_queue,
    discover,
)

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

NQN = "nqn.2024-01.org.example:kernel"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4333-8444-555555555555"
SIZE_MIB = 64
BLOCK_BYTES = 4096
SECRET = HostSecret.generate(secrets.token_bytes, transform=HashFunction.SHA256)
LONG_SECRET = HostSecret.generate(secrets.token_bytes, transform=HashFunction.SHA512)
CONTROLLER_SECRET = HostSecret.generate(secrets.token_bytes, transform=None)
WRONG_SECRET = HostSecret.generate(secrets.token_bytes)
# Linux ends the controller once it has answered, which may cut the connection before the answer.
REFUSED = {"authentication.refused", "connection.lost"}


def _host(guest: Guest, **options: object) -> HostController:
    fields: dict[str, object] = {"subsystem_nqn": NQN, "host_nqn": HOST_NQN}
    fields |= {"traddr": "127.0.0.1", "trsvcid": guest.forwarded_port(4420)}
    return HostController(**(fields | options))  # type: ignore[arg-type]


async def _use(host: HostController) -> None:
    """Write and read blocks in the capsule and by R2T, on a queue with authentication."""
    async with host:
        queue = await host.open_queue(1)
        try:
            for lba, size in ((0, BLOCK_BYTES), (100, 16 * BLOCK_BYTES), (200, 256 * BLOCK_BYTES)):
                data = secrets.token_bytes(size)
                await queue.write(lba, data)
                back = bytearray(size)
                await queue.read(lba, back)
                assert back == data
            await queue.write_zeroes(0, 1)
            await queue.deallocate([(200, 256)])
            await queue.flush()
            back = bytearray(BLOCK_BYTES)
            await queue.read(0, back)
            assert back == bytes(BLOCK_BYTES)
        finally:
            await queue.close()


async def _refuse(host: HostController) -> str:
    with pytest.raises(VerificationError) as caught:
        await host.connect()
    return caught.value.reason


async def _fail(host: HostController) -> str:
    with pytest.raises((VerificationError, UnavailableError)) as caught:
        await host.connect()
    return caught.value.reason


@pytest.mark.parametrize(
    ("hash_name", "group", "secret", "is_mutual"),
    [
        ("hmac(sha256)", "ffdhe2048", SECRET, True),
        ("hmac(sha384)", "ffdhe3072", LONG_SECRET, True),
        ("hmac(sha512)", "ffdhe8192", LONG_SECRET, True),
        ("hmac(sha256)", "null", SECRET, False),
    ],
)
def test_initiator_and_target_know_each_other(
    lab: Lab, hash_name: str, group: str, secret: HostSecret, is_mutual: bool
) -> None:
    controller_secret = CONTROLLER_SECRET if is_mutual else None
    right = Credentials(secret=secret, controller_secret=controller_secret)

    async def attach(guest: Guest) -> None:
        assert await _refuse(_host(guest)) == "authentication.required"
        wrong = Credentials(secret=WRONG_SECRET, controller_secret=controller_secret)
        assert await _fail(_host(guest, credentials=wrong)) in REFUSED
        if is_mutual:
            impostor = Credentials(secret=secret, controller_secret=WRONG_SECRET)
            assert await _refuse(_host(guest, credentials=impostor)) == "authentication.failed"
        await _use(_host(guest, credentials=right))
        async with _host(guest, credentials=right) as host:
            await host.authenticate()
            assert await host.active_namespaces() == [1]

    shown = str(controller_secret) if controller_secret else "''"
    lab.run(
        f"nvmet_disk {SIZE_MIB} {BLOCK_BYTES}",
        f"nvmet_subsystem {NQN}",
        f"nvmet_host {NQN} {HOST_NQN} {secret!s} {shown} '{hash_name}' {group}",
        f"nvmet_listen {NQN}",
        "call attach",
        calls={"attach": lambda guest: asyncio.run(attach(guest))},
        options={"forward": ("0:4420",)},
    )


def test_initiator_uses_digests_and_reads_what_the_target_tells(lab: Lab) -> None:
    async def attach(guest: Guest) -> None:
        await _use(_host(guest, digests=Digests(header=True, data=True)))
        async with _host(guest, events=lambda _: None, keep_alive_ms=5000) as host:
            assert await host.ana_states() == {1: AnaState.OPTIMIZED}
            assert (await host.namespace_names(1)).uuid is not None
        async with _host(guest, subsystem_nqn=DISCOVERY_NQN) as host:
            assert NQN in {path.subsystem_nqn for path in await discover(host)}

    lab.run(
        f"nvmet_disk {SIZE_MIB} {BLOCK_BYTES}",
        f"nvmet_subsystem {NQN}",
        f"nvmet_listen {NQN}",
        "call attach",
        calls={"attach": lambda guest: asyncio.run(attach(guest))},
        options={"forward": ("0:4420",)},
    )


@dataclass
class Kept:
    """A path kept by a manager, for the calls of a job."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    events: "asyncio.Queue[PathEvent]" = field(default_factory=asyncio.Queue)
    manager: ConnectionManager | None = None
    data: bytes = field(default_factory=lambda: secrets.token_bytes(16 * BLOCK_BYTES))

    def call(self, work: Callable[[], Awaitable[None]]) -> Callable[[Guest], None]:
        return lambda _: self.loop.run_until_complete(work())

    async def connect(self, guest: Guest) -> None:
        self.manager = ConnectionManager(
            [Address("127.0.0.1", guest.forwarded_port(4420))],
            subsystem_nqn=NQN,
            host_nqn=HOST_NQN,
            queue_count=1,
            events=self.events.put_nowait,
            policy=ReconnectPolicy(first_seconds=0.2, most_seconds=1.0),
        )
        self.manager.start()
        await self._transfer(write=True)

    async def lose(self) -> None:
        async with asyncio.timeout(60):
            while (await self.events.get()).state is not PathState.WAITING:
                pass

    async def come_back(self) -> None:
        await self._transfer(write=False)
        assert self.manager is not None
        await self.manager.close()

    async def _transfer(self, *, write: bool) -> None:
        assert self.manager is not None
        address, connected = await self.manager.connect_queue(1, nsid=1, timeout_seconds=60)
        host = self.manager.controller(address)
        assert host is not None
        queue = bulk_queue(connected, await host.identify_namespace())
        try:
            if write:
                await queue.write(7, self.data, is_forced=True)
            back = bytearray(len(self.data))
            await queue.read(7, back)
            assert back == self.data
        finally:
            await queue.close()


def test_path_comes_back_with_the_target(lab: Lab) -> None:
    kept = Kept()
    try:
        lab.run(
            f"nvmet_disk {SIZE_MIB} {BLOCK_BYTES}",
            f"nvmet_subsystem {NQN}",
            f"nvmet_listen {NQN}",
            "call connect",
            f"nvmet_drop {NQN}",
            "call lose",
            f"nvmet_offer {NQN}",
            "call come-back",
            calls={
                "connect": lambda guest: kept.loop.run_until_complete(kept.connect(guest)),
                "lose": kept.call(kept.lose),
                "come-back": kept.call(kept.come_back),
            },
            options={"forward": ("0:4420",)},
        )
    finally:
        kept.loop.close()
