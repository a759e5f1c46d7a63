"""The data paths of a plain namespace and of a sealed volume, as threads of this process.

The sealed volume can be loaded on the gateway's own queue, where the gateway is the initiator as in
the sNVMe-oF paper, or through the gateway's front end, which adds an NVMe/TCP hop.
"""

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from benchmarks.storage.cells import Cell, Sample
from benchmarks.storage_path.drive import Drive

from sealane import _native
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.protocol.nvme.constants import (
    FRONT_TRANSFER_BYTES,
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    NAMESPACE_ID,
    QUEUE_DEPTH_MAX,
    SECURE_TRANSFER_BYTES,
)

PLAIN: Final = "plain"
SECURE: Final = "secure"
FRONT_END: Final = "front end"
SYSTEMS: Final = (PLAIN, SECURE, FRONT_END)
WARM_UP_SECONDS: Final = 0.15
PREFILL_BYTES: Final = 128 << 10
_LONG_NS: Final = 10**9 * 86_400
_BLOCK_BYTES: Final = 4096
_EPOCH: Final = 1
_INCARNATION: Final = 1
_VOLUME_ID: Final = bytes(range(16))
_HOST_NQN: Final = "nqn.2026-11.dev.sealane:benchmark"
_ROLES: Final = ("target", "gateway")

Load = Callable[["_native.LoadSettings"], "_native.LoadResult"]


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a loopback connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
    ):
        far, _ = listener.accept()
        with far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setblocking(False)
            yield near, far


def queue_over(connection: socket.socket, transfer_max: int) -> "_native.HostQueueDescription":
    """Describe a queue that is already past its Connect command."""
    return {
        "descriptor": connection.fileno(),
        "queue_depth": QUEUE_DEPTH_MAX,
        "h2c_data_max": H2C_DATA_BYTES,
        "transfer_max": transfer_max,
        "in_capsule_max": IN_CAPSULE_BYTES,
        "header_digest": False,
        "data_digest": False,
        "block_bytes": _BLOCK_BYTES,
        "nsid": NAMESPACE_ID,
    }


def keys_of_queue() -> tuple["_native.SecureQueueParameters", "_native.SecureQueueParameters"]:
    """Return the parameters of a secure queue with a new key, for each of its sides."""
    secret = secrets.token_bytes(32)

    def side() -> _native.SecureQueueParameters:
        return _native.SecureQueueParameters(
            secret=bytearray(secret),
            volume_id=_VOLUME_ID,
            host_nqn=_HOST_NQN,
            queue_id=1,
            association_epoch=_EPOCH,
            incarnation=_INCARNATION,
        )

    return side(), side()


class World:
    """A plain and a sealed namespace on the same kind of store, and the paths to them."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        *,
        span_bytes: int,
        drive: Drive | None = None,
        directory: Path | None = None,
        permitted: bool = True,
    ) -> None:
        """`permitted`: the target checks its host's permit, as in production."""
        self._permit: _native.Permit | None = _native.Permit() if permitted else None
        if self._permit is not None:
            self._permit.extend(monotonic_ns() + _LONG_NS)
        self._stack = stack
        self._local = stack.enter_context(contextlib.ExitStack())
        self._span_bytes = span_bytes
        blocks = span_bytes // _BLOCK_BYTES
        store = "memory" if drive is None else "emulated"
        if directory is not None:
            store = "file"
        self._store: Literal["memory", "emulated", "file"] = store
        self._directory = directory
        self._plain = self._controller(drive and drive.plain, blocks, sealed=False)
        self._sealed = self._controller(drive and drive.sealed, blocks, sealed=True)
        self._volume = _native.GatewayVolume(
            volume_id=_VOLUME_ID,
            generation=1,
            sector_count=blocks,
            oldest_key_epoch=1,
            key_epoch=1,
            key=bytearray(secrets.token_bytes(32)),
        )
        stack.callback(self._volume.close_queues)
        # Nobody else has this key, so all of its counters are free to use.
        self._volume.add_counters(broker_instance=1, start_epoch=1, start=1 << 20, end=1 << 55)
        self._loads: Mapping[str, Load] = {
            PLAIN: self._over(self._plain_queue(), FRONT_TRANSFER_BYTES),
            SECURE: self._at_gateway,
            FRONT_END: self._over(self._front_queue(), FRONT_TRANSFER_BYTES),
        }

    def prefill(self, systems: tuple[str, ...]) -> None:
        """Write everything once: reading unwritten blocks would be too cheap."""
        for system in {PLAIN if system == PLAIN else SECURE for system in systems}:
            settings = self._settings(PREFILL_BYTES, depth=8, seconds=0.5)
            settings["is_write"] = True
            # Each load starts at the beginning of the span: one has to reach the end.
            while self._loads[system](settings)["bytes"] < self._span_bytes:
                settings["seconds"] *= 2

    def measure(self, system: str, cell: Cell, *, seconds: float, round_: int) -> Sample:
        """Warm up, run the load for `seconds`, and return a sample with processor time by role."""
        settings = self._settings(cell.io_bytes, depth=cell.depth, seconds=seconds)
        settings["is_write"] = cell.operation == "write"
        settings["is_random"] = cell.pattern == "random"
        settings["seed"] = round_
        load = self._loads[system]
        load({**settings, "seconds": WARM_UP_SECONDS})
        before = thread_seconds()
        result = load(settings)
        commands = max(result["commands"], 1)
        spent = dict.fromkeys(_ROLES, 0.0)
        for thread, seconds_now in thread_seconds().items():
            spent[thread[0]] += seconds_now - before.get(thread, 0.0)
        # On the gateway's own queue, one thread is both load and gateway.
        if system == SECURE:
            spent["gateway"] = result["cpu_seconds"]
        else:
            spent["load"] = result["cpu_seconds"]
        return Sample(
            system=system,
            cell=cell.name,
            round=round_,
            commands=result["commands"],
            seconds=result["seconds"],
            bytes_per_second=result["bytes"] / result["seconds"],
            commands_per_second=result["commands"] / result["seconds"],
            latency_p50_us=result["latency_p50_us"],
            latency_p99_us=result["latency_p99_us"],
            latency_p999_us=result["latency_p999_us"],
            cpu_us_per_command={
                role: value * 1e6 / commands for role, value in spent.items() if value
            },
        )

    def _settings(self, io_bytes: int, *, depth: int, seconds: float) -> "_native.LoadSettings":
        return {
            "is_write": False,
            "is_random": False,
            "io_bytes": io_bytes,
            "depth": depth,
            "span_bytes": self._span_bytes,
            "seconds": seconds,
            "seed": 1,
            "is_verified": False,
        }

    def _controller(self, drive: str | None, blocks: int, *, sealed: bool) -> "_native.Controller":
        path = self._directory and self._directory / f"storage-path-{secrets.token_hex(4)}"
        namespace = _native.Namespace(
            store=self._store, block_count=blocks, sealed=sealed, drive=drive, path=path
        )
        if path is not None:
            # The open namespace keeps the file alive; closing it frees the space.
            path.unlink()
        controller = _native.Controller(
            association=1,
            host_nqn=_HOST_NQN,
            host_id=bytes(16),
            controller_id=1,
            permit=self._permit if sealed else None,
        )
        controller.set_namespaces([(NAMESPACE_ID, namespace, "optimized")])
        self._stack.callback(namespace.close)
        self._stack.callback(controller.close)
        return controller

    def _over(self, connection: socket.socket, transfer_max: int) -> Load:
        return lambda settings: _native.run_load([queue_over(connection, transfer_max)], settings)

    def _plain_queue(self) -> socket.socket:
        near, far = self._stack.enter_context(connected())
        self._plain.start_queue(
            far.fileno(),
            queue_id=1,
            queue_depth=QUEUE_DEPTH_MAX,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            transfer_max=FRONT_TRANSFER_BYTES,
            success_flag=True,
        )
        return near

    def _serve_sealed(self, far: socket.socket, keys: "_native.SecureQueueParameters") -> None:
        self._sealed.start_queue(
            far.fileno(),
            queue_id=1,
            queue_depth=QUEUE_DEPTH_MAX,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            transfer_max=SECURE_TRANSFER_BYTES,
            secure=keys,
        )

    def _front_queue(self) -> socket.socket:
        near, far = self._stack.enter_context(connected())
        back, served = self._stack.enter_context(connected())
        ours, theirs = keys_of_queue()
        self._serve_sealed(served, theirs)
        self._volume.start_queue(
            far.fileno(),
            association=1,
            queue_id=1,
            queue_depth=QUEUE_DEPTH_MAX,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            transfer_max=FRONT_TRANSFER_BYTES,
            success_flag=True,
        )
        self._volume.replace_back(
            back.fileno(),
            association=1,
            queue_id=1,
            queue_depth=QUEUE_DEPTH_MAX,
            h2c_data_max=H2C_DATA_BYTES,
            transfer_max=SECURE_TRANSFER_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            association_epoch=_EPOCH,
            incarnation=_INCARNATION,
            confirmed=b"",
            milestone=b"",
            secure=ours,
        )
        return near

    def _at_gateway(self, settings: "_native.LoadSettings") -> "_native.LoadResult":
        # Each load has its own queue. The target's thread stays until the next load, so that its
        # processor time can still be read.
        self._local.close()
        near, far = self._local.enter_context(connected())
        ours, theirs = keys_of_queue()
        self._serve_sealed(far, theirs)
        return self._volume.run_load(
            queue_over(near, SECURE_TRANSFER_BYTES),
            settings,
            association_epoch=_EPOCH,
            incarnation=_INCARNATION,
            secure=ours,
        )


def thread_seconds() -> dict[tuple[str, str], float]:
    """Return the processor time so far of each thread with a role, by role and thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may end meanwhile
            name = (task / "comm").read_text().partition("-")[0].strip()
            # The target's: it makes changes of the store durable.
            role = "target" if name == "store" else name
            if role in _ROLES:
                nanoseconds = int((task / "schedstat").read_text().split()[0])
                found[role, task.name] = nanoseconds / 1e9
    return found
