"""Sessions over the lab's links: several paths, fitting units, links that narrow or fail.

The fabrics run in this process and call each other over loopback; their sessions use sockets of
hosts in namespaces.
"""

import asyncio
import contextlib
import functools
import itertools
import random
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fabrics import Fabric, fabric, settings
from labs import RunningLab, needs_root, running, wan
from patience import PATIENCE_SECONDS
from sealane._native import SessionEndpoint
from sealane.client.session import Session
from sealane.daemon.fabric import service, units
from sealane.errors import SessionError
from sealane.lab import kernel
from session_pairs import connected

pytestmark = needs_root

LINKS = ("north", "south")
LINK = """
rate_bits_per_second = 200_000_000
delay_micros = 1_000
buffer_bytes = 4_000_000
"""
MTU = 9000
LENGTH = 1 << 20


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLab]:
    """Run a lab with hosts a and b and two links between them."""
    links = "".join(wan(name, link=LINK) for name in LINKS)
    topology = f"mtu = {MTU}\nlate_max = 1.0\n{links}"
    with running(tmp_path_factory.mktemp("lab"), topology) as made:
        yield made


SetLink = Callable[..., None]


@pytest.fixture
def set_link(lab: RunningLab) -> Iterator[SetLink]:
    """Change a host's end of a link; restore it when the test ends."""
    changed: dict[tuple[str, str], None] = {}

    def change(host: str, link: str, *words: str) -> None:
        changed[host, link] = None
        # Otherwise IPv6 addresses vanish with the link.
        keep = f"echo 1 > /proc/sys/net/ipv6/conf/{link}/keep_addr_on_down"
        for command in (["sh", "-c", keep], ["ip", "link", "set", link, *words]):
            subprocess.run([*lab.entering(host), *command], check=True)

    yield change
    for host, link in list(changed):
        change(host, link, "up", "mtu", str(MTU))


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread create sockets in another network namespace."""
    with Path("/proc/thread-self/ns/net").open() as own, Path(namespace).open() as other:
        kernel.enter(other.fileno(), kernel.CLONE_NEWNET)
        try:
            yield
        finally:
            kernel.enter(own.fileno(), kernel.CLONE_NEWNET)


@dataclass
class Ends:
    """A session between the hosts: the fabrics, and the jobs."""

    near: Fabric
    far: Fabric
    sender: Session
    receiver: Session

    def paths(self) -> list[list[Any]]:
        """Paths of both ends."""
        pairs = ((self.near, self.sender), (self.far, self.receiver))
        return [made.service.get(end.session.name).paths() for made, end in pairs]

    def states(self) -> list[list[str]]:
        """States of the paths, as seen by each end."""
        return [[path.state for path in end] for end in self.paths()]

    def sent(self) -> list[int]:
        """Packets sent by the sender, by path."""
        return [path.statistics["packets_sent"] for path in self.paths()[0]]

    def close_reasons(self) -> list[str]:
        """Close reasons at the fabrics; empty while the session is open."""
        pairs = ((self.near, self.sender), (self.far, self.receiver))
        return [made.service.get(end.session.name).close_reason for made, end in pairs]

    async def wait_states(self, *wanted: str) -> None:
        """Wait until both ends see the paths in these states."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.states() != [[*wanted]] * 2:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0.005)

    async def carry(self, seed: int = 0) -> None:
        """Send a message and check that it arrives intact."""
        content = random.Random(seed).randbytes(LENGTH)
        self.sender.region[:LENGTH] = content
        self.receiver.region[:LENGTH] = bytes(LENGTH)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(
                self.receiver.receive(offset=0, length=LENGTH),
                self.sender.send(offset=0, length=LENGTH),
            )
        assert self.receiver.region[:LENGTH] == content

    async def carry_until(self, done: Callable[[], bool]) -> None:
        """Send messages, each of which must arrive, until the condition holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            for seed in itertools.count():
                await self.carry(seed)
                if done():
                    return


@contextlib.asynccontextmanager
async def session_of(
    lab: RunningLab, directory: Path, monkeypatch: pytest.MonkeyPatch, ip_version: int = 4
) -> AsyncIterator[Ends]:
    """Open a session from a to b with a path over each link and no fixed unit."""
    listen = {
        host: tuple(lab.status["hosts"][host][link][ip_version == 6] for link in LINKS)
        for host in ("a", "b")
    }
    here = {address: lab.namespace(host) for host, own in listen.items() for address in own}
    across = dict(zip(here, reversed(here.values()), strict=True))
    look_up = units.route_mtu

    def host_of(address: str) -> str:
        return address.rpartition(":")[0].strip("[]")

    def bound(addresses: list[str], *arguments: Any, **options: Any) -> SessionEndpoint:
        with inside(here[host_of(addresses[0])]):
            return SessionEndpoint(addresses, *arguments, **options)

    def route_mtu(address: str) -> int:
        with inside(across[host_of(address)]):
            return look_up(address)

    monkeypatch.setattr(service, "SessionEndpoint", bound)
    monkeypatch.setattr(units, "route_mtu", route_mtu)
    async with contextlib.AsyncExitStack() as stack:
        near, far = [
            await stack.enter_async_context(
                fabric(
                    replace(settings(directory, host), listen_data=own, unit_bytes=None),
                    f"fabric-{host}",
                    control="127.0.0.1",
                )
            )
            for host, own in listen.items()
        ]
        sender, receiver = await stack.enter_async_context(connected(near, far))
        ends = Ends(near, far, sender, receiver)
        await ends.wait_states("validated", "validated")
        yield ends


Connect = Callable[..., contextlib.AbstractAsyncContextManager[Ends]]


@pytest.fixture
def connect(lab: RunningLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    return functools.partial(session_of, lab, tmp_path, monkeypatch)


@pytest.mark.parametrize("ip_version", [4, 6])
@pytest.mark.parametrize("mtu", [1500, 9000])
async def test_two_links_carry_a_message_in_the_largest_units_that_fit_them(
    lab: RunningLab,
    set_link: SetLink,
    connect: Connect,
    mtu: int,
    ip_version: int,
) -> None:
    for host in ("a", "b"):
        for link in LINKS:
            set_link(host, link, "mtu", str(mtu))
    async with connect(ip_version) as ends:
        fitting = units.unit_bytes_for(mtu, ip_version)
        assert [end.session.unit_bytes for end in (ends.sender, ends.receiver)] == [fitting] * 2
        before = [lab.path(link)["delivered_bytes"] for link in LINKS]

        def carried() -> list[int]:
            after = [lab.path(link)["delivered_bytes"] for link in LINKS]
            return [late - early for early, late in zip(before, after, strict=True)]

        # On a slow host, a path may be skipped for a while: then send another message.
        await ends.carry_until(lambda: min(carried()) > LENGTH / 8)

        assert sum(carried()) > LENGTH
        received = [path.statistics["packets_received"] for path in ends.paths()[1]]
        assert min(*ends.sent(), *received) > LENGTH / fitting / 16


async def test_a_link_that_narrows_is_given_up_and_the_other_carries_on(
    set_link: SetLink, connect: Connect
) -> None:
    async with connect() as ends:
        await ends.carry()

        set_link("b", "north", "mtu", "1500")
        await ends.carry_until(lambda: ends.states()[0] == ["abandoned", "validated"])

        before = ends.sent()
        await ends.carry()
        narrow, wide = (late - early for early, late in zip(before, ends.sent(), strict=True))
        assert (narrow, wide > LENGTH // ends.sender.session.unit_bytes) == (0, True)
        assert ends.close_reasons() == ["", ""]


async def test_a_session_whose_links_have_all_narrowed_ends_with_the_reason(
    set_link: SetLink, connect: Connect
) -> None:
    async with connect() as ends:
        await ends.carry()

        for link in LINKS:
            set_link("b", link, "mtu", "1500")
        with pytest.raises(SessionError, match="ended before"):
            await ends.carry()

        async with asyncio.timeout(PATIENCE_SECONDS):
            for made, end in ((ends.near, ends.sender), (ends.far, ends.receiver)):
                await made.service.get(end.session.name).wait_closed()
        wanted = ["session.closed.path_mtu", "session.peer_closed.path_mtu"]
        assert ends.close_reasons() == wanted
        assert [end.ring.close_reason() for end in (ends.sender, ends.receiver)] == wanted


async def test_a_link_that_returns_is_used_again(
    lab: RunningLab, set_link: SetLink, connect: Connect
) -> None:
    async with connect() as ends:
        await ends.carry()

        set_link("b", "north", "down")
        await ends.carry_until(lambda: ends.states()[0] == ["silent", "validated"])
        during = ends.sent()
        assert ends.sender.statistics()["path_silences"] >= 1
        set_link("b", "north", "up")
        await ends.wait_states("validated", "validated")

        # Probes of its return are few; now it carries its share of messages.
        share = LENGTH // ends.sender.session.unit_bytes // 8
        asked = lab.path("north")["delivered_packets"]
        await ends.carry_until(lambda: lab.path("north")["delivered_packets"] - asked > share)
        assert ends.sent()[0] - during[0] > share
        assert ends.close_reasons() == ["", ""]
