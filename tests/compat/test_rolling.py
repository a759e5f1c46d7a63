"""A cluster is upgraded to this release and rolled back to the previous one, under load."""

import asyncio

import pytest

from compat.cluster import ORDER, Cluster, Release, cluster, show
from compat.messages import Messages
from compat.volumes import check_volumes, written_volume
from control_plane import sealanectl
from kills.load import BYTES, WRITERS, Load
from patience import PATIENCE_SECONDS
from sealane.client import connect
from trust.test_revocation import HOST

pytestmark = [pytest.mark.lab_compat, pytest.mark.timeout(600)]

STORAGE = {"broker", "s", "g"}


@pytest.mark.parametrize(
    ("before", "after"), [(Release.PREVIOUS, Release.THIS), (Release.THIS, Release.PREVIOUS)]
)
async def test_a_cluster_is_replaced_daemon_by_daemon_and_back(
    before: Release, after: Release
) -> None:
    pauses: list[tuple[str, Release, float, float]] = []
    steps = [(name, after) for name in ORDER] + [(name, before) for name in reversed(ORDER)]
    async with cluster(before) as made:
        kept = {"start": await written_volume(made, "start")}
        async with connect(made.socket("g")) as client:
            created = await client.volumes.create(size_bytes=BYTES)
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            messages = Messages(made.socket, lambda: made.daemons["b"].addresses["fabric_control"])
            async with client.open(volume, hold_seconds=PATIENCE_SECONDS) as disk:
                load = Load(disk)
                async with asyncio.TaskGroup() as tasks:
                    for writer in range(WRITERS):
                        tasks.create_task(load.run(writer))
                    tasks.create_task(messages.run())
                    for name, release in steps:
                        await load.went_on()
                        await messages.went_on()
                        load.pause_seconds = messages.pause_seconds = 0.0
                        await replaced(made, name, release, messages)
                        # The other release's broker wrote some of what it lists.
                        listed = await asyncio.to_thread(
                            sealanectl, "--socket", made.socket("broker"), "node", "list"
                        )
                        assert listed.returncode == 0, listed.stderr
                        await load.went_on()
                        await messages.went_on()
                        pauses.append((name, release, load.pause_seconds, messages.pause_seconds))
                        if name in STORAGE:
                            # New records, stores and leases, which the other release will read.
                            text = f"{name} {release.value}"
                            kept[text] = await written_volume(made, text)
                        if name in {ORDER[-1], ORDER[0]}:
                            # Every daemon, and at the other end none, has been replaced.
                            await made.run_job(Release.PREVIOUS)
                            await made.run_job(Release.THIS)
                    load.is_over = messages.is_over = True
                await load.check()
        await check_volumes(made, kept)
    show(pauses, ("I/O", "messages"))


async def replaced(made: Cluster, name: str, release: Release, messages: Messages) -> None:
    """Replace a daemon. A fabric's sessions end with it; nothing else may."""
    if name in STORAGE:
        await made.replace(name, release)
        return
    async with messages.may_end():
        await made.replace(name, release)
