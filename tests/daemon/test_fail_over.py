"""Fail-over with real daemons: a gateway freezes, another one of its group takes over."""

import asyncio
import contextlib
import json
import secrets
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import pytest

from attached_hosts import host_at
from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own
from sealane.client import Client, Volume, connect
from sealane.daemon.target.fail_over import TAKE_OVER_SECONDS_MIN
from sealane.errors import Error
from sealane.protocol.nvme.constants import AnaState
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.transport.nvme.initiator import HostController, VolumeQueue
from stopped import frozen

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-666666666666"
MIB = 1 << 20
SECTOR = 4096
WRITES = 16
"""Sectors that the host writes at a time."""
CLIENT_SECONDS = 11.5
"""How long a client's write may take when its gateway freezes: 7.5 s until its keep-alive is
unanswered, then the other path and its take-over."""
TAKE_OVER_SECONDS = 3.0
"""How long a write over the standby may take, take-over included (docs/operate/fail-over.md)."""


@dataclass
class Cluster:
    target: Daemon
    first: Daemon
    second: Daemon
    start_target: Callable[[], Daemon]
    audit_log: FilePath


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"], "h": ["gateway"]})
        broker = stack.enter_context(daemon(site.broker_config()))
        data, control = addresses_of_our_own(2)
        config = site.write_config(
            "s",
            site.enrolment("s", broker)
            + '[metrics]\nlisten = "127.0.0.1:0"\n'
            + f'[target]\nlisten = "{data}"\ncontrol_listen = "{control}"\n'
            + 'store = "file"\n',
        )
        target = stack.enter_context(daemon(config))
        gateways = [
            stack.enter_context(
                daemon(
                    site.write_config(
                        name,
                        site.enrolment(name, broker)
                        + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                        + f'target_address = "{target.addresses["target_control"]}"\n',
                    )
                )
            )
            for name in ("g", "h")
        ]
        yield Cluster(
            target,
            *gateways,
            lambda: stack.enter_context(daemon(config)),
            root / "broker" / "audit.jsonl",
        )


def host_of(volume: Volume) -> HostController:
    return host_at(volume, HOST)


async def state_at(client: Client, volume: Volume) -> str:
    at = (await client.volumes.get(volume.name)).attachment
    return "" if at is None else at.fail_over


async def until_state(client: Client, volume: Volume, state: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await state_at(client, volume) != state:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)


def figure(at: Daemon, name: str) -> float:
    with urllib.request.urlopen(f"http://{at.addresses['metrics']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@dataclass
class Pair:
    """A volume at two gateways, and its host's clients."""

    first: Client
    second: Client
    on_first: Volume
    on_second: Volume


@pytest.fixture
async def pair(cluster: Cluster) -> AsyncIterator[Pair]:
    async with connect(cluster.first.socket) as first, connect(cluster.second.socket) as second:
        volume = await first.volumes.create(size_bytes=MIB)
        pair = Pair(
            first,
            second,
            *[
                await client.volumes.attach(volume.name, host_nqn=HOST, fail_over=True)
                for client in (first, second)
            ],
        )
        yield pair
        for client in (first, second):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    with contextlib.suppress(Error):
                        await client.volumes.detach(volume.name)
                        break
                    await asyncio.sleep(0.1)


@dataclass
class Path:
    """A host's path to a volume, which connects again when it is lost."""

    volume: Volume
    host: HostController | None = None
    queue: VolumeQueue | None = None

    async def connected(self) -> VolumeQueue:
        if self.queue is None:
            self.host = host_of(self.volume)
            await self.host.connect()
            self.queue = await self.host.open_queue(1)
        return self.queue

    async def close(self) -> None:
        host, self.host, self.queue = self.host, None, None
        if host is not None:
            with contextlib.suppress(Error, OSError):
                await host.close()

    async def again(self, transfer: Callable[[VolumeQueue], Awaitable[None]]) -> None:
        """Repeat a transfer until it has succeeded, on a new connection after each loss."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    return await transfer(await self.connected())
                except (Error, OSError):
                    await self.close()
                await asyncio.sleep(0.05)

    async def write(self, version: bytes) -> None:
        await self.again(partial(write_all, version=version))

    async def check(self, version: bytes) -> None:
        await self.again(partial(check_all, version=version))

    async def ana(self) -> AnaState:
        await self.connected()
        assert self.host is not None
        return (await self.host.ana_states())[1]


async def write_all(queue: VolumeQueue, version: bytes) -> None:
    await asyncio.gather(*[queue.write(lba, version * (SECTOR // 16)) for lba in range(WRITES)])


async def check_all(queue: VolumeQueue, version: bytes) -> None:
    for lba in range(WRITES):
        found = bytearray(SECTOR)
        await queue.read(lba, found)
        assert found == version * (SECTOR // 16), f"sector {lba} is not the one written last"


async def states(pair: Pair) -> list[str]:
    return [await state_at(client, pair.on_first) for client in (pair.first, pair.second)]


async def test_a_frozen_gateways_late_writes_undo_nothing(cluster: Cluster, pair: Pair) -> None:
    versions = [secrets.token_bytes(16) for _ in range(4)]
    assert await states(pair) == ["standby", "standby"]
    first, second = Path(pair.on_first), Path(pair.on_second)
    # Nobody serves the host, so the gateway does to which it connects first.
    queue = await first.connected()
    await write_all(queue, versions[0])
    assert (await first.ana(), await second.ana()) == (
        AnaState.OPTIMIZED,
        AnaState.NON_OPTIMIZED,
    )
    assert await states(pair) == ["active", "standby"]
    listed = sealanectl("--socket", cluster.second.socket, "volume", "list", "-o", "table")
    assert "attached, standby" in listed.stdout, listed.stdout + listed.stderr
    with frozen(cluster.first.process.pid):
        # In the frozen gateway's socket: it will carry them out when it is let go on.
        late = asyncio.ensure_future(write_all(queue, versions[1]))
        await asyncio.sleep(0.5)
        assert not late.done()
        began = time.monotonic()
        await second.write(versions[1])
        took = time.monotonic() - began
        await second.write(versions[2])
    assert took < TAKE_OVER_SECONDS
    await until_state(pair.first, pair.on_first, "standby")
    with pytest.raises((Error, OSError)):
        await asyncio.wait_for(late, PATIENCE_SECONDS)
    await asyncio.sleep(0.5)
    await second.check(versions[2])
    assert await second.ana() == AnaState.OPTIMIZED
    await first.close()
    assert [r["detail"]["cause"] for r in await recorded_take_overs(cluster, pair.on_first)] == [
        "host"
    ]
    # It stands by, and takes over in its turn.
    await asyncio.sleep(TAKE_OVER_SECONDS_MIN)
    assert await first.ana() == AnaState.NON_OPTIMIZED
    await first.check(versions[2])
    await first.write(versions[3])
    await until_state(pair.second, pair.on_second, "standby")
    await first.check(versions[3])
    assert figure(cluster.target, "sealane_target_volume_take_overs") == 3
    assert figure(cluster.target, "sealane_target_volume_standby_refusals") >= 1
    for path in (first, second):
        await path.close()
    fenced = [
        line
        for line in cluster.first.log_lines()
        if line.get("event") == "fenced"
        and line["volume_id"] == pair.on_first.name.removeprefix("volumes/")
    ]
    assert len(fenced) == 1


async def recorded_take_overs(cluster: Cluster, volume: Volume) -> list[dict[str, Any]]:
    """Return the records of the volume's take-overs once the broker has any."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            records = [json.loads(line) for line in cluster.audit_log.read_text().splitlines()]
            found = [
                record
                for record in records
                if record["kind"] == "device.take_over"
                and f"volumes/{record['detail']['volume_id']}" == volume.name
            ]
            if found:
                return found
            await asyncio.sleep(0.1)


async def test_a_clients_disk_goes_on_over_the_other_gateway(cluster: Cluster, pair: Pair) -> None:
    versions = [secrets.token_bytes(16) * (SECTOR // 16) for _ in range(4)]
    took = 0.0
    async with pair.first.open(pair.on_first, standbys=[pair.on_second]) as disk:
        await disk.write(0, versions[0])
        serving = cluster.first if await states(pair) == ["active", "standby"] else cluster.second
        with frozen(serving.process.pid):
            # The frozen gateway has received it, and carries it out if nothing fences it.
            began = time.monotonic()
            await disk.write(0, versions[1])
            took = time.monotonic() - began
            await disk.write(0, versions[2])
        await asyncio.sleep(1)
        assert await disk.read(0, SECTOR) == versions[2]
        # Another fence is allowed then.
        await asyncio.sleep(TAKE_OVER_SECONDS_MIN)
        now = cluster.second if serving is cluster.first else cluster.first
        with frozen(now.process.pid):
            await disk.write(0, versions[3])
        assert await disk.read(0, SECTOR) == versions[3]
    assert took < CLIENT_SECONDS


async def test_after_a_restart_of_the_target_a_standby_waits_for_the_journal(
    cluster: Cluster, pair: Pair
) -> None:
    versions = [secrets.token_bytes(16) for _ in range(3)]
    first, second = Path(pair.on_first), Path(pair.on_second)
    await first.write(versions[0])
    with frozen(cluster.first.process.pid):
        # Acknowledged, not flushed: only the frozen gateway's journal has it then.
        await asyncio.to_thread(cluster.target.kill)
        cluster.target = await asyncio.to_thread(cluster.start_target)
        refused = await asyncio.to_thread(
            sealanectl, "--socket", cluster.second.socket, "volume", "takeover", "--yes",
            pair.on_first.name,
        )  # fmt: skip
        assert "queue.take_over.unflushed" in refused.stderr, refused.stderr
    await first.write(versions[1])
    await first.again(VolumeQueue.flush)
    # It has sent its journal again and says so; from then on it may be taken over from.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            taken = await asyncio.to_thread(
                sealanectl, "--socket", cluster.second.socket, "volume", "takeover", "--yes",
                pair.on_first.name,
            )  # fmt: skip
            if not taken.returncode:
                break
            await asyncio.sleep(0.2)
    await second.check(versions[1])
    await second.write(versions[2])
    for path in (first, second):
        await path.close()


async def test_a_gateway_that_its_host_had_left_stands_by_when_the_host_is_back(
    pair: Pair,
) -> None:
    versions = [secrets.token_bytes(16) for _ in range(2)]
    first, second = Path(pair.on_first), Path(pair.on_second)
    await first.write(versions[0])
    await first.close()
    await second.write(versions[1])
    found: AnaState | None = None
    async with asyncio.timeout(PATIENCE_SECONDS):
        while found != AnaState.NON_OPTIMIZED:
            try:
                found = await first.ana()
            except (Error, OSError):
                await first.close()
                await asyncio.sleep(0.1)
    assert await states(pair) == ["standby", "active"]
    await second.check(versions[1])
    for path in (first, second):
        await path.close()


async def test_an_operator_takes_over_without_a_host(cluster: Cluster, pair: Pair) -> None:
    name = pair.on_first.name
    for at in (cluster.first, cluster.second):
        taken = sealanectl("--socket", at.socket, "volume", "takeover", name, "--yes", "-o", "json")
        assert taken.returncode == 0 or "queue.take_over.early" in taken.stderr, taken.stderr
        if taken.returncode:
            await asyncio.sleep(TAKE_OVER_SECONDS_MIN)
            taken = sealanectl(
                "--socket", at.socket, "volume", "takeover", name, "--yes", "-o", "json"
            )
        assert json.loads(taken.stdout)["attachment"]["fail_over"] == "active"
    records = await recorded_take_overs(cluster, pair.on_first)
    assert [(r["detail"]["cause"], r["detail"]["accepts_loss"]) for r in records] == [
        ("operator", False)
    ]
    assert records[0]["subject"] == "spiffe://sealane/target/s"
    ends = (records[0]["detail"]["fenced"], records[0]["detail"]["gateway"])
    assert ends == (gateway_nqn("g"), gateway_nqn("h"))


async def test_a_target_that_stops_reports_its_last_take_over_before(
    cluster: Cluster, pair: Pair
) -> None:
    for client in (pair.first, pair.second):
        await client.volumes.take_over(pair.on_first.name)
    await asyncio.to_thread(cluster.target.stop)
    try:
        (record,) = await recorded_take_overs(cluster, pair.on_first)
    finally:
        cluster.target = await asyncio.to_thread(cluster.start_target)
    assert record["detail"]["fenced"] == gateway_nqn("g")
