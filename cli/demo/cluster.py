"""Starts the demo's daemons as processes on this machine, and always stops them again."""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.crypto.evidence.software import SoftwareKey
from sealane.daemon.broker.anchor_files import TRUST_ANCHOR_NAME
from sealane.errors import Error, UnavailableError, UsageError, VerificationError

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 30.0
PR_SET_PDEATHSIG: Final = 1
TENANT: Final = "demo"
# Well above the link's rate: the demo's sessions choose their own.
RATE_MAX_BITS_PER_SECOND: Final = 10_000_000_000
REGION_BYTES_MAX: Final = 1 << 28
CARD_LABEL: Final = "card"
_CARD_POLICY: Final = """
[[reference]]
name = "cards"
evidence = "card"
product = "bf3-dpdk"
roles = ["gateway"]
measurements = { firmware = "any" }
flags = { protected_bus = false }
tcb = {}
tcb_statuses = []
advisories = []
properties = {}
certified_keys = []
secondary = []
accepted_tier = "warning"
"""

_libc = ctypes.CDLL(None, use_errno=True)
_FAMILIES: Final = {2: UsageError, 3: VerificationError, 4: UnavailableError}


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A running `sealaned` and its addresses."""

    name: str
    pid: int
    run_dir: Path
    state_dir: Path
    addresses: dict[str, str]

    @property
    def socket(self) -> Path:
        """The Unix socket for local callers."""
        return Path(self.addresses["socket"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFiles:
    """Program and files of an emulated accelerator card, and its maker's certificate."""

    program: Path
    socket: Path
    key: Path
    certificates: Path
    roots: Path
    hardware_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The demo's daemons."""

    broker: Daemon
    target: Daemon
    gateway: Daemon
    fabric_near: Daemon
    fabric_far: Daemon

    @property
    def store_directory(self) -> Path:
        """The directory in which the target stores volumes."""
        return self.target.state_dir / "volumes"


def die_with_parent() -> None:
    """Make the kernel end this process when the demo ends, even if by SIGKILL."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ClusterBuilder:
    """Writes configurations, starts daemons one after the other, and stops them in reverse."""

    def __init__(
        self, scratch: Path, announce: Callable[[str], None], *, card: CardFiles | None = None
    ) -> None:
        """Build in `scratch`; with `card`, the gateway may use that one."""
        self._card = card
        self._scratch = scratch
        self._announce = announce
        self._keys = {
            name: SoftwareKey.create()
            for name in ("target", "gateway", "fabric-near", "fabric-far")
        }

    @contextlib.asynccontextmanager
    async def storage(self, **target: object) -> AsyncIterator[tuple[Daemon, Daemon, Daemon]]:
        """Start broker, target (with these settings) and gateway; stop them in reverse."""
        async with contextlib.AsyncExitStack() as stack:
            broker = await stack.enter_async_context(self._daemon("broker", self._broker()))
            enrolment = self._enrolment(broker)
            gateway_sections = enrolment("gateway")
            accelerator: dict[str, object] = {}
            if self._card is not None:
                accelerator = {"accelerator": CARD_LABEL}
                source = {"label": CARD_LABEL, "type": "card", "socket": str(self._card.socket)}
                gateway_sections["enrolment"]["secondary"] = [source]
            addresses = {"listen": "127.0.0.1:0", "control_listen": "127.0.0.1:0"}
            target_daemon = await stack.enter_async_context(
                self._daemon("target", {**enrolment("target"), "target": {**addresses, **target}})
            )
            gateway = await stack.enter_async_context(
                self._daemon(
                    "gateway",
                    {
                        **gateway_sections,
                        "gateway": {
                            **accelerator,
                            "listen": "127.0.0.1:0",
                            "target_node": "target",
                            "target_address": target_daemon.addresses["target_control"],
                        },
                    },
                )
            )
            yield broker, target_daemon, gateway

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        """Start everything; stop everything when the block is left."""
        async with contextlib.AsyncExitStack() as stack:
            # As on a drive with metadata, which makes sectors easy for the disk's owner to find.
            storage = self.storage(store="inline")
            broker, target, gateway = await stack.enter_async_context(storage)
            enrolment = self._enrolment(broker)
            fabrics = [
                await stack.enter_async_context(
                    self._daemon(
                        name,
                        {
                            **enrolment(name),
                            "fabric": {
                                "control_listen": "127.0.0.1:0",
                                "data_listen": "127.0.0.1",
                                "rate_max_bits_per_second": RATE_MAX_BITS_PER_SECOND,
                                "region_bytes_max": REGION_BYTES_MAX,
                            },
                        },
                    )
                )
                for name in ("fabric-near", "fabric-far")
            ]
            yield Cluster(
                broker=broker,
                target=target,
                gateway=gateway,
                fabric_near=fabrics[0],
                fabric_far=fabrics[1],
            )

    def _broker(self) -> dict[str, dict[str, object]]:
        sections = broker_section(self._scratch, self._keys)
        if self._card is not None:
            policy = self._scratch / "policy.toml"
            text = policy.read_text().replace(
                'roles = ["gateway"]',
                f'roles = ["gateway"]\ndevices = ["{self._card.hardware_id}"]',
            )
            policy.write_text(text + _CARD_POLICY)
            sections["broker"]["card_roots"] = str(self._card.roots)
        return sections

    def _enrolment(self, broker: Daemon) -> Callable[[str], dict[str, dict[str, object]]]:
        return lambda name: enrolment(self._scratch, name, self._keys[name], broker)

    @contextlib.asynccontextmanager
    async def _daemon(
        self, name: str, sections: dict[str, dict[str, object]]
    ) -> AsyncIterator[Daemon]:
        async with daemon(self._scratch, name, sections) as started:
            self._announce(f"{name} is ready, process {started.pid}")
            yield started


@contextlib.asynccontextmanager
async def daemon(
    scratch: Path,
    name: str,
    sections: dict[str, dict[str, object]],
    *,
    enter: Callable[[], None] = lambda: None,
) -> AsyncIterator[Daemon]:
    """Start a daemon with this configuration and directories in `scratch`; stop it in the end.

    `enter` is called in the new process before anything else, to move it to a namespace. Call from
    a thread that lives longer than the daemon: the kernel ends the daemon with it.
    """

    def prepare() -> None:
        enter()
        die_with_parent()

    run_dir, state_dir = scratch / f"{name}-run", scratch / f"{name}-state"
    node: dict[str, object] = {
        "name": name,
        "run_dir": str(run_dir),
        "state_dir": str(state_dir),
    }
    config = scratch / f"{name}.toml"
    config.write_text(to_toml({"node": node, **sections}))
    log = scratch / f"{name}.log"
    notify_path = scratch / f"{name}.notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, log.open("wb") as stderr:
        notify.bind(str(notify_path))
        notify.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "sealane.daemon.main", "--config", str(config)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "NOTIFY_SOCKET": str(notify_path)},
            # Ctrl-C is the caller's to handle: it stops its daemons in order.
            start_new_session=True,
            preexec_fn=prepare,
        )
        try:
            await wait_ready(name, process, notify, log)
            document = json.loads((run_dir / "ready.json").read_text())
            yield Daemon(
                name=name,
                pid=process.pid,
                run_dir=run_dir,
                state_dir=state_dir,
                addresses=document["addresses"],
            )
        finally:
            await stop(process)


def broker_section(
    scratch: Path, keys: Mapping[str, SoftwareKey], host: str = "127.0.0.1"
) -> dict[str, dict[str, object]]:
    """Return the section [broker], with new files, of one that admits these nodes.

    Each node has the role that its name begins with.
    """
    key_file, policy_file = scratch / "broker.kek", scratch / "policy.toml"
    write_private(key_file, secrets.token_bytes(32))
    policy = ["version = 1", "[software]", "allowed = true", ""]
    for name, key in keys.items():
        role = name.partition("-")[0]
        policy += [
            "[[software.key]]",
            f'fingerprint = "{key.fingerprint}"',
            f'nodes = ["{name}"]',
            f'roles = ["{role}"]',
            f'tenant = "{TENANT}"',
            "",
        ]
    write_private(policy_file, "\n".join(policy).encode())
    return {
        "broker": {
            "listen": f"{host}:0",
            "attestation_listen": f"{host}:0",
            "policy_file": str(policy_file),
            "allow_unsigned_policy": True,
            "key_file": str(key_file),
        }
    }


def enrolment(
    scratch: Path, name: str, key: SoftwareKey, broker: Daemon
) -> dict[str, dict[str, object]]:
    """Return the section [enrolment] of a node that shows software evidence."""
    key_file = scratch / f"{name}.pem"
    write_private(key_file, key.pem())
    return {
        "enrolment": {
            "broker_address": broker.addresses["broker"],
            "attestation_address": broker.addresses["attestation"],
            "trust_anchor": str(broker.state_dir / TRUST_ANCHOR_NAME),
            "evidence": "software",
            "key_file": str(key_file),
        }
    }


async def wait_ready(
    name: str, process: asyncio.subprocess.Process, notify: socket.socket, log: Path
) -> None:
    """Wait for READY=1 on the notification socket.

    Raises the daemon's last message if it ends; UnavailableError `demo.daemon.start` at a time-out.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.ensure_future(process.wait())
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                message = asyncio.ensure_future(loop.sock_recv(notify, 4096))
                await asyncio.wait({message, ended}, return_when=asyncio.FIRST_COMPLETED)
                if message.done() and b"READY=1" in message.result().split(b"\n"):
                    return
                if ended.done():
                    message.cancel()
                    raise start_failure(name, ended.result(), log)
    except TimeoutError as error:
        raise UnavailableError(
            "demo.daemon.start", f"{name} was not ready after {START_SECONDS:.0f} s"
        ) from error
    finally:
        ended.cancel()


def start_failure(name: str, exit_code: int, log: Path) -> Error:
    """Return an error with the last line of the daemon's log, in the family of its exit code."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "its log is empty"
    family = _FAMILIES.get(exit_code, UnavailableError)
    return family("demo.daemon.start", f"{name} ended with exit code {exit_code}: {last}")


async def stop(process: asyncio.subprocess.Process) -> None:
    """Terminate a process; kill it if it doesn't end in time."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def to_toml(document: dict[str, dict[str, object]]) -> str:
    """Return tables of plain values as TOML."""
    lines: list[str] = []
    for table, values in document.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: object) -> str:
    """Return a value as TOML on one line; JSON strings, numbers and booleans are valid TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return json.dumps(value)
