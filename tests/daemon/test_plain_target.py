"""A target daemon with plain subsystems: start, reload by SIGHUP, discovery, metrics."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from control_plane import Daemon, Site, daemon, sealanectl, short_directory, wait_for_log
from sealane.protocol.nvme.constants import DISCOVERY_NQN
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import HostController

pytestmark = pytest.mark.slow

HOST = "nqn.2026-11.dev.sealane:host"
NQN = "nqn.2026-11.dev.sealane:plain"
TARGET = (
    '[metrics]\nlisten = "127.0.0.1:0"\n'
    '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "memory"\n'
    'discovery_listen = "127.0.0.1:0"\n'
)
SUBSYSTEM = f'[[target.subsystems]]\nnqn = "{NQN}"\nhosts = [{{nqn = "{HOST}"}}]\n'


def namespace(nsid: int, size_bytes: int = 1 << 20) -> str:
    return (
        f"[[target.subsystems.namespaces]]\nnsid = {nsid}\n"
        f'store = "memory"\nsize_bytes = {size_bytes}\n'
    )


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        yield Site(root)


def host(target: Daemon, nqn: str = NQN, *, at: str = "target") -> HostController:
    traddr, _, trsvcid = target.addresses[at].rpartition(":")
    return HostController(traddr=traddr, trsvcid=int(trsvcid), subsystem_nqn=nqn, host_nqn=HOST)


def ctl(target: Daemon, *verb: str) -> Any:
    ended = sealanectl("--socket", target.socket, "--output", "json", "subsystem", *verb)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def scrape(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        content: bytes = answer.read()
    return content


async def test_plain_subsystems_follow_the_configuration(site: Site) -> None:
    site.write_policy({"s": ["target"]})
    with daemon(site.broker_config()) as broker:
        fixed = site.enrolment("s", broker) + TARGET
        path = site.write_config("s", fixed + SUBSYSTEM + namespace(1))
        with daemon(path) as target:
            async with host(target) as connected:
                assert await connected.active_namespaces() == [1]
                queue = await connected.open_queue(1)
                await queue.write(0, b"\x5a" * 4096)
                site.write_config("s", fixed + SUBSYSTEM + namespace(1) + namespace(2))
                target.process.send_signal(signal.SIGHUP)
                wait_for_log(target.process, path, "reloaded")
                assert await connected.active_namespaces() == [1, 2]
                back = bytearray(4096)
                await queue.read(0, back)
                assert back == b"\x5a" * 4096
                listed = await asyncio.to_thread(ctl, target, "list")
                assert [row["nqn"] for row in listed] == [NQN]
                shown = await asyncio.to_thread(ctl, target, "get", NQN)
                assert [each["nsid"] for each in shown["namespaces"]] == [1, 2]
                (controller,) = shown["controllers"]
                assert (controller["host_nqn"], controller["io_queues"]) == (HOST, 1)
                assert not controller["authenticated"]
                await queue.close()
            unknown = await asyncio.to_thread(
                sealanectl, "--socket", target.socket, "subsystem", "get", HOST
            )
            assert "name.not_found" in unknown.stderr
            async with host(target, DISCOVERY_NQN, at="discovery") as asking:
                log = await asking.log_page(0x70, 3072)
                port = target.addresses["target"].rpartition(":")[2]
                assert log[2048 + 256 :].startswith(NQN.encode() + b"\0")
                assert log[2048 + 32 :].startswith(port.encode() + b" ")
            with pytest.raises(NvmeStatusError):
                await host(target, at="discovery").connect()
            site.write_config("s", fixed + SUBSYSTEM + namespace(1, 2 << 20))
            target.process.send_signal(signal.SIGHUP)
            wait_for_log(target.process, path, "reload_failed")
            async with host(target) as connected:
                assert await connected.active_namespaces() == [1, 2]
            metrics = await asyncio.to_thread(scrape, target.addresses["metrics"])
            faults = (
                b'sealane_nvme_faults_total{listener="discovery",reason="connect.subsystem"} 1.0'
            )
            assert faults in metrics
            written = f'sealane_plain_namespace_host_writes_total{{namespace="{NQN}/1"}} 1.0'
            assert written.encode() in metrics
