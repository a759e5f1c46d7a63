"""Labs as those see them who use them: launch, find, ask, enter, end."""

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
"""What happens while a command runs: a signal to pass on, or its end."""
_ERRORS: Final[Mapping[int, type[Error]]] = {2: UsageError, 4: UnavailableError}


class LabConnection:
    """A conversation with the holder of a lab."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_SECONDS)
        try:
            self._socket.connect(socket_address(name, os.geteuid()))
        except OSError as error:
            self._socket.close()
            raise UsageError(
                "lab.unknown", f"no lab {name} runs ({_running(os.geteuid())})"
            ) from error
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        self.pid, user, _ = PEER_CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            self._socket.close()
            raise UsageError("lab.foreign", f"lab {name} is held by user {user}, not by this one")
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def ask(self, request: str, **fields: object) -> dict[str, Any]:
        """Ask one thing; Error as the holder gives it, UnavailableError if it is gone."""
        try:
            self._socket.sendall(json.dumps({"request": request, **fields}).encode() + b"\n")
            line = self._lines.readline()
        except OSError:
            line = b""
        if not line:
            raise UnavailableError("lab.ended", f"lab {self.name} has ended")
        return _checked(json.loads(line))

    def end(self) -> None:
        """Take the lab down and wait until it is gone; by force if it doesn't answer."""
        # Its end is seen whatever becomes of its number.
        process = os.pidfd_open(self.pid)
        try:
            with contextlib.suppress(UnavailableError):
                self.ask("down")
            if not _ended(process):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                if not _ended(process):
                    raise UnavailableError("lab.down", f"lab {self.name} does not end")
        finally:
            os.close(process)


def _ended(process: int) -> bool:
    return bool(select.select([process], [], [], _DOWN_SECONDS)[0])


def _running(user: int) -> str:
    names = lab_names(user)
    return f"running: {', '.join(names)}" if names else "none does"


def the_only_lab() -> str:
    """Return the name of the lab that runs; UsageError if that is none or several."""
    names = lab_names(os.geteuid())
    if len(names) != 1:
        raise UsageError("lab.which", f"say which lab ({_running(os.geteuid())})")
    return names[0]


def launch(
    name: str, topology: Topology, *, relays: bool, unmeasured: bool = False
) -> dict[str, Any]:
    """Start a lab and return its status once it runs; Error with the holder's reason if it can't.

    In namespaces, the caller's later children belong to the lab's PID namespace.
    """
    others = 0
    for other in lab_names(os.geteuid()):
        # One that ends meanwhile asks for nothing.
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
            raise UnavailableError("lab.start", f"the holder ended with {holder.wait()}")
        # It lives on by itself: there is nothing to wait for.
        holder.returncode = 0
    return _checked(json.loads(line))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        reason, text, code = answer["error"]
        raise _ERRORS.get(code, Error)(reason, text)
    return answer


def run_inside(connection: LabConnection, host: str, command: Sequence[str]) -> int:
    """Run a command as `host` and return its exit code (128 and the number of a signal).

    It ends with this process, and with the lab. UsageError if there is no such command or host.
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

    # Ctrl-C reaches the command by itself, being in the same process group.
    signal.signal(signal.SIGINT, lambda *_: None)
    # Awaited, not handled: a handler's turn may come only after the command's end. SIGCHLD may have
    # been ignored by who started us, and is not sent then.
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
    """Move this process into a host: its network, processes, names and /sys."""
    kernel.enter(network, kernel.CLONE_NEWNET)
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", Path("/"), None, kernel.MS_REC | kernel.MS_SLAVE)
    kernel.mount("proc", Path("/proc"), "proc")
    system = Path("/sys")
    names = Path("/etc/hosts")
    if names.exists():
        # A file system of its own for one file, reached through its binding alone.
        kernel.mount("tmpfs", system, "tmpfs")
        (system / "hosts").write_text(hosts)
        kernel.mount(str(system / "hosts"), names, None, kernel.MS_BIND)
        kernel.unmount(system)
    kernel.mount("sysfs", system, "sysfs")
