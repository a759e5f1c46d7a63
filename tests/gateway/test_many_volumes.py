"""What many idle volumes cost real daemons."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import pytest

import sealane.client
from patience import PATIENCE_SECONDS
from sealane.cli.demo.cluster import ClusterBuilder, Daemon

HOST = "nqn.2014-08.org.nvmexpress:uuid:0f0f0f0f-0000-4000-8000-00000000beef"
VOLUMES = 100
AT_ONCE = 8
# Of event loops, gRPC and executors, which start some of theirs when they are first used.
OTHERS_MAX = 48


def threads(daemon: Daemon) -> Counter[str]:
    tasks = Path(f"/proc/{daemon.pid}/task").iterdir()
    return Counter((task / "comm").read_text().strip() for task in tasks)


@pytest.mark.slow
async def test_idle_volumes_own_no_threads_at_target_and_gateway() -> None:
    limit = asyncio.Semaphore(AT_ONCE)
    # pytest's own directories have names too long for Unix sockets.
    with tempfile.TemporaryDirectory(prefix="sealane-") as directory:
        builder = ClusterBuilder(Path(directory), announce=lambda _: None)
        await idle(builder, limit)


async def idle(builder: ClusterBuilder, limit: asyncio.Semaphore) -> None:
    async with (
        builder.storage(store="file") as (_, target, gateway),
        sealane.client.connect(str(gateway.socket)) as client,
    ):

        async def attach(number: int) -> None:
            async with limit:
                volume = await client.volumes.create(
                    display_name=f"volume {number}", size_bytes=1 << 20
                )
                await client.volumes.attach(volume.name, host_nqn=HOST)

        await asyncio.gather(*map(attach, range(VOLUMES)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            # One stays for all stores.
            while threads(target)["store-journal"] > 1:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        assert threads(target).total() < OTHERS_MAX
        assert threads(gateway).total() < OTHERS_MAX
