"""A volume on a third-party target by configuration, gRPC and command line, with its secrets."""

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from control_plane import Daemon, Site, daemon, sealanectl, short_directory, write_key
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController

pytestmark = pytest.mark.slow

HOST = "nqn.2026-11.dev.sealane:host"
DISKS = "nqn.2026-11.example:disks"
GATEWAY = "nqn.2026-11.dev.sealane:gateway:g"


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        yield Site(root)


def ctl(gateway: Daemon, *verb: str) -> Any:
    ended = sealanectl("--socket", gateway.socket, "--output", "json", "volume", *verb)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


async def _write_and_read(exported: Any) -> None:
    async with HostController(
        traddr=exported["traddr"],
        trsvcid=exported["trsvcid"],
        subsystem_nqn=exported["subsystem_nqn"],
        host_nqn=HOST,
        credentials=Credentials(secret=HostSecret.parse(exported["dhchap_secret"])),
    ) as host:
        queue = await host.open_queue(1)
        await queue.write(3, b"\x5a" * 4096)
        back = bytearray(4096)
        await queue.read(3, back)
        assert back == b"\x5a" * 4096
        await queue.close()


async def test_operator_names_the_third_party_and_a_job_uses_it(site: Site) -> None:
    site.write_policy({"s": ["target"], "g": ["gateway"]})
    key = site.root / "disks.key"
    write_key(key, str(HostSecret.generate(secrets.token_bytes)).encode())
    disks = (
        '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "memory"\n'
        f'[[target.subsystems]]\nnqn = "{DISKS}"\n'
        f'hosts = [{{nqn = "{GATEWAY}", dhchap_key_file = "{key}"}}]\n'
        '[[target.subsystems.namespaces]]\nnsid = 1\nstore = "memory"\nsize_bytes = 67_108_864\n'
    )
    with (
        daemon(site.broker_config()) as broker,
        daemon(site.write_config("s", site.enrolment("s", broker) + disks)) as target,
    ):
        gateway_config = (
            '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            f'target_address = "{target.addresses["target_control"]}"\n'
            f'[[gateway.third_party]]\nname = "array"\naddress = "{target.addresses["target"]}"\n'
            f'subsystem_nqn = "{DISKS}"\ndhchap_key_file = "{key}"\n'
        )
        path = site.write_config("g", site.enrolment("g", broker) + gateway_config)
        with daemon(path) as gateway:
            made = ctl(gateway, "create", "--size", "1MiB", "--third-party", "array")
            assert (made["mode"], made["third_party"]) == ("local", "array")
            assert "C5" not in made["claims"]
            attached = ctl(gateway, "attach", made["name"], "--host-nqn", HOST)
            await _write_and_read(attached["attachment"])
            ctl(gateway, "detach", made["name"])
