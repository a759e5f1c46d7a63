"""Leases granted per second by one broker, on SQLite and on etcd.

A grant is timed from the call of the service to the sealed answer, and is durable before it is
answered. SQLite and the single etcd member keep their data in the temporary directory. Concurrent
grants are for different volumes, as they would be with many gateways. `plain` is a commit of the
same size straight to the store.
"""

import argparse
import asyncio
import contextlib
import secrets
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import structlog
from benchmarks.control.result import Result
from rich import box
from rich.table import Table

from sealane.crypto.certificates import Subject
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.store.contract import Store
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.protocol.v1 import broker_pb2

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from brokers import Count, start_broker
from etcd_server import etcd_cluster

AT_ONCE: Final = (1, 16, 64)


@contextlib.asynccontextmanager
async def _opened(kind: str, directory: Path) -> AsyncIterator[Store]:
    with contextlib.ExitStack() as stack:
        store: Store
        if kind == "sqlite":
            store = SqliteStore(directory / "broker.sqlite")
        else:
            cluster = stack.enter_context(etcd_cluster(directory=directory))
            store = await EtcdStore.open(cluster.endpoints, writer="benchmark", credentials=None)
        try:
            yield store
        finally:
            await store.close()


async def _rate(work: Callable[[int], Awaitable[Any]], *, at_once: int, seconds: float) -> float:
    """Return completions of `work` per second with `at_once` calls in flight."""
    done = 0
    end = time.perf_counter() + seconds

    async def repeat(which: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await work(which)
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*(repeat(i) for i in range(at_once)))
    return done / (time.perf_counter() - start)


async def _volume(service: BrokerService, caller: Subject) -> str:
    answer = await service.register_volume(
        caller, request_id=str(uuid.uuid4()), display_name="", size_bytes=4096, target_node="s"
    )
    return broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor).volume_id


async def _measure(kind: str, directory: Path, *, seconds: float) -> dict[str, Any]:
    caller = Subject(
        node="g",
        role="gateway",
        tenant="t",
        incarnation=bytes(16),
        kem_public_key=X25519KemKey.create().public_key,
    )
    sample: dict[str, Any] = {"store": kind}
    async with _opened(kind, directory) as store:
        service, _, registry = await start_broker(store, starts=Count(), heads=Count())
        volumes = [await _volume(service, caller) for _ in range(max(AT_ONCE))]

        async def grant(which: int) -> None:
            await service.leases.grant(
                caller,
                volume_id=volumes[which],
                key_epoch=1,
                request_id=secrets.token_bytes(16),
            )

        async def plain(_: int) -> None:
            await registry.commit(puts={f"benchmark/{uuid.uuid4()}": bytes(500)})

        for at_once in AT_ONCE:
            sample[f"leases at {at_once}"] = await _rate(grant, at_once=at_once, seconds=seconds)
            sample[f"plain at {at_once}"] = await _rate(plain, at_once=at_once, seconds=seconds)
        await service.close()
        await registry.close()
    return sample


def run(arguments: argparse.Namespace) -> Result:
    """Measure both stores alternately for `arguments.rounds` rounds."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False
    )
    kinds = ["sqlite", "etcd"] if shutil.which("etcd") else ["sqlite"]
    samples = []
    for _ in range(arguments.rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory(prefix="sealane-leases-") as name:
                measured = _measure(kind, Path(name), seconds=arguments.seconds)
                samples.append(asyncio.run(measured))
    table = Table(
        "store",
        box=box.SIMPLE,
        title="Leases granted per second (in brackets: plain commits per second)",
    )
    for at_once in AT_ONCE:
        table.add_column(f"{at_once} at once", justify="right")
    for kind in kinds:
        cells = []
        for at_once in AT_ONCE:
            leases, plain = (
                statistics.median(s[f"{what} at {at_once}"] for s in samples if s["store"] == kind)
                for what in ("leases", "plain")
            )
            cells.append(f"{leases:.0f} ({plain:.0f})")
        table.add_row(kind, *cells)
    return Result(table, samples)
