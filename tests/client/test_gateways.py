"""Disks through real gateways: broker, target and two gateways as processes on loopback."""

import ast
import asyncio
import contextlib
import dataclasses
import inspect
import io
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from control_plane import Daemon, Site, daemon, short_directory
from plain_target import write_and_check
from sealane.client import connect, sync
from sealane.errors import UsageError

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
MIB = 1 << 20


@dataclass
class Cluster:
    """The daemons."""

    site: Site
    gateways: list[Daemon]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"], "h": ["gateway"]})
        broker = stack.enter_context(daemon(site.broker_config()))

        def started(name: str, text: str) -> Daemon:
            config = site.write_config(name, site.enrolment(name, broker) + text)
            return stack.enter_context(daemon(config))

        listen = 'listen = "127.0.0.1:0"\n'
        store = 'store = "memory"\n'
        target = started("s", f"[target]\n{listen}control_{listen}{store}")
        address = f'target_node = "s"\ntarget_address = "{target.addresses["target_control"]}"\n'
        gateways = [started(name, f"[gateway]\n{listen}{address}") for name in ("g", "h")]
        yield Cluster(site, gateways)


async def test_random_calls_on_a_sealed_volume_do_what_they_do_to_a_bytearray(
    cluster: Cluster,
) -> None:
    chance = random.Random(7)
    reference = bytearray(MIB)
    async with connect(cluster.gateways[0].socket) as client:
        created = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        async with client.open(volume) as disk:
            assert disk.size == MIB
            for _ in range(60):
                length = chance.choice([1, 7, 4095, 4096, 12_288, 100_001])
                offset = chance.randrange(MIB - length + 1)
                match chance.randrange(4):
                    case 0 | 1:
                        content = chance.randbytes(length)
                        await disk.write(offset, content)
                        reference[offset : offset + length] = content
                    case 2:
                        await disk.write_zeroes(offset, length)
                        reference[offset : offset + length] = bytes(length)
                    case _:
                        back = await disk.read(offset, length)
                        assert back == reference[offset : offset + length]
            await disk.flush()
            assert await disk.read(0, MIB) == reference
        await client.volumes.detach(volume.name)
        with pytest.raises(UsageError):
            client.open(dataclasses.replace(volume, attachment=None))


async def test_two_clients_that_write_different_bytes_of_one_sector_lose_nothing(
    cluster: Cluster,
) -> None:
    rounds, share = 30, 100
    async with connect(cluster.gateways[0].socket) as client:
        created = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        async with client.open(volume) as one, client.open(volume) as other:

            async def write(index: int) -> None:
                await write_and_check(
                    (one, other)[index % 2], 5000 + index * share, share, rounds=rounds
                )

            async with asyncio.TaskGroup() as tasks:
                for index in range(4):
                    tasks.create_task(write(index))
            assert await one.read(5000, 4 * share) == bytes([rounds]) * (4 * share)
        await client.volumes.detach(volume.name)


def test_a_file_outlives_its_attachment(cluster: Cluster) -> None:
    with sync.connect(cluster.gateways[0].socket) as client:
        assert client.status().node == "g"
        created = client.volumes.create(size_bytes=MIB, display_name="file")
        assert created.name in [volume.name for volume in client.volumes.list()]
        content = random.Random(8).randbytes(200_000)
        volume = client.volumes.attach(created.name, host_nqn=HOST)
        with client.open(volume) as disk, io.BufferedRandom(disk.file()) as file:
            file.seek(12_345)
            file.write(content)
        client.volumes.detach(created.name)
    with sync.connect(cluster.gateways[1].socket) as client:
        with client.open(client.volumes.attach(created.name, host_nqn=HOST)) as disk:
            assert disk.read(12_345, len(content)) == content
        assert client.volumes.detach(created.name).state == "available"
        client.volumes.delete(created.name)
        with pytest.raises(UsageError):
            client.volumes.get(created.name)


def test_threads_can_watch_share_and_resize(cluster: Cluster) -> None:
    with sync.connect(cluster.gateways[0].socket) as client:
        created = client.volumes.create(size_bytes=MIB)
        with client.volumes.watch(created.name) as events:
            client.volumes.attach(created.name, host_nqn=HOST)
            assert next(events).kind == "attached"
        assert client.volumes.resize(created.name, size_bytes=2 * MIB).size_bytes == 2 * MIB
        client.volumes.detach(created.name)
        with pytest.raises(UsageError), client.volumes.watch("volumes/none"):
            pass
        client.volumes.delete(created.name)


async def test_two_gateways_that_write_different_bytes_of_one_sector_lose_nothing(
    cluster: Cluster,
) -> None:
    rounds, share = 30, 100
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(g.socket)) for g in cluster.gateways]
        created = await clients[0].volumes.create(size_bytes=MIB)
        disks = []
        for client in clients:
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            disks.append(await stack.enter_async_context(client.open(volume)))

        async def write(index: int) -> None:
            await write_and_check(disks[index], 5000 + index * share, share, rounds=rounds)

        async with asyncio.TaskGroup() as tasks:
            for index in range(2):
                tasks.create_task(write(index))
        for disk in disks:
            assert await disk.read(5000, 2 * share) == bytes([rounds]) * (2 * share)


async def test_examples_of_the_documentation_run(cluster: Cluster) -> None:
    page = (Path(__file__).parents[2] / "docs" / "start" / "client.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        code = compile(example, "client.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        first, second = cluster.gateways
        names = {"socket": first.socket, "other_socket": second.socket}
        is_asynchronous = code.co_flags & inspect.CO_COROUTINE
        if is_asynchronous:
            await eval(code, names)  # noqa: S307 - our own documentation
        else:
            await asyncio.to_thread(eval, code, names)


def sealanectl(
    cluster: Cluster, *arguments: str, text: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run sealanectl against the first gateway, with bytes on its standard streams."""
    command = [sys.executable, "-m", "sealane.cli.ctl", "--socket", cluster.gateways[0].socket]
    return subprocess.run(
        [*command, *arguments], input=text, capture_output=True, timeout=60, check=False
    )


@pytest.mark.slow
async def test_the_command_line_moves_bytes_both_ways(cluster: Cluster) -> None:
    async with connect(cluster.gateways[0].socket) as client:
        name = (await client.volumes.create(size_bytes=MIB)).name

        async def run(verb: str, *options: str, text: bytes = b"") -> tuple[int, bytes, bytes]:
            arguments = ("volume", verb, name, *options)
            done = await asyncio.to_thread(sealanectl, cluster, *arguments, text=text)
            return done.returncode, done.stdout, done.stderr

        content = random.Random(9).randbytes(MIB - 5)
        assert await run("write", "--offset", "5", text=content) == (0, b"", b"")
        assert await run("read") == (0, bytes(5) + content, b"")
        assert await run("write", "--offset", "9", "--length", "2", text=b"abc") == (0, b"", b"")
        assert await run("read", "--offset", "8", "--length", "4") == (
            0,
            content[3:4] + b"ab" + content[6:7],
            b"",
        )
        for refused in (
            await run("write", "--offset", str(MIB - 2), text=b"abc"),
            await run("write", "--length", "4", text=b"abc"),
            await run("write", "--offset", str(MIB + 1), text=b"abc"),
            await run("read", "--offset", "1", "--length", str(MIB)),
            await run("read", "--offset", "-1"),
        ):
            assert (refused[0], refused[1]) == (2, b"")
            assert refused[2].count(b"\n") == 1
        assert (await client.volumes.get(name)).state == "available"
