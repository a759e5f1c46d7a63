"""Machines with Debian 12 and real systemd, each a container with a network of its own.

systemd-nspawn boots them in about a second. A machine's file system is a layer over an image that
all share, and is gone when the machine is. Commands run as root, beside the machine's services.
"""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BOOT_SECONDS = 60
COMMAND_SECONDS = 120

PYTHON = "/usr/lib/sealane/bin/python3"
"""The package's Python, on a machine."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# systemd-nspawn keeps its files in /run, which must be in memory.
_BOOT = """
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
exec systemd-nspawn --quiet --register=no --keep-unit --boot --console=pipe --private-network \
    --machine="$3" --link-journal=no --directory="$2/root"
"""


@dataclass
class Machine:
    """A booted machine."""

    name: str
    directory: Path
    init: int
    """Process id here of its first process."""

    @property
    def entering(self) -> list[str]:
        """Command prefix that runs a command there."""
        return ["nsenter", f"--target={self.init}", "--all", "--wdns=/", "--"]

    @property
    def networking(self) -> list[str]:
        """Command prefix that runs a command of this machine in that one's network."""
        return ["nsenter", f"--target={self.init}", "--net", "--"]

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command there."""
        return subprocess.Popen(
            [*self.entering, *command],
            env={"PATH": _PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def attempt(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command there, which may fail."""
        with self.start(*command) as running:
            try:
                said, complaints = running.communicate(timeout=COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                running.kill()
                raise
        return subprocess.CompletedProcess(command, running.returncode, said, complaints)

    def run(self, *command: str) -> str:
        """Run a command there, which must succeed; return its output."""
        ended = self.attempt(*command)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}\n{self.journal()}"
        return ended.stdout

    def shell(self, script: str) -> str:
        """Run a script there, which must succeed; return its output."""
        return self.run("sh", "-euc", script)

    def run_block(self, block: str) -> str:
        """Run a block of a document there, in root's home; return its output."""
        return self.run("bash", "-eu", "-o", "pipefail", "-c", f"cd; {block}")

    def property(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def journal(self, unit: str = "sealaned*", *options: str) -> str:
        """Return what units have logged."""
        return self.attempt("journalctl", "--output=cat", f"--unit={unit}", *options).stdout

    def put(self, source: Path, path: str) -> None:
        """Copy a file to the machine."""
        self.write(path, source.read_bytes())

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file there, and make its directory."""
        script = 'mkdir -p "${0%/*}" && cat > "$0" && chmod "$1" "$0"'
        subprocess.run(
            [*self.entering, "sh", "-euc", script, path, f"{mode:o}"], input=content, check=True
        )


@contextlib.contextmanager
def booted(image: str, name: str = "sealane-1", *, kept: Path | None = None) -> Iterator[Machine]:
    """Boot a machine from an image: the directories of its layers, the highest first, with colons.

    `kept` is the directory of a machine that was booted before, which then boots again.
    """
    with contextlib.ExitStack() as stack:
        directory = kept or stack.enter_context(layer())
        console = directory / "console"
        with console.open("ab") as log:
            running = subprocess.Popen(
                ["unshare", "--mount", "sh", "-euc", _BOOT, "sh", image, str(directory), name],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            machine = Machine(name, directory, _init_of(running, console))
            _await_boot(machine)
            yield machine
        finally:
            # SIGTERM makes systemd-nspawn shut the machine down in order.
            running.terminate()
            try:
                running.wait(BOOT_SECONDS)
            finally:
                running.kill()


def link(one: tuple[Machine, str], other: tuple[Machine, str]) -> None:
    """Join two machines, each with its address, with a cable that leads to the other only."""
    (here, _), (there, _) = one, other
    subprocess.run(
        [
            *(*here.networking, "ip", "link", "add", f"to-{there.name[:9]}", "type", "veth"),
            *("peer", "name", f"to-{here.name[:9]}", "netns", str(there.init)),
        ],
        check=True,
    )
    for (machine, address), (peer, far) in ((one, other), (other, one)):
        device = f"to-{peer.name[:9]}"
        for arguments in (
            ("addr", "add", address, "peer", far, "dev", device),
            ("link", "set", device, "up"),
        ):
            subprocess.run([*machine.networking, "ip", *arguments], check=True)


@contextlib.contextmanager
def layer() -> Iterator[Path]:
    """Yield a directory for a machine's changes, in memory."""
    with tempfile.TemporaryDirectory(prefix="sealane-lab-", dir="/dev/shm") as made:
        for name in ("upper", "work", "root"):
            Path(made, name).mkdir()
        yield Path(made)


def _init_of(running: subprocess.Popen[bytes], console: Path) -> int:
    """Return the process that is the first one of a new machine, once it runs systemd."""
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline and running.poll() is None:
        for pid in _descendants(running.pid):
            with contextlib.suppress(OSError):
                numbers = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2]
                is_first = numbers.partition("\n")[0].split()[-1] == "1"
                if is_first and Path(f"/proc/{pid}/exe").readlink().name == "systemd":
                    return pid
        time.sleep(0.02)
    raise AssertionError(f"the machine did not boot:\n{console.read_text()}")


def _await_boot(machine: Machine) -> None:
    deadline = time.monotonic() + BOOT_SECONDS
    state = ""
    # Says nothing before systemd answers.
    while state in {"", "offline\n"} and time.monotonic() < deadline:
        state = machine.attempt("systemctl", "is-system-running", "--wait").stdout
    failed = machine.attempt("systemctl", "--failed", "--no-legend", "--plain").stdout
    assert state == "running\n", f"{state}{failed}"


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))
