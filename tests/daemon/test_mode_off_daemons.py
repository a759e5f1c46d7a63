"""A volume of mode off with command line and daemons: filled, shown, used, filled again."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController

HOST = "nqn.2026-11.dev.sealane:host"
PAGE = 4096


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        yield Site(root)


def ctl(gateway: Daemon, *verb: str) -> Any:
    ended = sealanectl("--socket", gateway.socket, "--output", "json", "volume", *verb)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def gateway_config(site: Site, broker: Daemon, target: Daemon) -> Path:
    return site.write_config(
        "g",
        site.enrolment("g", broker) + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
        f'target_address = "{target.addresses["target_control"]}"\n'
        '[metrics]\nlisten = "127.0.0.1:0"\n',
    )


async def _read_zeros_and_write(exported: Any, sectors: int) -> None:
    async with HostController(
        traddr=exported["traddr"],
        trsvcid=exported["trsvcid"],
        subsystem_nqn=exported["subsystem_nqn"],
        host_nqn=HOST,
        credentials=Credentials(secret=HostSecret.parse(exported["dhchap_secret"])),
    ) as host:
        queue = await host.open_queue(1)
        content = bytearray(b"x" * sectors * PAGE)
        await queue.read(0, content)
        assert not any(content)
        await queue.write(3, b"\x5a" * PAGE)
        back = bytearray(PAGE)
        await queue.read(3, back)
        assert back == b"\x5a" * PAGE
        await queue.close()


def _metrics(gateway: Daemon) -> str:
    address = f"http://{gateway.addresses['metrics']}/metrics"
    with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
async def test_volume_of_mode_off_is_filled_shown_and_used(site: Site) -> None:
    site.write_policy({"s": ["target"], "g": ["gateway"]})
    target_config = (
        '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "file"\n'
    )
    with (
        daemon(site.broker_config()) as broker,
        daemon(site.write_config("s", site.enrolment("s", broker) + target_config)) as target,
    ):
        config = gateway_config(site, broker, target)
        with daemon(config) as gateway:
            made = ctl(gateway, "create", "--size", "8MiB", "--mode", "off", "--wait")
            assert (made["state"], made["mode"]) == ("available", "off")
            assert not {"C4", "C6"} & set(made["claims"])
            big = ctl(gateway, "create", "--size", "4GiB", "--mode", "off")
            assert big["state"] == "filling"
            # Its target stops answering before it is filled.
            target.process.send_signal(signal.SIGSTOP)
            ended = sealanectl(
                "--socket", gateway.socket, "volume", "attach", big["name"], "--host-nqn", HOST
            )
            assert ended.returncode == 2
            assert "being filled" in ended.stderr
            # The gateway's stop waits for a target that doesn't answer.
            gateway.process.send_signal(signal.SIGTERM)
            target.process.send_signal(signal.SIGCONT)
        with daemon(config) as gateway:
            assert ctl(gateway, "get", big["name"])["state"] == "filling"
            attached = ctl(gateway, "attach", made["name"], "--host-nqn", HOST)["attachment"]
            await _read_zeros_and_write(attached, 2048)
            metrics = await asyncio.to_thread(_metrics, gateway)
            volume_id = made["name"].removeprefix("volumes/")
            assert (
                f'sealane_gateway_volume_writes_total{{mode="off",target="s",volume="{volume_id}"}}'
                in metrics
            )
            ctl(gateway, "detach", made["name"])
            ended = sealanectl("--socket", gateway.socket, "volume", "delete", "--yes", big["name"])
            assert ended.returncode == 0, ended.stderr
            assert [v["name"] for v in ctl(gateway, "list")] == [made["name"]]
    # The log of the second process, which attached.
    assert (site.root / "g.log").read_text().count("volume_without_freshness") == 1
