"""Our initiator proves itself to Linux's own target, checks it in turn, and uses digests."""

import asyncio
import secrets

import pytest

from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from sealane.errors import VerificationError
from sealane.protocol.nvme.authentication import HashFunction, HostSecret
from sealane.protocol.nvme.constants import DISCOVERY_NQN, AnaState
from sealane.transport.nvme import Credentials, Digests, HostController, discover

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

NQN = "nqn.2024-01.org.example:kernel"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4333-8444-555555555555"
SIZE_MIB = 64
BLOCK_BYTES = 4096
SECRET = HostSecret.generate(secrets.token_bytes, transform=HashFunction.SHA256)
LONG_SECRET = HostSecret.generate(secrets.token_bytes, transform=HashFunction.SHA512)
CONTROLLER_SECRET = HostSecret.generate(secrets.token_bytes, transform=None)
WRONG_SECRET = HostSecret.generate(secrets.token_bytes)


def _host(guest: Guest, **options: object) -> HostController:
    fields: dict[str, object] = {"subsystem_nqn": NQN, "host_nqn": HOST_NQN}
    fields |= {"traddr": "127.0.0.1", "trsvcid": guest.forwarded_port(4420)}
    return HostController(**(fields | options))  # type: ignore[arg-type]


async def _use(host: HostController) -> None:
    """Write and read blocks in the capsule and by R2T, on a queue that authenticates too."""
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
        assert await _refuse(_host(guest, credentials=wrong)) == "authentication.refused"
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
