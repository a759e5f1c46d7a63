"""Replacement of the record key with real daemons on etcd: a broker is killed, a host goes on."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from control_plane import Daemon, Site, daemon, sealanectl, sealaned, short_directory
from etcd_server import Cluster, etcd_cluster
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.records import ClockRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.etcd import EtcdStore
from trust.test_record_rolled_back import EXIT_NOT_VERIFIED, NODE, Adversary
from trust.test_revocation import HOST, MIB, Load

pytestmark = pytest.mark.slow

BROKERS = ("broker", "broker2")
# So many that a broker can be killed while it makes their MACs again.
RECORDS = 2000
RECORDS_OF_A_COMMIT = 50


@dataclass
class World:
    """Two brokers on one etcd, a target and a gateway that know both, and who holds the etcd."""

    site: Site
    etcd: Cluster
    adversary: Adversary
    stack: contextlib.AsyncExitStack
    configs: dict[str, Path]
    brokers: dict[str, Daemon]

    def start(self, name: str) -> None:
        self.brokers[name] = self.stack.enter_context(daemon(self.configs[name]))

    def status(self, name: str) -> dict[str, Any]:
        ended = sealanectl(*_at(self.brokers[name]), "--output", "json", "key", "status")
        assert ended.returncode == 0, ended.stderr
        shown: dict[str, Any] = json.loads(ended.stdout)
        return shown

    def gateway(self) -> Daemon:
        first, second = self.brokers.values()
        enrolled = {
            node: self.site.enrolment(node, first, others={BROKERS[1]: second}) for node in "sg"
        }
        listens = 'listen = "127.0.0.1:0"\n'
        target = self.stack.enter_context(
            daemon(
                self.site.write_config(
                    "s",
                    f"{enrolled['s']}[target]\n{listens}control_listen = "
                    '"127.0.0.1:0"\nstore = "memory"\n',
                )
            )
        )
        return self.stack.enter_context(
            daemon(
                self.site.write_config(
                    "g",
                    f'{enrolled["g"]}[gateway]\n{listens}target_node = "s"\n'
                    f'target_address = "{target.addresses["target_control"]}"\n',
                )
            )
        )

    async def fill(self) -> None:
        """Commit records as one more broker of this store would."""
        store = await EtcdStore.open(self.etcd.endpoints, writer="test", credentials=None)
        registry = await Registry.open(store, WrappingKey(bytes(range(32))), node="broker3")
        record = ClockRecord(reset_count=0, restart_count=0, millis=0)
        for first in range(0, RECORDS, RECORDS_OF_A_COMMIT):
            puts: dict[str, bytes] = {}
            for number in range(first, first + RECORDS_OF_A_COMMIT):
                puts |= registry.clocks.sealed(_name(number), record)
            assert await registry.commit(puts=puts) is not None
        await registry.close()


def _name(number: int) -> str:
    return f"m{number:05}"


def _clock(number: int) -> bytes:
    return f"/sealane/data/clocks/{_name(number)}".encode()


def _at(broker: Daemon) -> tuple[str, ...]:
    return ("--socket", broker.socket)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    with short_directory() as root:
        async with contextlib.AsyncExitStack() as stack:
            etcd = stack.enter_context(etcd_cluster())
            adversary = Adversary(etcd)
            stack.callback(adversary.close)
            site = Site(root)
            site.write_policy({"s": ["target"], "g": ["gateway"]})
            configs = {
                name: site.broker_config(name, instance=i, etcd=etcd.endpoints)
                for i, name in enumerate(BROKERS, 1)
            }
            made = World(site, etcd, adversary, stack, configs, {})
            for name in BROKERS:
                await asyncio.to_thread(made.start, name)
            yield made


def killed_halfway(world: World, first: bytes, last: bytes, *arguments: str) -> None:
    """Call `key` at the first broker, and kill that when it has changed `first`, but not `last`."""
    before = {key: world.adversary.get(key) for key in (first, last)}
    broker = world.brokers["broker"]
    with subprocess.Popen(
        [*(sys.executable, "-m", "sealane.cli.ctl", *_at(broker)), "key", *arguments, "--wait"],
        stderr=subprocess.PIPE,
    ) as asking:
        end = time.monotonic() + PATIENCE_SECONDS
        while world.adversary.get(first) == before[first]:
            assert time.monotonic() < end
        broker.kill()
        assert world.adversary.get(last) == before[last], "killed after the end"
        assert asking.wait(PATIENCE_SECONDS) != 0


def _ended(world: World, name: str) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE_SECONDS
    while (shown := world.status(name))["is_record_key_rotating"] and time.monotonic() < end:
        time.sleep(0.2)
    return shown


async def test_record_key_is_replaced_although_its_broker_is_killed_and_older_records_are_refused(
    world: World,
) -> None:
    await world.fill()
    gateway = await asyncio.to_thread(world.gateway)
    async with connect(gateway.socket) as client, asyncio.TaskGroup() as tasks:
        volume = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        load = Load()
        running = tasks.create_task(load.run(volume))
        await load.goes_on()
        older = world.adversary.get(NODE)

        records = _clock(0), _clock(RECORDS - 1)
        await asyncio.to_thread(killed_halfway, world, *records, "rotate-record-key", "--yes")
        await load.goes_on()
        # The other one goes on with it; nobody asked it to.
        shown = await asyncio.to_thread(_ended, world, "broker2")
        assert (shown["record_key_number"], shown["is_record_key_rotating"]) == (1, False)
        assert (shown["left_under_previous_record_key"], shown["record_key_failure"]) == (0, "")
        await asyncio.to_thread(world.start, "broker")
        assert world.adversary.get(NODE) != older

        ended = await asyncio.to_thread(
            sealanectl,
            *_at(world.brokers["broker2"]),
            "key",
            "rotate-record-key",
            "--wait",
            "--yes",
        )
        assert ended.returncode == 0, ended.stderr
        for name in BROKERS:
            shown = await asyncio.to_thread(world.status, name)
            assert (shown["record_key_number"], shown["is_record_key_rotating"]) == (2, False)
        another = await client.volumes.create(size_bytes=MIB)
        await client.volumes.attach(another.name, host_nqn=HOST)
        await load.goes_on()
        assert load.failure is None

        world.adversary.put(NODE, older)
        for name, broker in world.brokers.items():
            ended_with = await asyncio.to_thread(broker.process.wait, PATIENCE_SECONDS)
            assert ended_with == EXIT_NOT_VERIFIED
            broker.was_killed = True
            again = await asyncio.to_thread(sealaned, "--config", world.configs[name])
            assert again.returncode == EXIT_NOT_VERIFIED
            assert "broker.store.rolled_back" in again.stderr
        running.cancel()
