"""Restarts under a service manager that holds listeners: no host is refused."""

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import Site, daemon, short_directory
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own
from sealane.errors import Error
from sealane.protocol.nvme.constants import DISCOVERY_NQN
from sealane.transport.nvme.initiator import HostController
from service_manager import ServiceManager

pytestmark = pytest.mark.slow

HOST = "nqn.2026-11.dev.sealane:host"
NQN = "nqn.2026-11.dev.sealane:plain"
KEYS = {"metrics.listen", "target.listen", "target.discovery_listen"}
HOSTS = 8
UNIT = Path(__file__).parents[2] / "systemd" / "sealaned.service"


@pytest.fixture
def site() -> Iterator[Site]:
    with short_directory() as root:
        made = Site(root)
        made.write_policy({"s": ["target"]})
        with daemon(made.broker_config()) as broker:
            (root / "enrolment").write_text(made.enrolment("s", broker))
            yield made


@pytest.fixture
def manager(site: Site) -> Iterator[ServiceManager]:
    made = ServiceManager(site.root)
    yield made
    made.close()


def write(site: Site, target: str, discovery: str, metrics: str | None) -> Path:
    section = "" if metrics is None else f'[metrics]\nlisten = "{metrics}"\n'
    return site.write_config(
        "s",
        f"{(site.root / 'enrolment').read_text()}{section}[target]\n"
        f'listen = "{target}"\ndiscovery_listen = "{discovery}"\ncontrol_listen = "127.0.0.1:0"\n'
        'store = "memory"\n'
        f'[[target.subsystems]]\nnqn = "{NQN}"\nhosts = [{{nqn = "{HOST}"}}]\n'
        '[[target.subsystems.namespaces]]\nnsid = 1\nstore = "memory"\nsize_bytes = 1048576\n',
    )


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


class Hosts:
    """Hosts that connect over and over: how their connections ended, and the longest, seconds."""

    def __init__(self, address: str, nqn: str = NQN) -> None:
        self._address = address
        self._nqn = nqn
        self.ended: Counter[str] = Counter()
        self.longest = 0.0
        self._is_over = False

    async def _connect(self) -> None:
        traddr, _, trsvcid = self._address.rpartition(":")
        began = time.monotonic()
        try:
            async with HostController(
                traddr=traddr, trsvcid=int(trsvcid), subsystem_nqn=self._nqn, host_nqn=HOST
            ):
                self.ended["served"] += 1
        except Error as error:
            self.ended[str(error)] += 1
        self.longest = max(self.longest, time.monotonic() - began)

    async def _repeat(self) -> None:
        while not self._is_over:
            await self._connect()
            await asyncio.sleep(0.01)

    async def _all(self) -> None:
        await asyncio.gather(*(self._repeat() for _ in range(HOSTS)))

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Connect until the end of the block, in a thread of their own."""
        thread = threading.Thread(target=lambda: asyncio.run(self._all()))
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            thread.join()

    @property
    def refused(self) -> dict[str, int]:
        """Connections that the kernel refused."""
        return {how: count for how, count in self.ended.items() if "refused" in how}

    def wait_served(self, count: int) -> None:
        """Wait until `count` more connections were served."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        aim = self.ended["served"] + count
        while self.ended["served"] < aim:
            assert time.monotonic() < deadline, self.ended
            time.sleep(0.01)


@pytest.mark.parametrize("kills", [False, True])
def test_hosts_that_connect_during_a_restart_wait(
    site: Site, manager: ServiceManager, kills: bool
) -> None:
    target, discovery, metrics = addresses_of_our_own(3)
    config = write(site, target, discovery, metrics)
    every = (Hosts(target), Hosts(discovery, DISCOVERY_NQN))
    with contextlib.ExitStack() as hosts, contextlib.ExitStack() as stack:
        with manager.running(config) as first:
            for each in every:
                hosts.enter_context(each.connecting())
                each.wait_served(HOSTS)
            before = manager.stored()
            assert {name for name, _ in before} == KEYS
            assert first.addresses["target"] == target
            if kills:
                first.kill()
        # Nothing serves now.
        with socket.create_connection(address_of(metrics)) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            stack.enter_context(manager.running(config))
            assert scraper.recv(15) == b"HTTP/1.0 200 OK"
        for each in every:
            each.wait_served(2 * HOSTS)
        assert manager.stored() == before
        hosts.close()
    for each in every:
        print(dict(each.ended), f"longest {each.longest:.2f} s")
        assert not each.refused
        # None was told that a subsystem doesn't exist which was not read yet.
        assert not [how for how in each.ended if "nvme.status" in how]


def test_without_a_store_they_are_refused(site: Site) -> None:
    target, discovery, metrics = addresses_of_our_own(3)
    config = write(site, target, discovery, metrics)
    hosts = Hosts(target)
    with contextlib.ExitStack() as stack:
        with daemon(config):
            stack.enter_context(hosts.connecting())
            hosts.wait_served(HOSTS)
        with daemon(config):
            hosts.wait_served(2 * HOSTS)
        stack.close()
    print(dict(hosts.ended), f"longest {hosts.longest:.2f} s")
    assert hosts.refused


def test_a_changed_configuration_keeps_no_old_listener(site: Site, manager: ServiceManager) -> None:
    target, discovery, metrics, later = addresses_of_our_own(4)
    with manager.running(write(site, target, discovery, metrics)):
        assert {*manager.names} == KEYS
    everywhere = f"0.0.0.0:{discovery.rpartition(':')[2]}"
    with manager.running(write(site, later, everywhere, None)) as changed:
        assert sorted(manager.names) == sorted(KEYS - {"metrics.listen"})
        for old in (target, metrics):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address_of(old))
        with socket.create_connection(address_of(discovery)):
            pass
        events = [line["event"] for line in changed.log_lines()]
        assert events.count("listener_refused") == 3


def test_addresses_change_places(site: Site, manager: ServiceManager) -> None:
    target, discovery, metrics = addresses_of_our_own(3)
    with manager.running(write(site, target, discovery, metrics)):
        assert {*manager.names} == KEYS
    with manager.running(write(site, discovery, target, metrics)) as changed:
        assert (changed.addresses["target"], changed.addresses["discovery"]) == (discovery, target)
        assert {*manager.names} == KEYS
        refused = [e for e in changed.log_lines() if e["event"] == "listener_refused"]
        assert {str(line["address"]) for line in refused} == {target, discovery}
    # One takes the address of another that is no longer configured.
    with manager.running(write(site, metrics, target, None)) as changed:
        assert changed.addresses["target"] == metrics
        assert sorted(manager.names) == sorted(KEYS - {"metrics.listen"})


def test_a_socket_unit_with_another_keys_name_does_not_keep_the_daemon_from_its_address(
    site: Site, manager: ServiceManager
) -> None:
    target, discovery, metrics = addresses_of_our_own(3)
    with socket.create_server(address_of(target)) as unit:
        manager.add("gateway.listen", os.dup(unit.fileno()))
        with manager.running(write(site, target, discovery, metrics)) as started:
            assert started.addresses["target"] == target
            (line,) = [each for each in started.log_lines() if each["event"] == "listener_refused"]
            assert (line["name"], line["address"]) == ("gateway.listen", target)


def test_a_passed_listener_of_another_port_does_not_keep_the_daemon_from_its_own(
    site: Site, manager: ServiceManager
) -> None:
    target, discovery, metrics, other = addresses_of_our_own(4)
    with socket.create_server(address_of(other)) as wrong:
        manager.add("target.listen", os.dup(wrong.fileno()))
    with manager.running(write(site, target, discovery, metrics)) as started:
        assert started.addresses["target"] == target
        (line,) = [each for each in started.log_lines() if each["event"] == "listener_refused"]
        assert line["reason"] == "listen.passed"
        assert f"bound to {other}; allowed: a listener at {target}" in str(line["message"])


def test_the_unit_stores_as_many_as_there_are() -> None:
    (most,) = re.findall(r"^FileDescriptorStoreMax=(\d+)$", UNIT.read_text(), re.MULTILINE)
    roles = (UNIT.parents[1] / "daemon").rglob("*.py")
    keys = {key for path in roles for key in re.findall(r'\.named\("(.*?)"\)', path.read_text())}
    assert keys == KEYS | {"gateway.listen"}
    assert len(keys) <= int(most)
