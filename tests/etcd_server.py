"""etcd clusters as real processes on free ports, with data in memory if there is a tmpfs."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - we create our own directory in it


def require_etcd() -> str:
    """Return the path of the server, or skip."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("no etcd: make packages installs it")
    return program


@dataclass
class Member:
    """A server that can be killed and restarted."""

    name: str
    directory: Path
    client: str
    peer: str
    cluster: str
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        scheme = "https" if "--cert-file" in self.options else "http"
        with self.directory.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    require_etcd(),
                    *("--name", self.name),
                    *("--data-dir", str(self.directory)),
                    *("--listen-client-urls", f"{scheme}://{self.client}"),
                    *("--advertise-client-urls", f"{scheme}://{self.client}"),
                    *("--listen-peer-urls", f"http://{self.peer}"),
                    *("--initial-advertise-peer-urls", f"http://{self.peer}"),
                    *("--initial-cluster", self.cluster),
                    *("--heartbeat-interval", "50"),
                    *("--election-timeout", "300"),
                    *("--log-level", "error", "--logger", "zap"),
                    *self.options,
                ],
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wait_listening(self) -> None:
        host, _, port = self.client.rpartition(":")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            # Retry, because another process opens the port.
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                return
            time.sleep(0.02)
        raise AssertionError(self.directory.with_suffix(".log").read_text())


@dataclass
class Cluster:
    """All members of a cluster, whose state can be saved and restored, as an adversary would."""

    members: list[Member]
    root: Path

    @property
    def endpoints(self) -> list[str]:
        return [member.client for member in self.members]

    def start(self) -> None:
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait_listening()

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    def save(self, name: str) -> None:
        """Save the state of all members, which must be stopped."""
        for member in self.members:
            shutil.copytree(member.directory, self.root / f"{name}-{member.name}")

    def put_back(self, name: str) -> None:
        """Restore the saved state of all members, which must be stopped."""
        for member in self.members:
            shutil.rmtree(member.directory)
            shutil.copytree(self.root / f"{name}-{member.name}", member.directory)


@contextlib.contextmanager
def etcd_cluster(
    size: int = 1,
    *,
    options: tuple[str, ...] = (),
    directory: Path | None = None,
    addresses: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Run a cluster until the end of the block; its data is in memory, or in `directory`.

    `addresses` are two for each member; by default they are chosen here.
    """
    require_etcd()
    memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="sl-etcd-", dir=directory or memory) as name:
        root = Path(name)
        addresses = addresses or addresses_of_our_own(2 * size)
        peers = {f"m{i}": addresses[2 * i] for i in range(size)}
        together = ",".join(f"{member}=http://{address}" for member, address in peers.items())
        cluster = Cluster(
            [
                Member(member, root / member, addresses[2 * i + 1], peer, together, options)
                for i, (member, peer) in enumerate(peers.items())
            ],
            root,
        )
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
