"""A plain target with one namespace in memory, in this process."""

import asyncio
import dataclasses
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

from control_plane import write_key
from sealane.client.disk import Disk
from sealane.client.disk_queues import FrontEnd
from sealane.daemon.nvme.exported import Exported, Provider
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.nvme.subsystem_config import SubsystemConfig
from sealane.daemon.target.subsystems import PlainSubsystems
from sealane.protocol.nvme.authentication import HostSecret

NQN = "nqn.2026-11.dev.sealane:plain:one"
HOST = "nqn.2026-11.dev.sealane:host"
SECRET = str(HostSecret.generate(random.Random(1).randbytes))
SIZE = 1 << 20


class Nothing(Provider):
    """A provider without subsystems of its own."""

    def find(self, subsystem_nqn: str) -> Exported | None:
        assert subsystem_nqn
        return None


@dataclass
class PlainTarget:
    """A plain target in this process; it can be stopped, and restarted with an empty namespace."""

    directory: Path
    size: int = SIZE
    secret: str = SECRET
    address: tuple[str, int] = ("127.0.0.1", 0)
    listener: Listener = field(init=False)
    plain: PlainSubsystems = field(init=False)

    async def start(self) -> None:
        """Listen, at the previous address if there was one."""
        key_file = self.directory / "dhchap-key"
        write_key(key_file, self.secret.encode())
        host = {"nqn": HOST, "dhchap_key_file": str(key_file)}
        namespace = {"nsid": 1, "store": "memory", "size_bytes": self.size}
        known = {"nqn": NQN, "hosts": [host], "namespaces": [namespace]}
        traddr, trsvcid = self.address
        self.listener = Listener(Nothing(), traddr=traddr, trsvcid=trsvcid)
        await self.listener.start()
        self.address = self.listener.address
        self.plain = PlainSubsystems(self.listener)
        await self.plain.apply([SubsystemConfig.model_validate(known)])

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        await self.plain.close()
        await self.listener.stop()

    @property
    def front_end(self) -> FrontEnd:
        """Return the namespace's address, with the secret of the permitted host."""
        traddr, trsvcid = self.address
        return FrontEnd(
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=NQN,
            namespace_id=1,
            host_nqn=HOST,
            secret=SECRET,
        )

    def disk(self, *, secret: str = SECRET, hold_seconds: float = 20.0) -> Disk:
        """Open a disk on it."""
        front_end = dataclasses.replace(self.front_end, secret=secret)
        return Disk(front_end, timeout_seconds=20.0, hold_seconds=hold_seconds)


async def write_and_check(disk: Disk, offset: int, length: int, *, rounds: int) -> None:
    """Write to a range of its own; check that the last write can always be read."""
    last = bytes(length)
    for number in range(rounds):
        assert await disk.read(offset, length) == last
        last = bytes([number + 1]) * length
        await disk.write(offset, last)
        assert await disk.read(offset, length) == last


class ThreadedTarget:
    """A plain target on its own thread, for callers without an event loop; a context manager."""

    def __init__(self, directory: Path) -> None:
        self._target = PlainTarget(directory)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> FrontEnd:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._target.start(), self._loop).result()
        return self._target.front_end

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._target.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
