"""The runbook for a TPM that was cleared or replaced: docs/operate/runbooks.md."""

from pathlib import Path

import pytest

from control_plane import daemon
from sealane.client import connect
from software_tpm import software_tpm
from trust.test_device_daemons import MIB, World, world
from trust.test_revocation import HOST

__all__ = ["world"]


@pytest.mark.slow
async def test_a_target_whose_tpm_was_lost_serves_once_the_operator_accepts_its_device(
    world: World, tmp_path: Path
) -> None:
    world.start_broker()
    with software_tpm(tmp_path / "lost") as machine:
        config = world.target_config(anchor="tpm2", tcti=machine.tcti)
        with daemon(config) as target, world.gateway(target) as gateway:
            async with connect(gateway.socket) as client:
                created = await client.volumes.create(size_bytes=MIB)
                volume = await client.volumes.attach(created.name, host_nqn=HOST)
                async with client.open(volume) as disk:
                    await disk.write(0, b"before")
                    await disk.flush()
                await client.volumes.detach(volume.name)
    with software_tpm(tmp_path / "new") as machine:
        config = world.target_config(anchor="tpm2", tcti=machine.tcti)
        world.refused_start(config, "anchor.record")
        [device] = world.devices()
        world.ctl("init", device["device"], "--anew", "--yes")
        with daemon(config) as target, world.gateway(target) as gateway:
            async with connect(gateway.socket) as client:
                volume = await client.volumes.attach(created.name, host_nqn=HOST)
                async with client.open(volume) as disk:
                    assert await disk.read(0, 6) == b"before"
                await client.volumes.detach(volume.name)
        # What was accepted once is anchored in the new TPM.
        with daemon(config):
            pass
