"""The users' side of labs: launch, find, query, enter and end them."""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from sealane.errors import Error, UnavailableError, UsageError
from sealane.lab import kernel
from sealane.lab.names import PEER_CREDENTIALS, lab_names, socket_address
from sealane.lab.topology import Topology

_ANSWER_SECONDS: Final = 30.0
_DOWN_SECONDS: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
"""From <linux/prctl.h>."""
_AWAITED: Final = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""Signals awaited while a command runs: one to pass on, and the command's end."""
_ERRORS: Final[Mapping[int, type[Error]]] = {2: UsageError, 4: UnavailableError}


class LabConnection:
    """A connection to the holder of a lab.

    UsageError `lab.unknown` if no lab of that name is running, `lab.foreign` if it is not ours.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_SECONDS)
        try:
            self._socket.connect(socket_address(name, os.geteuid()))
        except OSError as error:
            self._socket.close()
            raise UsageError(
                "lab.unknown", f"lab {name} is not running; {_running(os.geteuid())}"
            ) from error
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        self.pid, user, _ = PEER_CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            self._socket.close()
            raise UsageError("lab.foreign", f"lab {name} belongs to user id {user}")
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def ask(self, request: str, **fields: object) -> dict[str, Any]:
        """Send a request and return the answer.

        The holder's error, or UnavailableError `lab.ended` if the holder has ended.
        """
        try:
            self._socket.sendall(json.dumps({"request": request, **fields}).encode() + b"\n")
            line = self._lines.readline()
        except OSError:
            line = b""
        if not line:
            raise UnavailableError("lab.ended", f"lab {self.name} has ended")
        return _checked(json.loads(line))

    def end(self) -> None:
        """End the lab and wait for its end; kill it if it doesn't end in time.

        UnavailableError `lab.down` if even that fails.
        """
        # By a descriptor, the end is noticed even if the pid is reused.
        process = os.pidfd_open(self.pid)
        try:
            with contextlib.suppress(UnavailableError):
                self.ask("down")
            if not _ended(process):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                if not _ended(process):
                    raise UnavailableError(
                        "lab.down", f"lab {self.name} does not end, though killed"
                    )
        finally:
            os.close(process)


def _ended(process: int) -> bool:
    return bool(select.select([process], [], [], _DOWN_SECONDS)[0])


def _running(user: int) -> str:
    names = lab_names(user)
    return f"running: {', '.join(names)}" if names else "no lab is running"


def the_only_lab() -> str:
    """Return the name of the only running lab; UsageError `lab.which` if there isn't just one."""
    names = lab_names(os.geteuid())
    if len(names) != 1:
        raise UsageError("lab.which", f"name the lab; {_running(os.geteuid())}")
    return names[0]


def launch(
    name: str, topology: Topology, *, relays: bool, unmeasured: bool = False
) -> dict[str, Any]:
    """Start a lab and return its status once it runs; the holder's error if it can't start.

    With namespaces, later children of this process belong to the lab's PID namespace.
    """
    others = 0
    for other in lab_names(os.geteuid()):
        # A lab that ends meanwhile needs no capacity.
        with contextlib.suppress(Error), LabConnection(other) as connection:
            others += connection.ask("status")["packets_per_second"]
    parameters = {
        "name": name,
        "topology": topology.model_dump(),
        "relays": relays,
        "unmeasured": unmeasured,
        "others": others,
    }
    if not relays:
        kernel.unshare(kernel.CLONE_NEWPID)
    with subprocess.Popen(
        [sys.executable, "-m", "sealane.lab.holder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as holder:
        if holder.stdin is None or holder.stdout is None:
            raise UnavailableError("lab.start", "the holder has no pipes")
        holder.stdin.write(json.dumps(parameters).encode() + b"\n")
        holder.stdin.close()
        line = holder.stdout.readline()
        if not line:
            raise UnavailableError("lab.start", f"the holder ended with exit code {holder.wait()}")
        # The holder outlives this process: don't wait for it.
        holder.returncode = 0
    return _checked(json.loads(line))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        reason, text, code = answer["error"]
        raise _ERRORS.get(code, Error)(reason, text)
    return answer


def run_inside(connection: LabConnection, host: str, command: Sequence[str]) -> int:
    """Run a command on `host` and return its exit code (128 plus the number of a signal).

    The command is killed when this process or the lab ends. UsageError `lab.host`, `lab.command`;
    UnavailableError `lab.enter`.
    """
    entry = connection.ask("host", host=host)
    status = connection.ask("status")
    environment = os.environ | {"SEALANE_LAB": connection.name, "SEALANE_LAB_HOST": host}
    for wan, address in status["relays"].items():
        environment[f"SEALANE_LAB_{wan.upper().replace('-', '_')}"] = address
    network = None
    if entry["descriptor"] is not None:
        holder = Path(f"/proc/{connection.pid}")
        network = os.open(holder / "fd" / str(entry["descriptor"]), os.O_RDONLY)
        processes = os.open(holder / "ns" / "pid", os.O_RDONLY)
        kernel.enter(processes, kernel.CLONE_NEWPID)
        os.close(processes)

    # Ctrl-C reaches the command directly, as it is in the same process group.
    signal.signal(signal.SIGINT, lambda *_: None)
    # Awaited, not handled, since a handler might run only after the command's end. If our parent
    # ignored SIGCHLD, it wouldn't be sent.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)

    def prepare() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if network is not None:
            _become_host(network, entry["hosts_file"])
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=prepare,  # noqa: PLW1509 - this program has one thread
        )
    except OSError as error:
        raise UsageError("lab.command", f"{command[0]}: {error.strerror}") from error
    except subprocess.SubprocessError as error:
        raise UnavailableError("lab.enter", f"host {host} can't be entered: {error}") from error

    while (code := process.poll()) is None:
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            process.send_signal(signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _become_host(network: int, hosts: str) -> None:
    """Move this process into a host: its network, processes, /etc/hosts and /sys."""
    kernel.enter(network, kernel.CLONE_NEWNET)
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", Path("/"), None, kernel.MS_REC | kernel.MS_SLAVE)
    kernel.mount("proc", Path("/proc"), "proc")
    system = Path("/sys")
    names = Path("/etc/hosts")
    if names.exists():
        # A file system for a single file, which stays reachable only through its bind mount.
        kernel.mount("tmpfs", system, "tmpfs")
        (system / "hosts").write_text(hosts)
        kernel.mount(str(system / "hosts"), names, None, kernel.MS_BIND)
        kernel.unmount(system)
    kernel.mount("sysfs", system, "sysfs")
