"""Plain subsystems of a target with the real engine: data, masking, reload, secrets."""

import asyncio
import secrets
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.nvme.discovery import DISCOVERY_NQN
from sealane.daemon.nvme.exported import Exported, Provider
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.nvme.subsystem_config import SubsystemConfig
from sealane.daemon.target.subsystems import PlainSubsystems, plan
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import HostController

NQN = "nqn.2026-11.dev.sealane:plain:one"
SECOND = "nqn.2026-11.dev.sealane:plain:two"
HOST = "nqn.2026-11.dev.sealane:host"
OTHER = "nqn.2026-11.dev.sealane:other"
MIB = 1 << 20


def memory(nsid: int = 1, **more: object) -> dict[str, object]:
    return {"nsid": nsid, "store": "memory", "size_bytes": MIB, **more}


def config(*namespaces: dict[str, object], **more: object) -> SubsystemConfig:
    known = {"nqn": NQN, "hosts": [{"nqn": HOST}], "namespaces": list(namespaces)}
    return SubsystemConfig.model_validate(known | more)


class Nothing(Provider):
    """A provider without subsystems of its own."""

    def find(self, subsystem_nqn: str) -> Exported | None:
        assert subsystem_nqn
        return None


@dataclass
class World:
    listener: Listener
    plain: PlainSubsystems
    faults: list[str]

    def host(self, nqn: str = HOST, **more: object) -> HostController:
        traddr, trsvcid = self.listener.address
        return HostController(
            traddr=traddr,
            trsvcid=trsvcid,
            **({"subsystem_nqn": NQN, "host_nqn": nqn} | more),  # type: ignore[arg-type]
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    listener = Listener(Nothing(), traddr="127.0.0.1", trsvcid=0, offers_digests=True)
    faults: list[str] = []
    listener.observe(faults.append)
    await listener.start()
    plain = PlainSubsystems(listener)
    try:
        yield World(listener, plain, faults)
    finally:
        await plain.close()
        await listener.stop()


async def test_blocks_come_back_and_are_counted(world: World) -> None:
    await world.plain.apply([config(memory())])
    written = secrets.token_bytes(64 * 1024)
    async with world.host() as host:
        queue = await host.open_queue(1)
        await queue.write(4, written)
        await queue.flush()
        back = bytearray(len(written))
        await queue.read(4, back)
        assert back == written
        health = await host.log_page(0x02, 512)
        await queue.close()
    figures = struct.unpack_from("<4Q", health, 32)
    assert figures[0] == figures[2] == 1  # 128 sectors round up to one unit of 1000
    assert int.from_bytes(health[64:80], "little") >= 1
    assert int.from_bytes(health[80:96], "little") >= 1
    (statistics,) = world.plain.statistics().values()
    assert statistics["sectors_stored"] == 16


async def test_failed_commands_are_in_the_error_log(world: World) -> None:
    await world.plain.apply([config(memory())])
    async with world.host() as host:
        queue = await host.open_queue(1)
        with pytest.raises(NvmeStatusError) as refused:
            await queue.write(MIB // 4096, bytes(4096))
        assert refused.value.status == 0x080
        page = await host.log_page(0x01, 64)
        _, queue_id, _, status, _, lba, nsid = struct.unpack_from("<QHHHHQI", page)
        assert (queue_id, status >> 1 & 0x7FF, lba, nsid) == (1, 0x080, MIB // 4096, 1)
        await queue.close()


async def test_file_stores_survive_a_removal(world: World, tmp_path: Path) -> None:
    stored = config(memory(store="file", path=str(tmp_path / "store")))
    written = secrets.token_bytes(4096)
    await world.plain.apply([stored])
    async with world.host() as host:
        queue = await host.open_queue(1)
        await queue.write(7, written)
        await queue.flush()
        await queue.close()
    await world.plain.apply([])
    with pytest.raises(NvmeStatusError):
        await world.host().connect()
    await world.plain.apply([stored])
    async with world.host() as host:
        queue = await host.open_queue(1)
        back = bytearray(4096)
        await queue.read(7, back)
        await queue.close()
    assert back == written


async def test_hosts_see_what_they_may(world: World) -> None:
    hosts = [{"nqn": HOST}, {"nqn": OTHER}]
    await world.plain.apply([config(memory(1), memory(2, hosts=[OTHER]), hosts=hosts)])
    async with world.host() as mine, world.host(OTHER) as theirs:
        assert await mine.active_namespaces() == [1]
        assert await theirs.active_namespaces() == [1, 2]
    with pytest.raises(NvmeStatusError):
        await world.host(HOST + "2").connect()


async def test_any_host_may_come_where_that_is_said(world: World) -> None:
    await world.plain.apply([config(memory(), hosts=[], allow_any_host=True)])
    async with world.host(HOST + "2") as host:
        assert await host.active_namespaces() == [1]


async def test_a_reload_is_seen_by_connected_hosts(world: World) -> None:
    await world.plain.apply([config(memory(1))])
    heard: asyncio.Queue[object] = asyncio.Queue()
    async with world.host(events=heard.put_nowait) as host:
        await world.plain.apply([config(memory(1), memory(2))])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await heard.get()
        assert await host.active_namespaces() == [1, 2]
        await world.plain.apply([config(memory(1, ana_state="inaccessible"), memory(2))])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await heard.get()
        assert {n: int(state) for n, state in (await host.ana_states()).items()} == {1: 3, 2: 1}
        await world.plain.apply([config(memory(2))])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await heard.get()
        assert await host.active_namespaces() == [2]


async def test_an_inaccessible_namespace_executes_nothing(world: World) -> None:
    await world.plain.apply([config(memory(1))])
    async with world.host() as host:
        queue = await host.open_queue(1)
        await queue.write(0, bytes(4096))
        await world.plain.apply([config(memory(1, ana_state="inaccessible"))])
        with pytest.raises(NvmeStatusError) as refused:  # noqa: PT012 - a running queue hears soon
            for _ in range(1000):
                await queue.write(0, bytes(4096))
        assert refused.value.status == 0x302
        await queue.close()


async def test_a_drain_holds_for_what_a_reload_adds(world: World) -> None:
    other = f"{NQN}:other"
    await world.plain.apply([config(memory(1), memory(2, ana_state="persistent-loss"))])
    world.plain.set_draining(is_draining=True)
    await world.plain.apply(
        [
            config(memory(1), memory(2, ana_state="persistent-loss"), memory(3)),
            config(memory(1), nqn=other),
        ]
    )
    async with world.host() as host, world.host(subsystem_nqn=other) as new:

        async def states(of: HostController) -> list[int]:
            return [int(state) for _, state in sorted((await of.ana_states()).items())]

        assert (await states(host), await states(new)) == ([3, 4, 3], [3])
        world.plain.set_draining(is_draining=False)
        assert (await states(host), await states(new)) == ([1, 4, 1], [1])
        queue = await new.open_queue(1)
        await queue.write(0, bytes(4096))
        await queue.close()


async def test_a_removed_host_is_cut_and_the_other_stays(world: World) -> None:
    hosts = [{"nqn": HOST}, {"nqn": OTHER}]
    await world.plain.apply([config(memory(), hosts=hosts)])
    async with world.host() as mine:
        theirs = world.host(OTHER)
        await theirs.connect()
        await world.plain.apply([config(memory(), hosts=hosts[:1])])
        with pytest.raises((Error, TimeoutError)):
            await theirs.active_namespaces()
        await theirs.close()
        assert await mine.active_namespaces() == [1]
    assert [each.host_nqn for each in world.listener.associations] in ([], [HOST])


async def test_a_removed_subsystem_closes_its_hosts(world: World) -> None:
    await world.plain.apply([config(memory()), config(memory(), nqn=SECOND)])
    host = world.host(subsystem_nqn=SECOND)
    await host.connect()
    await world.plain.apply([config(memory())])
    assert world.listener.associations == []
    await host.close()
    assert [each.config.nqn for each in world.plain.subsystems] == [NQN]


async def test_a_reload_that_fails_changes_nothing(world: World) -> None:
    await world.plain.apply([config(memory(1))])
    nowhere = memory(3, store="file", path="/nonexistent/store")
    for wrong in (
        config(memory(1, size_bytes=2 * MIB)),
        config(memory(1), memory(2), nowhere),
        config(memory(1), hosts=[{"nqn": HOST, "dhchap_key_file": "/nonexistent/key"}]),
    ):
        with pytest.raises((UsageError, UnavailableError)):
            await world.plain.apply([wrong, config(memory(), nqn=SECOND)])
        (only,) = world.plain.subsystems
        assert only.config == config(memory(1))
        async with world.host() as host:
            assert await host.active_namespaces() == [1]


async def test_hosts_with_a_key_file_authenticate(world: World, tmp_path: Path) -> None:
    texts = {}
    for name in ("host", "controller"):
        path = tmp_path / name
        path.touch(mode=0o600)
        texts[name] = HostSecret(secrets.token_bytes(32))
        path.write_text(str(texts[name]) + "\n")
    known = {
        "nqn": HOST,
        "dhchap_key_file": str(tmp_path / "host"),
        "dhchap_controller_key_file": str(tmp_path / "controller"),
    }
    await world.plain.apply([config(memory(), hosts=[known])])
    right = Credentials(secret=texts["host"], controller_secret=texts["controller"])
    async with world.host(credentials=right) as host:
        queue = await host.open_queue(1)
        await queue.write(0, bytes(4096))
        await queue.close()
    wrong = Credentials(secret=texts["controller"])
    for credentials in (None, wrong):
        with pytest.raises(Error):
            await world.host(credentials=credentials).connect()


async def test_key_files_of_others_are_refused(world: World, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(str(HostSecret(bytes(32))))
    path.chmod(0o644)
    known = {"nqn": HOST, "dhchap_key_file": str(path)}
    with pytest.raises(UsageError, match="mode 0644"):
        await world.plain.apply([config(memory(), hosts=[known])])
    path.chmod(0o600)
    path.write_text("DHHC-1:00:AAAA:")
    with pytest.raises(UsageError) as refused:
        await world.plain.apply([config(memory(), hosts=[known])])
    assert "AAAA" not in str(refused.value)


async def test_discovery_names_plain_subsystems(world: World) -> None:
    await world.plain.apply(
        [config(memory()), config(memory(), nqn=SECOND, hosts=[{"nqn": OTHER}])]
    )
    async with world.host(subsystem_nqn=DISCOVERY_NQN) as host:
        log = await host.log_page(0x70, 4096)
    names = [log[at + 256 : at + 512].rstrip(b"\0").decode() for at in (1024, 2048)]
    assert struct.unpack_from("<Q", log, 8)[0] == 2
    assert names == [DISCOVERY_NQN, NQN]


async def test_reservation_notices_reach_their_host(world: World) -> None:
    await world.plain.apply([config(memory())])
    async with world.host() as host:
        queue = await host.open_queue(1)
        (association,) = world.listener.associations
        (subsystem,) = world.plain.subsystems
        namespace = subsystem.namespaces[1]

        class Source:
            def take_events(self) -> list[StorageEvent]:
                detail = association.host_id.bytes.hex()
                kind = "reservation"
                return [StorageEvent(kind=kind, reason="reservation.preempted", detail=detail)]

        original, namespace.native = namespace.native, Source()  # type: ignore[assignment]
        subsystem._take_events(namespace)
        namespace.native = original
        page = await host.log_page(0x80, 64)
        assert struct.unpack_from("<QBB", page) == (1, 3, 0)
        await queue.close()


# The plan and the configuration


def test_a_plan_opens_only_what_is_new() -> None:
    before = config(memory(1), memory(2))
    after = config(memory(2, ana_state="change"), memory(3))
    made = plan({NQN: before, SECOND: config(nqn=SECOND)}, [after])
    assert made.removed == (SECOND,)
    assert [each.nsid for each in made.opened[NQN]] == [3]
    with pytest.raises(UsageError, match="another store or size"):
        plan({NQN: before}, [config(memory(1, size_bytes=2 * MIB))])


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": []},
        {"allow_any_host": True},
        {"hosts": [{"nqn": HOST}, {"nqn": HOST}]},
        {"hosts": [{"nqn": HOST, "dhchap_controller_key_file": "/k"}]},
        {"hosts": [{"nqn": "host"}]},
        {"nqn": DISCOVERY_NQN},
        {"serial": "x" * 21},
        {"namespaces": [memory(1), memory(1)]},
        {"namespaces": [memory(0)]},
        {"namespaces": [memory(1025)]},
        {"namespaces": [memory(size_bytes=4097)]},
        {"namespaces": [memory(path="/p")]},
        {"namespaces": [memory(store="file")]},
        {"namespaces": [memory(store="emulated")]},
        {"namespaces": [memory(uuid="1")]},
        {"namespaces": [memory(eui64="12")]},
        {"namespaces": [memory(ana_state="fine")]},
        {"namespaces": [memory(limits={"iops": -1})]},
        {"namespaces": [memory(hosts=[])]},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="1 validation error"):
        config(**({"namespaces": [memory()]} | wrong))  # type: ignore[arg-type]


def test_names_are_stable_without_being_given() -> None:
    (one,) = config(memory()).namespaces
    (two,) = config(memory(size_bytes=2 * MIB)).namespaces
    assert one.name(NQN) == two.name(NQN) != one.name(SECOND)
