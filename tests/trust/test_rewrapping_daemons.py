"""Rotation of the key encryption key with real daemons: its broker is killed, hosts go on."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from control_plane import Daemon, Site, daemon, sealanectl, sealaned
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own
from sealane.client import Client, Volume, connect
from sealane.errors import UnavailableError
from trust.test_device_daemons import MIB, World, reloaded, world
from trust.test_revocation import HOST, Load

__all__ = ["world"]

pytestmark = pytest.mark.slow

MISCONFIGURED = 2


def _ctl(broker: Daemon, *arguments: str) -> Any:
    ended = sealanectl("--socket", broker.socket, "--output", "json", "key", *arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def _with_keys(site: Site, listen: str, key: str, next_key: str = "") -> Path:
    config = site.broker_config(listen=listen)
    text = config.read_text().replace(f'"{site.root / "kek"}"', f'"{site.root / key}"')
    if next_key:
        text += f'[broker.next_key]\nkey_file = "{site.root / next_key}"\n'
    config.write_text(text)
    return config


async def _finished(broker: Daemon) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        shown: dict[str, Any] = await asyncio.to_thread(_ctl, broker, "status")
        if not shown["previous_key_id"] or time.monotonic() > end:
            return shown
        await asyncio.sleep(0.2)


async def _created(client: Client) -> Volume:
    """Create a volume; the gateway's channel tries a restarted broker again after a pause."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await client.volumes.create(size_bytes=MIB)
        except UnavailableError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.5)


async def test_a_rotation_outlives_its_broker_and_hosts_notice_nothing(world: World) -> None:
    site = world.site
    [listen] = addresses_of_our_own(1)
    made = sealanectl("--output", "json", "key", "encryption", site.root / "kek2")
    assert made.returncode == 0, made.stderr
    new_id = json.loads(made.stdout)["key id"]
    config = _with_keys(site, listen, "kek")
    async with contextlib.AsyncExitStack() as stack:
        world.broker = stack.enter_context(daemon(config))
        target = stack.enter_context(daemon(world.target_config()))
        gateway = stack.enter_context(world.gateway(target))
        client = await stack.enter_async_context(connect(gateway.socket))
        volume = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        load = Load()
        running = tasks.create_task(load.run(volume))
        await load.goes_on()
        before = await asyncio.to_thread(_ctl, world.broker, "status")
        assert (before["left"], before["previous_key_id"], before["records"]) == (0, "", 2)

        _with_keys(site, listen, "kek", "kek2")
        await reloaded(world.broker)
        begun = await asyncio.to_thread(_ctl, world.broker, "rewrap")
        assert begun["key_id"] == new_id
        world.broker.kill()
        await load.goes_on()
        world.broker = stack.enter_context(daemon(config))
        shown = await _finished(world.broker)
        assert (shown["left"], shown["previous_key_id"]) == (0, "")
        assert shown["retired_key_ids"] == [before["key_id"]]

        # The old key is removed while the broker runs; then the broker starts without it.
        _with_keys(site, listen, "kek2")
        await reloaded(world.broker)
        [broker] = (await asyncio.to_thread(_ctl, world.broker, "status"))["brokers"]
        assert broker["key_ids"] == [new_id]
        assert world.broker.stop() == 0
        refused = sealaned("--config", _with_keys(site, listen, "kek"))
        assert refused.returncode == MISCONFIGURED
        assert "broker.key.missing" in refused.stderr
        (site.root / "kek").unlink()
        world.broker = stack.enter_context(daemon(_with_keys(site, listen, "kek2")))
        another = await _created(client)
        await client.volumes.attach(another.name, host_nqn=HOST)
        await load.goes_on()
        assert load.failure is None
        running.cancel()
    outcomes = [record["outcome"] for record in world.audited("encryption_key.rotate")]
    assert outcomes == ["granted", "done"]
