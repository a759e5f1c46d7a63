"""Devices with real daemons: opening, rolled-back devices, moves between targets."""

import asyncio
import contextlib
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attached_hosts import detach_kept
from control_plane import Daemon, Site, daemon, sealanectl, sealaned, short_directory, wait_for_log
from etcd_server import etcd_cluster
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.daemon.device.anchors.device_anchors import ANCHOR_SECONDS
from sealane.errors import Error, UnavailableError
from sealane.protocol.v1 import devices_pb2
from software_tpm import software_tpm
from stopped import frozen
from trust.relay import Relay
from trust.test_revocation import HOST, Load

pytestmark = pytest.mark.slow

MIB = 1 << 20
NOT_VERIFIED = 3
UNAVAILABLE = 4
# Delay of a loaded machine that is tolerated on top of a bound.
SLACK_SECONDS = 10.0


@dataclass
class World:
    """A broker, and targets and gateways started by the test."""

    site: Site
    stack: contextlib.AsyncExitStack
    broker: Daemon = field(init=False)

    @property
    def directory(self) -> Path:
        return self.site.root / "stores"

    def start_broker(self, **settings: str) -> None:
        config = self.site.broker_config()
        extra = "".join(f'{key} = "{value}"\n' for key, value in settings.items())
        config.write_text(config.read_text() + extra)
        self.broker = self.stack.enter_context(daemon(config))

    def target_config(self, node: str = "s", *, broker_address: str = "", **settings: Any) -> Path:
        direct = self.broker.addresses["broker"]
        values = {"directory": str(self.directory), "authorization_seconds": 3, **settings}
        tpm = f'[tpm]\ntcti = "{values.pop("tcti")}"\n' if "tcti" in values else ""
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        enrolment = self.site.enrolment(node, self.broker, timeout_seconds=3)
        return self.site.write_config(
            node,
            tpm
            + enrolment.replace(
                f'broker_address = "{direct}"', f'broker_address = "{broker_address or direct}"'
            )
            + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            + f'store = "file"\n{lines}[metrics]\nlisten = "127.0.0.1:0"\n',
        )

    @contextlib.contextmanager
    def gateway(
        self, target: Daemon, *, target_node: str = "s", second: Daemon | None = None
    ) -> Iterator[Daemon]:
        config = self.site.write_config(
            "g",
            self.site.enrolment("g", self.broker)
            + f'[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "{target_node}"\n'
            + f'target_address = "{target.addresses["target_control"]}"\n',
        )
        if second is not None:
            _enrolled_at_both(config, second)
        with daemon(config) as running:
            yield running

    def ctl(self, *arguments: str, fails_with: str = "") -> Any:
        ended = sealanectl("--socket", self.broker.socket, "--output", "json", "device", *arguments)
        if fails_with:
            assert fails_with in ended.stderr
            return None
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout) if ended.stdout else None

    def devices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ctl("list")
        return found

    def audited(self, kind: str) -> list[dict[str, Any]]:
        text = (self.site.root / "broker" / "audit.jsonl").read_text()
        records: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        return [record for record in records if record["kind"] == kind]

    def refused_start(self, config: Path, reason: str, *, code: int = NOT_VERIFIED) -> str:
        ended = sealaned("--config", config)
        assert ended.returncode == code, ended.stderr
        assert reason in ended.stderr
        return ended.stderr


@pytest.fixture
async def world() -> AsyncIterator[World]:
    with short_directory() as root:
        async with contextlib.AsyncExitStack() as stack:
            site = Site(root)
            site.write_policy({"s": ["target"], "s2": ["target"], "g": ["gateway"]})
            yield World(site, stack)


async def _create(gateway: Daemon) -> str:
    async with connect(gateway.socket) as client:
        return (await client.volumes.create(size_bytes=MIB)).name


async def test_new_device_needs_an_operator_where_the_broker_says_so(world: World) -> None:
    world.start_broker(device_init="authorized")
    config = world.target_config()
    said = world.refused_start(config, "device.init.refused")
    [asking] = world.devices()
    assert (asking["owner"], asking["state"]) == ("s", "asking")
    assert f"sealanectl device init {asking['device']}" in said
    [refusal] = world.audited("device.open")
    assert (refusal["outcome"], refusal["reason"]) == ("refused", "device.init.refused")
    ended = sealanectl("--socket", world.broker.socket, "device", "init", asking["device"])
    assert (ended.returncode, "[confirmation.missing]" in ended.stderr) == (2, True)
    assert f"{asking['device']}, which s presents" in ended.stderr
    world.ctl("init", asking["device"], "--yes")
    with daemon(config) as target, world.gateway(target) as gateway:
        volume = await _create(gateway)
        shown = world.ctl("show", asking["device"])
        assert (shown["owner"], shown["state"], shown["volumes"]) == ("s", "open", [volume])
        assert [*shown["anchored"]] == ["catalogue", volume.replace("volumes/", "volume/")]
        world.ctl("forget", "--yes", asking["device"], fails_with="device.volumes.state")
    assert world.devices()[0]["state"] == "closed"
    kinds = [record["outcome"] for record in world.audited("device.open")]
    assert kinds == ["refused", "granted"]
    assert [r["detail"]["node"] for r in world.audited("device.init")] == ["s"]


async def test_next_device_of_a_node_is_let_in_and_no_other(world: World) -> None:
    world.start_broker(device_init="authorized")
    world.ctl("init", "--next", "s")
    assert [(row["owner"], row["state"]) for row in world.devices()] == [("s", "authorized")]
    world.refused_start(world.target_config("s2", directory=f"{world.directory}2"), "device.init")
    with daemon(world.target_config()):
        pass
    other = world.target_config(directory=f"{world.directory}3")
    world.refused_start(other, "device.init.refused")


@pytest.mark.parametrize("anchor", ["broker", "file", "tpm2"])
async def test_directory_that_was_put_back_is_refused(
    world: World, tmp_path: Path, anchor: str
) -> None:
    world.start_broker()
    settings = {"anchor": anchor}
    if anchor == "tpm2":
        settings["tcti"] = world.stack.enter_context(software_tpm(tmp_path / "tpm")).tcti
    config = world.target_config(**settings)
    kept, newest = tmp_path / "kept", tmp_path / "newest"

    def put_back(copy: Path) -> None:
        shutil.rmtree(world.directory)
        shutil.copytree(copy, world.directory)

    with daemon(config) as target, world.gateway(target) as gateway:
        volume = await _create(gateway)
        # A copy of the device while it is served: same opening, but the list changes afterwards.
        shutil.copytree(world.directory, kept)
        async with connect(gateway.socket) as client:
            await client.volumes.delete(volume)
        volume = await _create(gateway)
        target.kill()
        shutil.copytree(world.directory, newest)
        put_back(kept)
        world.refused_start(config, "device.anchor.mismatch")
        put_back(newest)
        with daemon(config) as again:
            assert any(
                line.get("kind") == "restored" and f"volumes/{line['volume_id']}" == volume
                for line in again.log_lines()
            )
    # A copy from before the last start, with the same list.
    put_back(newest)
    world.refused_start(config, "device.anchor.mismatch")
    if anchor == "broker":
        refusals = [r for r in world.audited("device.open") if r["outcome"] == "refused"]
        assert {r["reason"] for r in refusals} == {"device.anchor.mismatch"}
    # The operator accepts it nevertheless.
    [device] = world.devices()
    world.ctl("init", device["device"], "--anew", "--yes")
    with daemon(config):
        assert world.devices()[0]["fencing epoch"] > device["fencing epoch"]


async def test_another_kind_of_anchor_than_the_device_has_is_refused(world: World) -> None:
    world.start_broker()
    with daemon(world.target_config()):
        pass
    world.refused_start(world.target_config(anchor="none"), "device.anchor.mismatch")


async def test_moved_device_leaves_its_old_target_and_serves_at_the_new_one(world: World) -> None:
    world.start_broker()
    config = world.target_config()
    with daemon(config) as old:
        [device] = world.devices()
        with world.gateway(old) as gateway:
            async with connect(gateway.socket) as client, asyncio.TaskGroup() as tasks:
                volume = await client.volumes.create(size_bytes=MIB)
                attached = await client.volumes.attach(volume.name, host_nqn=HOST)
                load = Load()
                running = tasks.create_task(load.run(attached))
                await load.goes_on()
                world.refused_start(world.target_config("s2"), "anchor.in_use", code=UNAVAILABLE)
                await asyncio.to_thread(
                    world.ctl, "move", device["device"], "--to", "s2", "--unseen", "--yes"
                )
                # The old target learns of the move when it next asks about its gateways.
                await asyncio.to_thread(wait_for_log, old.process, config, "device_lost")
                with pytest.raises(Error):
                    await client.volumes.create(size_bytes=MIB)
                running.cancel()
        # The old owner has reported that it stopped, so the new one needn't wait for its lease.
        with daemon(world.target_config("s2")) as new:
            assert world.devices()[0]["owner"] == "s2"
            assert old.stop() == 0
            world.refused_start(_copy_of(world, config), "device.owner.refused")
            with world.gateway(new, target_node="s2") as gateway:
                async with connect(gateway.socket) as client, asyncio.TaskGroup() as tasks:
                    found = await client.volumes.get(volume.name)
                    assert found.target_node == "s2"
                    await detach_kept(client, volume.name)
                    attached = await client.volumes.attach(volume.name, host_nqn=HOST)
                    load = Load()
                    running = tasks.create_task(load.run(attached))
                    await load.goes_on()
                    running.cancel()
                async with connect(gateway.socket) as client:
                    await client.volumes.detach(volume.name)
                    await client.volumes.delete(volume.name)
    assert [r["detail"]["owner_before"] for r in world.audited("device.move")] == ["s"]


@pytest.mark.parametrize("hears", [False, True])
async def test_device_that_is_given_back_is_served_again_by_the_same_process(
    world: World, hears: bool
) -> None:
    world.start_broker()
    config = world.target_config()
    with daemon(config) as target:
        [device] = world.devices()
        with world.gateway(target) as gateway:
            async with connect(gateway.socket) as client, asyncio.TaskGroup() as tasks:
                volume = await client.volumes.create(size_bytes=MIB)
                attached = await client.volumes.attach(volume.name, host_nqn=HOST)
                load = Load()
                running = tasks.create_task(load.run(attached))
                await load.goes_on()
                if hears:
                    await move(world, device["device"], "s2")
                    await until(lambda: _logged(target, "device_lost") == 1)
                    await move(world, device["device"], "s")
                else:
                    # It can't ask between the moves, so it learns of both at once.
                    with frozen(target.process.pid):
                        await move(world, device["device"], "s2")
                        await move(world, device["device"], "s")
                await until(lambda: _logged(target, "device_opened") == 2)
                await load.goes_on()
                running.cancel()
        assert load.failure is None
        assert world.devices()[0]["state"] == "open"
    [lost] = [line for line in target.log_lines() if line["event"] == "device_lost"]
    assert lost["reason"] == ("device.owner.refused" if hears else "device.moved")


async def move(world: World, device: str, node: str) -> None:
    """Move a device, as sealanectl does, without waiting."""
    request = devices_pb2.MoveDeviceRequest(device_id=device, node=node, unseen=True)
    async with connect(world.broker.socket) as operator:
        await operator.devices.MoveDevice(request, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("verb", ["move", "forget", "init"])
async def test_what_takes_a_device_away_needs_a_word_and_a_node_that_exists(
    world: World, verb: str
) -> None:
    world.start_broker()
    with daemon(world.target_config()):
        [device] = world.devices()
        options = {"move": ("--to", "s2", "--unseen"), "init": ("--anew",), "forget": ()}[verb]
        asked = [verb, device["device"], *options]
        ended = sealanectl("--socket", world.broker.socket, "device", *asked)
        assert (ended.returncode, "[confirmation.missing]" in ended.stderr) == (2, True)
        assert device["device"] in ended.stderr
        if verb == "move":
            # What can't be done is refused before anybody is asked.
            for more in ((), ("--yes",)):
                typed = (verb, device["device"], "--to", "nosuch", *more)
                ended = sealanectl("--socket", world.broker.socket, "device", *typed)
                assert (ended.returncode, "[node.not_found]" in ended.stderr) == (4, True)
        assert world.devices() == [device]


def _logged(target: Daemon, event: str) -> int:
    return sum(line["event"] == event for line in target.log_lines())


async def until(happened: Callable[[], bool]) -> None:
    """Wait until another process has made a condition true."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if happened():
                return
            await asyncio.sleep(0.05)


async def reloaded(running: Daemon) -> None:
    """Let a daemon read its configuration again; return when it has."""
    before = _logged(running, "reloaded")
    running.process.send_signal(signal.SIGHUP)
    await until(lambda: _logged(running, "reloaded") > before)


def _copy_of(world: World, config: Path) -> Path:
    """Copy the device's directory, as its host's administrator can, and configure the copy."""
    copy = f"{world.directory}-copy"
    shutil.copytree(world.directory, copy)
    config.write_text(config.read_text().replace(str(world.directory), copy))
    return config


async def test_device_of_a_dead_owner_is_busy_until_it_must_have_stopped(world: World) -> None:
    world.start_broker()
    with daemon(world.target_config()) as old:
        [device] = world.devices()
        old.kill()
    world.ctl("move", device["device"], "--to", "s2", "--unseen", "--yes")
    assert world.devices()[0]["state"] == "waiting"
    world.refused_start(world.target_config("s2"), "device.busy", code=UNAVAILABLE)


async def test_anchor_that_cannot_be_reached_is_waited_for_no_longer_than_the_bound(
    world: World,
) -> None:
    world.start_broker()
    relay = await world.stack.enter_async_context(Relay(world.broker.addresses["broker"]).running())
    config = world.target_config(broker_address=relay.address, authorization_seconds=30)
    target = await asyncio.to_thread(world.stack.enter_context, daemon(config))
    with world.gateway(target) as gateway:
        kept = await _create(gateway)
        relay.cut()
        began = time.monotonic()
        with pytest.raises(UnavailableError) as caught:
            await _create(gateway)
        # The failure concerns the store, which is anchored before the list that names it.
        assert caught.value.reason == "anchor.unreachable"
        assert ANCHOR_SECONDS <= time.monotonic() - began < ANCHOR_SECONDS + SLACK_SECONDS
        relay.mend()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with contextlib.suppress(UnavailableError):
                    made = await _create(gateway)
                    break
        # Nothing is left of the failed volume.
        volumes = {f"volumes/{path.stem}" for path in world.directory.glob("*.sectors")}
        assert volumes == {kept, made}
    # In a thread, because the relay runs on this event loop.
    assert await asyncio.to_thread(target.stop) == 0
    again = await asyncio.to_thread(world.stack.enter_context, daemon(config))
    restored = [line for line in again.log_lines() if line.get("kind") == "restored"]
    assert len(restored) == len(volumes)
    assert await asyncio.to_thread(again.stop) == 0


async def test_forgotten_device_is_refused_for_ever(world: World) -> None:
    world.start_broker()
    config = world.target_config()
    with daemon(config):
        [device] = world.devices()
    world.ctl("forget", "--yes", device["device"])
    assert world.devices()[0]["state"] == "forgotten"
    world.refused_start(config, "device.forgotten")
    world.ctl(
        "move", device["device"], "--to", "s2", "--unseen", "--yes", fails_with="device.not_found"
    )
    assert len(world.audited("device.forget")) == 1


async def test_anchor_goes_on_at_the_next_broker_when_one_is_killed(world: World) -> None:
    brokers: list[Daemon] = []
    etcd = world.stack.enter_context(etcd_cluster())
    for instance, name in enumerate(("b1", "b2"), start=1):
        config = world.site.write_config(
            name,
            '[broker]\nlisten = "127.0.0.1:0"\nattestation_listen = "127.0.0.1:0"\n'
            f'policy_file = "{world.site.root / "policy.toml"}"\n'
            f'key_file = "{world.site.root / "kek"}"\nallow_unsigned_policy = true\n'
            f'instance = {instance}\nstore = "etcd"\n'
            f"[broker.etcd]\nendpoints = {json.dumps(etcd.endpoints)}\n",
        )
        brokers.append(world.stack.enter_context(daemon(config)))
    first, second = brokers
    world.broker = first
    target = world.stack.enter_context(daemon(_enrolled_at_both(world.target_config(), second)))
    with world.gateway(target, second=second) as gateway:
        await _create(gateway)
        first.kill()
        await _create(gateway)
        world.broker = second
        [device] = world.devices()
        shown = world.ctl("show", device["device"])
        assert len(shown["volumes"]) == 2
        # One opening and two volumes: each change counts once, whoever made it.
        assert shown["anchored"]["catalogue"].startswith("3: ")
    assert target.stop() == 0
    with daemon(world.site.root / "s.toml") as again:
        restored = [x for x in again.log_lines() if x.get("kind") == "restored"]
        assert len(restored) == 2


def _enrolled_at_both(config: Path, second: Daemon) -> Path:
    """Name brokers b1 and b2 in a configuration with the address of b1."""
    before, section, after = config.read_text().partition("[enrolment]\n")
    own, role, others = after.partition("[target]\n" if "[target]" in after else "[gateway]\n")
    own = own.replace("/broker/trust-anchor", "/b1/trust-anchor")
    config.write_text(
        f'{before}{section}broker_node = "b1"\n{own}'
        f'[[enrolment.other_brokers]]\nnode = "b2"\naddress = "{second.addresses["broker"]}"\n'
        f'attestation_address = "{second.addresses["attestation"]}"\n{role}{others}'
    )
    return config
