"""Configurations and real daemon processes for tests of the control plane."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patience import PATIENCE_SECONDS
from sealane.crypto.evidence.software import SoftwareKey


@dataclass
class Site:
    """A directory with keys, a policy and the configurations of daemons."""

    root: Path
    tenant: str = "t"
    tenants: dict[str, str] = field(default_factory=dict)
    keys: dict[str, SoftwareKey] = field(default_factory=dict)
    policy_version: int = 0

    def __post_init__(self) -> None:
        write_key(self.root / "kek", bytes(range(32)))

    def key(self, name: str) -> SoftwareKey:
        """Return the attestation key file of a node; create it on first use."""
        if name not in self.keys:
            self.keys[name] = SoftwareKey.create()
            write_key(self.root / f"{name}.pem", self.keys[name].pem())
        return self.keys[name]

    def write_policy(self, nodes: dict[str, list[str]], *, allowed: bool = True) -> Path:
        """Allow each node its roles."""
        self.policy_version += 1
        lines = [f"version = {self.policy_version}", "[software]"]
        lines.append(f"allowed = {str(allowed).lower()}")
        for node, roles in nodes.items():
            lines += [
                "[[software.key]]",
                f'fingerprint = "{self.key(node).fingerprint}"',
                f'nodes = ["{node}"]',
                f"roles = {json.dumps(roles)}",
                f'tenant = "{self.tenants.get(node, self.tenant)}"',
            ]
        path = self.root / "policy.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def write_config(self, name: str, text: str) -> Path:
        """Write a configuration with state and run directories under the root."""
        path = self.root / f"{name}.toml"
        path.write_text(
            f'[node]\nname = "{name}"\nstate_dir = "{self.root / name}"\n'
            f'run_dir = "{self.root / (name + "-run")}"\n{text}'
        )
        return path

    def broker_config(
        self,
        name: str = "broker",
        *,
        listen: str = "127.0.0.1:0",
        instance: int | None = None,
        etcd: Sequence[str] = (),
        more: str = "",
    ) -> Path:
        """Write the configuration of a broker on SQLite, or on the etcd at these endpoints."""
        if instance is not None:
            more = f"instance = {instance}\n{more}"
        if etcd:
            more += f'store = "etcd"\n[broker.etcd]\nendpoints = {json.dumps([*etcd])}\n'
        return self.write_config(
            name,
            f'[broker]\nlisten = "{listen}"\n'
            f'attestation_listen = "{listen.rpartition(":")[0]}:0"\n'
            f'policy_file = "{self.root / "policy.toml"}"\nkey_file = "{self.root / "kek"}"\n'
            f"allow_unsigned_policy = true\n{more}",
        )

    def enrolment(
        self,
        name: str,
        broker: "Daemon",
        *,
        others: Mapping[str, "Daemon"] | None = None,
        timeout_seconds: int = 20,
    ) -> str:
        """Return an [enrolment] section, with brokers besides `broker` by name."""
        self.key(name)
        section = (
            f'[enrolment]\nbroker_address = "{broker.addresses["broker"]}"\n'
            f'attestation_address = "{broker.addresses["attestation"]}"\n'
            f'trust_anchor = "{self.root / "broker" / "trust-anchor.pem"}"\n'
            f'evidence = "software"\nkey_file = "{self.root / (name + ".pem")}"\n'
            f"timeout_seconds = {timeout_seconds}\n"
        )
        for node, other in (others or {}).items():
            section += (
                f'[[enrolment.other_brokers]]\nnode = "{node}"\n'
                f'address = "{other.addresses["broker"]}"\n'
                f'attestation_address = "{other.addresses["attestation"]}"\n'
            )
        return section


def write_key(path: Path, content: bytes) -> None:
    """Write a key file with the permissions that sealaned requires."""
    path.write_bytes(content)
    path.chmod(0o600)


@dataclass
class Daemon:
    """A running sealaned."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    log: Path
    addresses: dict[str, str]
    was_killed: bool = False

    @property
    def socket(self) -> str:
        """Unix socket."""
        return self.addresses["socket"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the daemon and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL; its exit code isn't checked."""
        self.was_killed = True
        self.process.kill()
        self.process.wait()

    def log_lines(self) -> list[dict[str, object]]:
        """Return the lines logged so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """Yield a directory whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        yield Path(name)


@contextlib.contextmanager
def start(
    config: Path, *, prefix: Sequence[str] = (), descriptors: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Start sealaned with a command that execs it; stop it at the end of the block.

    The command inherits `descriptors`.
    """
    with config.with_suffix(".log").open("wb") as sink:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "sealane.daemon.main", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            pass_fds=descriptors,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def daemon(
    config: Path,
    *,
    exit_code: int = 0,
    prefix: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> Iterator[Daemon]:
    """Run sealaned until the end of the block; it must then exit with `exit_code`."""
    run_dir = config.with_name(f"{config.stem}-run")
    log = config.with_suffix(".log")
    with start(config, prefix=prefix, descriptors=descriptors) as process:
        addresses = _wait_ready(process, run_dir / "ready.json", log)
        running = Daemon(process, run_dir, log, addresses)
        yield running
        if not running.was_killed:
            assert running.stop() == exit_code, log.read_text()


def wait_for_log(process: subprocess.Popen[bytes], config: Path, event: str) -> None:
    """Wait until the daemon has logged `event`."""
    log = config.with_suffix(".log")
    # Poll, because another process writes the file.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if f'"event": "{event}"' in log.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"sealaned did not log {event}:\n{log.read_text()}")


def sealaned(*arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """Run sealaned until it exits."""
    return _run("sealane.daemon.main", *arguments)


def sealanectl(*arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """Run sealanectl until it exits."""
    return _run("sealane.cli.ctl", *arguments)


def _run(module: str, *arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, str]:
    # Poll, because another process creates the file.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        # A killed daemon leaves its file; the next one replaces it.
        with contextlib.suppress(FileNotFoundError):
            content = json.loads(ready.read_text())
            if content["pid"] == process.pid:
                addresses: dict[str, str] = content["addresses"]
                return addresses
        time.sleep(0.02)
    raise AssertionError(f"sealaned did not get ready:\n{log.read_text()}")
