"""A broker, a target with anchored stores and a gateway, which get killed, and a tenant."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from attached_hosts import host_at
from control_plane import Daemon, Site, short_directory
from kills.history import History
from kills.restarts import start_in_place
from sealane.client import Volume, connect
from sealane.errors import Error, UsageError
from sealane.transport.nvme.initiator import NvmeStatusError, VolumeQueue
from software_tpm import software_tpm

HOST = "nqn.2014-08.org.nvmexpress:uuid:33333333-2222-4333-8444-555555555555"
BLOCK = 4096
VOLUME_BYTES = 1 << 20
BLOCKS = 48
WRITERS = 4
BROKERS = ("broker", "broker2")
# No step of a tenant takes this long, even on a loaded machine: it exceeds all bounds.
STEP_SECONDS = 100.0
LOST = (Error, NvmeStatusError, OSError, grpc.aio.AioRpcError)
# Events that must never be reported for an honest drive.
ALARMS = ("sector.stale", "store.rolled_back", "store.failed", "device.anchor.mismatch")


@dataclass
class StorageWorld:
    """Daemons by name: broker, s and g; and their logs, by name and start."""

    site: Site
    stack: contextlib.ExitStack
    daemons: dict[str, Daemon] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    logs: dict[str, str] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a daemon, at its previous addresses if it ran before."""
        self.daemons[name] = start_in_place(self.site, self.stack, name)
        self.starts[name] += 1

    async def restart(self, name: str) -> None:
        """Stop a daemon with SIGTERM and restart it."""
        assert await asyncio.to_thread(self.daemons[name].stop) == 0
        self._keep_log(name)
        await asyncio.to_thread(self.start, name)

    async def kill(self, name: str) -> None:
        """Kill a daemon with SIGKILL and restart it."""
        self.daemons[name].kill()
        self._keep_log(name)
        await asyncio.to_thread(self.start, name)

    def alarms(self) -> list[str]:
        """Return log lines that accuse the honest drive."""
        for name in self.daemons:
            self._keep_log(name)
        lines = "".join(self.logs.values()).splitlines()
        return [line for line in lines if any(alarm in line for alarm in ALARMS)]

    def _keep_log(self, name: str) -> None:
        running = self.daemons[name]
        self.logs[f"{name} {self.starts[name]}"] = running.log.read_text()


@contextlib.asynccontextmanager
async def storage_world(
    *, store: str, anchor: str, scratch: Path, etcd: Sequence[str] = ()
) -> AsyncIterator[StorageWorld]:
    """Start everything, with BROKERS on this etcd if it has addresses; stop it at the end."""
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        made = StorageWorld(site, stack)
        site.write_policy({"s": ["target"], "g": ["gateway"]})
        site.broker_config(etcd=etcd)
        await asyncio.to_thread(made.start, "broker")
        broker, others = made.daemons["broker"], {}
        if etcd:
            site.broker_config(BROKERS[1], instance=2, etcd=etcd)
            await asyncio.to_thread(made.start, BROKERS[1])
            others = {BROKERS[1]: made.daemons[BROKERS[1]]}
        tpm = ""
        if anchor == "tpm2":
            tpm = f'[tpm]\ntcti = "{stack.enter_context(software_tpm(scratch / "tpm")).tcti}"\n'
        site.write_config(
            "s",
            tpm
            + site.enrolment("s", broker, others=others)
            + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            + f'store = "{store}"\ndirectory = "{root / "stores"}"\nanchor = "{anchor}"\n',
        )
        await asyncio.to_thread(made.start, "s")
        site.write_config(
            "g",
            site.enrolment("g", broker, others=others)
            + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            + f'target_address = "{made.daemons["s"].addresses["target_control"]}"\n'
            + "command_timeout_seconds = 5\n",
        )
        await asyncio.to_thread(made.start, "g")
        yield made


@dataclass
class Tenant:
    """Writes, reads and flushes during kills, and checks each answer against the history."""

    world: StorageWorld
    history: History = field(default_factory=History)
    ended: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    volume: Volume | None = None
    # The start of the gateway that has the volume attached.
    gateway: int = 0
    progress: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        """Run until cancelled; raise on anything that the history doesn't allow."""
        while True:
            try:
                async with self._session() as queue, asyncio.TaskGroup() as tasks:
                    for writer in range(WRITERS):
                        tasks.create_task(self._work(queue, range(writer, BLOCKS, WRITERS)))
                    tasks.create_task(self._flush_often(queue))
            except* LOST as errors:
                self._note(errors)
                await asyncio.sleep(0.1)

    async def progressed(self, load: "asyncio.Future[None]") -> None:
        """Wait until a flush that begins after this call has ended; raise the load's error."""
        async with asyncio.timeout(STEP_SECONDS), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(self._flushed_twice())
            await asyncio.wait({waiting, load}, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()

    async def _flushed_twice(self) -> None:
        flushes = self.ended["flush"]
        async with self.progress:
            await self.progress.wait_for(lambda: self.ended["flush"] > flushes + 1)

    async def check_all(self) -> None:
        """Read every block after the last kill; the gateway may still be finding its target."""
        async with asyncio.timeout(STEP_SECONDS):
            while True:
                try:
                    async with self._session() as queue:
                        for lba in range(BLOCKS):
                            await self._read(queue, lba)
                        return
                except LOST:
                    await asyncio.sleep(0.1)

    def _note(self, errors: BaseExceptionGroup[BaseException]) -> None:
        for error in errors.exceptions:
            if isinstance(error, BaseExceptionGroup):
                self._note(error)
            else:
                self.failures[f"{getattr(error, 'reason', '')} {error}"] += 1

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[VolumeQueue]:
        volume = await self._attached()
        host = host_at(volume, HOST)
        async with bounded("connecting"):
            await host.connect()
        try:
            async with bounded("opening a queue"):
                await host.request_queues(1)
                queue = await host.open_queue(1)
            try:
                yield queue
            finally:
                async with bounded("closing the queue"):
                    await queue.close()
        finally:
            async with bounded("closing the controller"):
                await host.close()

    async def _attached(self) -> Volume:
        gateway = self.world.starts["g"]
        if self.volume is not None and self.volume.attachment is not None and not self._is_lost():
            if gateway != self.gateway:
                # It is exported again automatically, without unflushed writes.
                self.gateway = gateway
                self.history.gateway_died()
            return self.volume
        async with bounded("attaching"), connect(self.world.daemons["g"].socket) as client:
            if self.volume is None:
                self.volume = await client.volumes.create(size_bytes=VOLUME_BYTES)
            else:
                # Attached by a call that was never answered; or unflushed writes may be lost.
                with contextlib.suppress(UsageError):
                    await client.volumes.detach(self.volume.name)
            self.volume = await client.volumes.attach(self.volume.name, host_nqn=HOST)
            self.gateway = gateway
            self.history.gateway_died()
            return self.volume

    def _is_lost(self) -> bool:
        """Return whether the gateway failed the volume after it and its target were killed."""
        log = self.world.daemons["g"].log.read_text()
        return "volume.unflushed_lost" in log.rpartition('"kind": "attached"')[2]

    async def _work(self, queue: VolumeQueue, lbas: range) -> None:
        while True:
            for lba in lbas:
                await self._write(queue, lba)
                await self._read(queue, lba)

    async def _flush_often(self, queue: VolumeQueue) -> None:
        while True:
            await asyncio.sleep(0.02)
            flush = self.history.flush_begins()
            async with bounded("flush"):
                await queue.flush()
            self.history.flushed(flush)
            async with self.progress:
                self.ended["flush"] += 1
                self.progress.notify_all()

    async def _write(self, queue: VolumeQueue, lba: int) -> None:
        version = self.history.issued(lba)
        async with bounded("write"):
            await queue.write(lba, version.to_bytes(8, "big") * (BLOCK // 8))
        self.history.acknowledged(lba, version)
        self.ended["write"] += 1

    async def _read(self, queue: VolumeQueue, lba: int) -> None:
        found = bytearray(BLOCK)
        async with bounded("read"):
            await queue.read(lba, found)
        version = int.from_bytes(found[:8], "big")
        assert found == version.to_bytes(8, "big") * (BLOCK // 8), f"block {lba} is mixed"
        self.history.returned(lba, version)
        self.ended["read"] += 1


@contextlib.asynccontextmanager
async def bounded(what: str) -> AsyncIterator[None]:
    """Fail instead of waiting forever, even during a cancellation."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        yield
    finally:
        assert loop.time() - begun < STEP_SECONDS, f"{what} took {loop.time() - begun:.0f} s"
