"""An Arm gateway, emulated, and one of this machine at one target: each reads what the other wrote.

`make test-aarch64` sets SEALANE_AARCH64 to a directory with a Debian root for arm64, and the wheel
with the packages that it needs.
"""

import os
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from control_plane import Daemon, Site, daemon, short_directory
from sealane.client import Volume, connect
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController

EMULATED = os.environ.get("SEALANE_AARCH64", "")
HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not EMULATED, reason="no Arm root: make test-aarch64 makes it")


def in_place_of_python() -> list[str]:
    """Return a command that runs the arguments of the Python named after it by an Arm Python."""
    root = Path(EMULATED).resolve() / "root"
    site = root.parent / "site"
    arm = ["env", f"PYTHONPATH={site}", "qemu-aarch64", "-L", str(root)]
    run = shlex.join([*arm, str(root / "usr/bin/python3.11")])
    return ["sh", "-c", f'shift; exec {run} "$@"', "sh"]


@dataclass
class Gateways:
    """Gateways by processor."""

    arm: Daemon
    own: Daemon


@pytest.fixture
def gateways() -> Iterator[Gateways]:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"], "h": ["gateway"]})
        with daemon(site.broker_config()) as broker:
            target_text = '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            target_text = site.enrolment("s", broker) + target_text + 'store = "file"\n'
            with daemon(site.write_config("s", target_text)) as target:
                listen = '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                listen += f'target_address = "{target.addresses["target_control"]}"\n'
                arm, own = [
                    site.write_config(node, site.enrolment(node, broker) + listen)
                    for node in ("g", "h")
                ]
                with daemon(own) as here, daemon(arm, prefix=in_place_of_python()) as emulated:
                    program = Path(f"/proc/{emulated.process.pid}/exe").resolve()
                    assert program.name.startswith("qemu-aarch64")
                    yield Gateways(emulated, here)


async def _moved(gateway: Daemon, name: str, buffer: bytes | bytearray) -> None:
    """Write bytes to a volume, or read a buffer full, through an attachment of its own."""
    async with connect(gateway.socket) as client:
        volume: Volume = await client.volumes.attach(name, host_nqn=HOST)
        assert volume.attachment is not None
        async with HostController(
            traddr=volume.attachment.traddr,
            trsvcid=volume.attachment.trsvcid,
            subsystem_nqn=volume.attachment.subsystem_nqn,
            host_nqn=HOST,
            credentials=Credentials(secret=HostSecret.parse(volume.attachment.dhchap_secret)),
        ) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            if isinstance(buffer, bytearray):
                await queue.read(16, buffer)
            else:
                await queue.write(16, buffer)
                await queue.flush()
            await queue.close()
        await client.volumes.detach(name)


async def test_each_reads_what_the_other_wrote(gateways: Gateways) -> None:
    async with connect(gateways.own.socket) as client:
        volume = await client.volumes.create(size_bytes=8 * MIB)
    for writer, reader in ((gateways.arm, gateways.own), (gateways.own, gateways.arm)):
        data, back = secrets.token_bytes(2 * MIB), bytearray(2 * MIB)
        await _moved(writer, volume.name, data)
        await _moved(reader, volume.name, back)
        assert back == data
