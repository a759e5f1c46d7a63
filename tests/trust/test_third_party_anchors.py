"""Volumes on a third-party target, with real daemons: a rollback is refused, also after a move."""

import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane import Daemon, daemon, sealanectl
from sealane.client import Volume, connect
from sealane.errors import Error
from trust.test_device_daemons import MIB, World, world
from trust.test_revocation import HOST
from trust.test_store_anchors import read, write

__all__ = ["world"]

DISKS = "nqn.2026-11.example:disks"


@contextlib.contextmanager
def array(world: World, image: Path) -> Iterator[Daemon]:
    """Run a third-party target: one of ours, with a plain namespace in a file."""
    hosts = ", ".join(f'{{nqn = "nqn.2026-11.dev.sealane:gateway:{n}"}}' for n in ("g", "g2"))
    config = world.target_config("s")
    config.write_text(
        config.read_text()
        + f'[[target.subsystems]]\nnqn = "{DISKS}"\nhosts = [{hosts}]\n'
        + f'[[target.subsystems.namespaces]]\nnsid = 1\nstore = "file"\npath = "{image}"\n'
        + "size_bytes = 67_108_864\n"
    )
    with daemon(config) as running:
        yield running


@contextlib.contextmanager
def gateway(world: World, disks: Daemon, node: str, *, more: str = "") -> Iterator[Daemon]:
    path = world.site.write_config(
        node,
        world.site.enrolment(node, world.broker)
        + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
        + f'target_address = "{disks.addresses["target_control"]}"\n{more}'
        + f'[[gateway.third_party]]\nname = "array"\naddress = "{disks.addresses["target"]}"\n'
        + f'subsystem_nqn = "{DISKS}"\n',
    )
    with daemon(path) as running:
        yield running


@contextlib.asynccontextmanager
async def attached(at: Daemon, name: str) -> AsyncIterator[Volume]:
    async with connect(at.socket) as client:
        yield await client.volumes.attach(name, host_nqn=HOST)
        await client.volumes.detach(name)


async def refusal(at: Daemon, name: str) -> str:
    with pytest.raises(Error) as caught:
        async with attached(at, name):
            pass
    return caught.value.reason


def create(at: Daemon, *options: str) -> dict[str, Any]:
    ended = sealanectl(
        *("--socket", at.socket, "--output", "json", "volume", "create"),
        *("--size", str(MIB), "--third-party", "array", *options),
    )
    assert ended.returncode == 0, ended.stderr
    made: dict[str, Any] = json.loads(ended.stdout)
    return made


@pytest.mark.slow
async def test_namespace_put_back_is_refused_here_and_by_the_gateway_that_the_volume_moves_to(
    world: World, tmp_path: Path
) -> None:
    world.site.write_policy({"s": ["target"], "g": ["gateway"], "g2": ["gateway"]})
    world.start_broker()
    image, older, newest = (tmp_path / name for name in ("image", "older", "newest"))
    with array(world, image) as disks:
        with gateway(world, disks, "g") as first:
            made = create(first)
            assert (made["mode"], made["anchor"]) == ("local", "broker")
            name = made["name"]
            async with attached(first, name) as volume:
                await write(volume, b"1" * 4096)
            shutil.copyfile(image, older)
            async with attached(first, name) as volume:
                await write(volume, b"2" * 4096)
            shutil.copyfile(image, newest)
            shutil.copyfile(older, image)
            assert await refusal(first, name) == "store.rolled_back"
        device = name.removeprefix("volumes/")
        assert [
            (d["device"], d["is"], d["anchor"]) for d in world.devices() if d["owner"] == "g"
        ] == [(device, "volume", "broker")]
        world.ctl("move", device, "--to", "g2", "--unseen", "--yes")
        with gateway(world, disks, "g2") as second:
            assert await refusal(second, name) == "store.rolled_back"
            shutil.copyfile(newest, image)
            async with attached(second, name) as volume:
                assert await read(volume) == b"2" * 4096
        with gateway(world, disks, "g") as first:
            assert await refusal(first, name) == "volume.owner"
