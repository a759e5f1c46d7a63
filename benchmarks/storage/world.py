"""Our own systems: a plain namespace of a target and a sealed volume behind a gateway."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from benchmarks.storage.measure import System

import sealane.client
from sealane.cli.demo.cluster import ClusterBuilder

PLAIN_NQN: Final = "nqn.2026-11.dev.sealane:benchmark-plain"


@contextlib.asynccontextmanager
async def running_systems(
    *, store: str, drive: str | None, size_bytes: int, host_nqn: str
) -> AsyncIterator[list[System]]:
    """Start daemons and create a volume; stop and remove everything afterwards."""
    with tempfile.TemporaryDirectory(prefix="sealane-benchmark-") as directory:
        scratch = Path(directory)
        namespace = {"nsid": 1, "store": store, "size_bytes": size_bytes}
        if store == "file":
            namespace["path"] = str(scratch / "plain.blocks")
        options: dict[str, object] = {"store": store}
        if drive is not None:
            options["drive"] = namespace["drive"] = drive
        options["subsystems"] = [
            {"nqn": PLAIN_NQN, "hosts": [{"nqn": host_nqn}], "namespaces": [namespace]}
        ]
        builder = ClusterBuilder(scratch, announce=lambda _: None)
        async with (
            builder.storage(**options) as (_, target, gateway),
            sealane.client.connect(str(gateway.socket)) as client,
        ):
            traddr, _, trsvcid = target.addresses["target"].rpartition(":")
            plain = System(
                name="plain",
                traddr=traddr,
                trsvcid=int(trsvcid),
                subsystem_nqn=PLAIN_NQN,
                host_nqn=host_nqn,
                processes={"target": target.pid},
            )
            volume = await client.volumes.create(display_name="bench", size_bytes=size_bytes)
            volume = await client.volumes.attach(volume.name, host_nqn=host_nqn)
            secure = System.secure(
                volume,
                host_nqn=host_nqn,
                processes={"gateway": gateway.pid, "target": target.pid},
            )
            yield [plain, secure]
            await client.volumes.detach(volume.name)
            await client.volumes.delete(volume.name)
