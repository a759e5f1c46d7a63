"""Broker, target and gateway as processes on loopback: the life of a volume with real data."""

import asyncio
import contextlib
import json
import secrets
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attached_hosts import host_at
from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from ports import choose_ports
from sealane.cli.demo.adversary import DiskAdversary
from sealane.client import Volume, connect
from sealane.errors import UsageError
from sealane.transport.nvme.initiator import HostController, NvmeStatusError

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
MIB = 1 << 20


@dataclass
class Cluster:
    site: Site
    broker: Daemon
    target: Daemon
    gateway: Daemon


@contextlib.contextmanager
def _cluster(*, store: str) -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"], "h": ["gateway"]})
        broker = stack.enter_context(daemon(site.broker_config()))
        target = stack.enter_context(
            daemon(
                site.write_config(
                    "s",
                    site.enrolment("s", broker)
                    + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
                    + f'store = "{store}"\n[metrics]\nlisten = "127.0.0.1:0"\n',
                )
            )
        )
        gateway = stack.enter_context(
            daemon(
                site.write_config(
                    "g",
                    site.enrolment("g", broker)
                    + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                    + f'target_address = "{target.addresses["target_control"]}"\n'
                    + '[metrics]\nlisten = "127.0.0.1:0"\n',
                )
            )
        )
        yield Cluster(site, broker, target, gateway)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with _cluster(store="inline") as made:
        yield made


def _host(volume: Volume, *, host_nqn: str = HOST) -> HostController:
    return host_at(volume, host_nqn)


async def test_a_broker_lists_the_volumes_of_all_tenants(cluster: Cluster) -> None:
    async with connect(cluster.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=8 * MIB, display_name="listed")
        await client.volumes.share(volume.name, tenant="guest", read_only=True)
    at = ("--socket", cluster.broker.socket)
    listed = sealanectl("volume", "list", *at, "-o", "json")
    assert listed.returncode == 0, listed.stderr
    (row,) = (row for row in json.loads(listed.stdout) if row["name"] == volume.name)
    assert (row["tenant"], row["target_node"], row["size_bytes"]) == ("t", "s", 8 * MIB)
    assert row["shares"] == [{"tenant": "guest", "read_only": True}]
    wide = sealanectl("volume", "list", *at, "-o", "wide")
    assert "guest (read only)" in wide.stdout
    # Its own verbs take what the list shows.
    rotated = sealanectl("key", "rotate", "listed", *at, "-o", "json")
    assert rotated.returncode == 0, rotated.stderr
    assert json.loads(rotated.stdout)["volume"] == volume.name
    prefix = volume.name.removeprefix("volumes/")[:12]
    assert sealanectl("lease", "list", "--volume", prefix, *at).returncode == 0
    absent = sealanectl("lease", "list", "--volume", "absent", *at)
    assert (absent.returncode, "name.not_found" in absent.stderr) == (4, True)


async def test_bytes_written_through_the_gateway_come_back(cluster: Cluster) -> None:
    data = secrets.token_bytes(2 * MIB)
    async with connect(cluster.gateway.socket) as client:
        created = await client.volumes.create(size_bytes=8 * MIB, display_name="checkpoints")
        assert (created.state, created.size_bytes) == ("available", 8 * MIB)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        assert volume.state == "attached"
        async with _host(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            await queue.write(16, data)
            await queue.flush()
            back = bytearray(len(data))
            await queue.read(16, back)
            zeros = bytearray(4096)
            zeros[:] = b"x" * 4096
            await queue.read(0, zeros)
            await queue.close()
        assert back == data
        assert not any(zeros)
        seen = await client.volumes.get(volume.name)
        assert seen.attachment is not None
        assert seen.attachment.sectors_sealed == 512
        assert seen.attachment.sectors_opened >= 512
        assert seen.attachment.counters_used >= 512 * 256
        assert seen.attachment.counters_leased == 1 << 36
        assert seen.attachment.refusals == 0
        stored = b"".join(
            p.read_bytes() for p in (cluster.site.root / "s" / "volumes").glob("*.sectors")
        )
        assert data[4096:4112] not in stored
        await client.volumes.detach(volume.name)
        await client.volumes.delete(volume.name)
        assert all(v.name != volume.name for v in await client.volumes.list())


async def test_volume_reads_back_after_detach_and_attach(cluster: Cluster) -> None:
    data = secrets.token_bytes(64 << 10)
    async with connect(cluster.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=MIB)
        back = bytearray(len(data))
        for turn in range(2):
            volume = await client.volumes.attach(volume.name, host_nqn=HOST)
            async with _host(volume) as host:
                await host.request_queues(1)
                queue = await host.open_queue(1)
                if turn == 0:
                    await queue.write(0, data)
                else:
                    await queue.read(0, back)
                await queue.close()
            await client.volumes.detach(volume.name)
        assert back == data


async def test_flipped_bit_on_the_disk_is_refused_and_watched(cluster: Cluster) -> None:
    async with connect(cluster.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        async with client.volumes.watch(volume.name) as events, _host(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            await queue.write(0, secrets.token_bytes(4096))
            store = cluster.site.root / "s" / "volumes" / f"{volume.name[8:]}.sectors"
            DiskAdversary(store).flip_bit(0, 0)
            with pytest.raises(NvmeStatusError) as caught:
                await queue.read(0, bytearray(4096))
            assert caught.value.is_verification_failure
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for event in events:
                    if event.kind == "refused":
                        break
            assert event.reason
        await client.volumes.detach(volume.name)


def test_command_line_scrubs_a_volume_and_shows_its_store(cluster: Cluster) -> None:
    def run(*arguments: str, form: str = "json") -> str:
        ended = sealanectl("--socket", cluster.gateway.socket, "--output", form, *arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    name = json.loads(run("volume", "create", "--size", "4MiB"))["name"]
    job = json.loads(run("volume", "scrub", name, "--rate", "200MiB/s", "--wait"))
    assert (job["state"], job["found"], job["bytes_per_second"]) == ("finished", 0, 200 * MIB)
    assert json.loads(run("volume", "jobs", name))[0]["kind"] == "scrub"
    shown = run("volume", "get", name, form="table")
    for words in ("in place", "created", "broker, number", "finished, 0 sectors, 0 found wrong"):
        assert words in shown
    store = json.loads(run("volume", "get", name))["store"]
    assert (store["epoch"], store["recovered_changes"]) == (1, 0)
    for arguments, reason in (
        (("scrub", name, "--pause"), "volume.job.over"),
        (("resize", name, "--size", "1MiB"), "volume.resize.smaller"),
        (("resize", "volumes/1", "--size", "8MiB"), "volume.name"),
        (("clone", name), "volume.clone.unsupported"),
    ):
        refused = sealanectl("--socket", cluster.gateway.socket, "volume", *arguments)
        assert refused.returncode == 2
        assert refused.stderr.endswith(f"[{reason}]\n")
    run("volume", "delete", "--yes", name)


async def test_volume_grows_while_it_is_attached_and_has_its_new_size_at_the_next_attach(
    cluster: Cluster,
) -> None:
    data = secrets.token_bytes(64 << 10)
    old_end, new_end = 4 * MIB - len(data), 40 * MIB - len(data)
    async with connect(cluster.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=4 * MIB)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        async with _host(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            await queue.write(old_end // 4096, data)
            grown = await client.volumes.resize(volume.name, size_bytes=40 * MIB)
            assert (grown.size_bytes, grown.state) == (40 * MIB, "attached")
            # The same host goes on with the old size.
            back = bytearray(len(data))
            await queue.read(old_end // 4096, back)
            assert back == data
            with pytest.raises(NvmeStatusError):
                await queue.write(4 * MIB // 4096, data)
            await queue.close()
        await client.volumes.detach(volume.name)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        async with _host(volume) as host:
            await host.request_queues(1)
            namespace = await host.identify_namespace(1)
            assert namespace.block_count == 40 * MIB // 4096
            queue = await host.open_queue(1)
            await queue.read(old_end // 4096, back)
            assert back == data
            await queue.read(new_end // 4096, back)
            assert not any(back)
            await queue.write(new_end // 4096, data)
            await queue.read(new_end // 4096, back)
            assert back == data
            with pytest.raises(NvmeStatusError):
                await queue.read(40 * MIB // 4096, back)
            await queue.close()
        await client.volumes.detach(volume.name)
        again = await client.volumes.resize(volume.name, size_bytes=40 * MIB)
        assert again.size_bytes == 40 * MIB, "again is harmless"
        await client.volumes.delete(volume.name)


async def test_unknown_volume_and_bad_name_are_named(cluster: Cluster) -> None:
    async with connect(cluster.gateway.socket) as client:
        with pytest.raises(UsageError) as caught:
            await client.volumes.get("volumes/00000000-0000-4000-8000-000000000000")
        assert caught.value.reason == "volume.not_found"
        for name in ("", "volumes/", "volumes/1", "x/00000000-0000-4000-8000-000000000000"):
            with pytest.raises(UsageError) as caught:
                await client.volumes.get(name)
            assert caught.value.reason == "volume.name"
        with pytest.raises(UsageError) as caught:
            async with client.volumes.watch("volumes/00000000-0000-4000-8000-000000000000"):
                pass
        assert caught.value.reason == "volume.not_found"


def test_command_line_lives_a_volumes_life(cluster: Cluster) -> None:
    def run(*arguments: str) -> str:
        ended = sealanectl("--socket", cluster.gateway.socket, "--output", "json", *arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    name = json.loads(run("volume", "create", "--size", "4MiB", "--display-name", "v"))["name"]
    attached = json.loads(run("volume", "attach", name, "--host-nqn", HOST))
    assert attached["attachment"]["host_nqn"] == HOST
    assert name in [v["name"] for v in json.loads(run("volume", "list"))]
    refused = sealanectl("--socket", cluster.gateway.socket, "volume", "delete", "--yes", name)
    assert refused.returncode == 2
    assert refused.stderr.endswith("is attached: detach it first [volume.attached.state]\n")
    table = sealanectl("--socket", cluster.gateway.socket, "volume", "list").stdout
    assert name in table
    run("volume", "detach", name)
    run("volume", "delete", "--yes", name)
    size = sealanectl("--socket", cluster.gateway.socket, "volume", "create", "--size", "5000")
    assert size.returncode == 2


async def test_attached_volume_does_not_hold_up_a_stop() -> None:
    with _cluster(store="memory") as made:
        async with connect(made.gateway.socket) as client:
            volume = await client.volumes.create(size_bytes=MIB)
            await client.volumes.attach(volume.name, host_nqn=HOST)
            async with client.volumes.watch(volume.name):
                assert await asyncio.to_thread(made.gateway.stop, signal.SIGTERM) == 0


async def test_gateway_that_starts_again_has_attached_what_it_had(cluster: Cluster) -> None:
    data = secrets.token_bytes(4096)
    with short_directory():
        config = cluster.site.write_config(
            "h",
            cluster.site.enrolment("h", cluster.broker)
            + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            + f'target_address = "{cluster.target.addresses["target_control"]}"\n',
        )
        choose_ports(config)
        volumes: list[Volume] = []
        for turn in range(2):
            with daemon(config) as gateway:
                async with connect(gateway.socket) as client:
                    if turn == 0:
                        created = await client.volumes.create(size_bytes=MIB)
                        attached = await client.volumes.attach(created.name, host_nqn=HOST)
                        volumes.append(attached)
                    (volume,) = volumes
                    async with _host(volume) as host:
                        await host.request_queues(1)
                        queue = await host.open_queue(1)
                        back = bytearray(4096)
                        if turn == 0:
                            await queue.write(3, data)
                        await queue.read(3, back)
                        await queue.close()
                    assert back == data


def _scrape(daemon: Daemon) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{daemon.addresses['metrics']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {series: float(value) for series, _, value in samples}


def test_metrics_count_the_enrolment(cluster: Cluster) -> None:
    assert _scrape(cluster.gateway)['sealane_enrolments_total{result="succeeded"}'] == 1


async def test_metrics_have_each_command_in_a_histogram_also_of_volumes_that_are_gone(
    cluster: Cluster,
) -> None:
    daemons = {"gateway": cluster.gateway, "target": cluster.target}

    def count(role: str, operation: str, suffix: str) -> float:
        name = f"sealane_{role}_io_seconds_{suffix}"
        return _scrape(daemons[role])[f'{name}{{operation="{operation}"}}']

    before = {role: count(role, "write", "count") for role in daemons}
    seconds = {role: count(role, "write", "sum") for role in daemons}
    async with connect(cluster.gateway.socket) as client:
        created = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        async with _host(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            for lba in range(3):
                await queue.write(lba, bytes(4096))
            await queue.close()
        await client.volumes.detach(volume.name)
        await client.volumes.delete(volume.name)
    assert {role: count(role, "write", "count") for role in daemons} == {
        role: count + 3 for role, count in before.items()
    }
    more = {role: count(role, "write", "sum") - seconds[role] for role in daemons}
    assert more["gateway"] > more["target"] > 0


async def test_top_shows_what_a_volume_does_at_both_ends(cluster: Cluster) -> None:
    async def looked(daemon: Daemon) -> dict[str, Any]:
        socket = ("--socket", daemon.socket)
        arguments = (*socket, "top", "--once", "--interval", "0.5", "-o", "json")
        ended = await asyncio.to_thread(sealanectl, *arguments)
        assert ended.returncode == 0, ended.stderr
        shown: dict[str, Any] = json.loads(ended.stdout)
        return shown

    async with connect(cluster.gateway.socket) as client:
        created = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        async with _host(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            looks = asyncio.gather(looked(cluster.gateway), looked(cluster.target))
            while not looks.done():
                await queue.write(0, bytes(4096))
            gateway, target = await looks
            await queue.close()
        await client.volumes.detach(volume.name)
        await client.volumes.delete(volume.name)
    volume_id = volume.name.removeprefix("volumes/")
    for record, role in ((gateway, "gateway"), (target, "target")):
        (row,) = (row for row in record["volumes"] if row["volume"] == volume_id)
        assert row["role"] == role
        assert row["writes_per_second"] > 0
        # A write is counted when it comes and its sectors when they are sealed or stored, so the
        # figures of a running volume may differ by some writes at either end of the interval.
        assert row["written_bytes_per_second"] == pytest.approx(
            4096 * row["writes_per_second"], rel=0.2, abs=4 * 4096 / record["seconds"]
        )
        (write,) = (each for each in record["operations"] if each["operation"] == "write")
        assert 0 < write["p50_seconds"] <= write["p99_seconds"]
        assert 0 < row["write_seconds"] < 1
        assert record["health"] == []
    both = ("--also", cluster.target.socket, "--once", "--interval", "0.1")
    shown = sealanectl("--socket", cluster.gateway.socket, "top", *both, "-o", "json")
    names = [record["node"] for record in json.loads(shown.stdout)]
    assert names == [gateway["node"], target["node"]]
    text = sealanectl("--socket", cluster.gateway.socket, "top", *both)
    for name in names:
        assert f"\n{name}" in text.stdout
    text = sealanectl("--socket", cluster.gateway.socket, "top", "--once", "--interval", "0.1")
    assert "nothing wrong seen" in text.stdout
    assert "\x1b" not in text.stdout


async def test_a_report_has_configuration_volumes_events_and_plots(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    async with connect(cluster.gateway.socket) as client:
        created = await client.volumes.create(size_bytes=MIB, display_name="<b>bold</b>")
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        assert volume.attachment is not None
        async with _host(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            config = cluster.site.root / "g.toml"
            arguments = ("report", file, "--config", config, "--seconds", "2", "--interval", "0.5")
            arguments += ("--also", cluster.target.socket)
            made = asyncio.gather(
                asyncio.to_thread(sealanectl, "--socket", cluster.gateway.socket, *arguments)
            )
            while not made.done():
                await queue.write(0, bytes(4096))
            await queue.close()
            (ended,) = await made
        await client.volumes.detach(volume.name)
        await client.volumes.delete(volume.name)
    assert ended.returncode == 0, ended.stderr
    text = file.read_text()
    assert volume.attachment.dhchap_secret not in text
    assert "target_address" in text
    for running in (cluster.gateway, cluster.target):
        status = sealanectl("--socket", running.socket, "status", "-o", "json")
        assert f"<h2>Daemon {json.loads(status.stdout)['node']}</h2>" in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert "<b>bold" not in text
    assert "Nothing wrong seen." in text
    for plot in ("Operations", "p99 latency", "Written", "Processor", "Memory"):
        assert f"<figcaption>{plot}, " in text
    again = sealanectl("--socket", cluster.gateway.socket, "report", file)
    assert again.returncode == 2
    assert "report.exists" in again.stderr
