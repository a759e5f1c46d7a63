"""Emulated hosts for tests: each has its own network, file system and TPM on this machine.

A host is a process in new network and mount namespaces. Its `/etc` is this machine's with the
test's files on top; its `/run`, `/var/lib` and home are empty; its network has only a link to each
other host. So commands of a document run there unchanged, with the same paths and ports on each
host, and leave nothing on this machine.

Programs that a test machine lacks are replaced: `systemctl` starts the daemon with the installed
unit's user, credentials and command line, `scp` copies between these hosts, `nvme` is our
initiator. Where only root may read this tree, daemons run as root.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

PROGRAMS = Path(sys.executable).parent
TPM_PORT = 2321
TPM_CONTROL = 2322
"""In a network of its own any port is free."""

_READY = "ready"
_NEW_ROOT = f"""
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/work" /etc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
ip link set lo up
echo {_READY}
exec sleep infinity
"""
_SYSTEMCTL = r"""#!/bin/sh -eu
case "$*" in
daemon-reload | "stop sealaned" | "start sealaned" | "enable --now sealaned") ;;
*) echo "the stand-in for systemctl has no: $*" >&2; exit 1 ;;
esac
case "$*" in
daemon-reload) exit ;;
stop*)
    kill "$(cat /run/daemon)"
    while [ -e /run/sealane/ready.json ]; do sleep 0.1; done
    exit ;;
esac
unit=/etc/systemd/system/sealaned.service
credentials=/run/credentials/sealaned.service
grep -q ^User=sealane "$unit"
user=$(as_user id -un)
install -d -m 0700 -o "$user" /run/sealane /var/lib/sealane "$credentials"
sed -n 's/^LoadCredential=//p' "$unit" >/run/wanted
while IFS=: read -r name path; do
    install -m 0400 -o "$user" "$path" "$credentials/$name"
done </run/wanted
command=$(sed -n 's/^ExecStart=.*\/sealaned /sealaned /p' "$unit")
as_user $command >/dev/null 2>>"$HOME/log" &
pid=$!
echo "$pid" >/run/daemon
until [ -e /run/sealane/ready.json ]; do
    kill -0 "$pid" 2>/dev/null || { cat "$HOME/log" >&2; exit 1; }
    sleep 0.1
done
"""
_AS_USER = r"""#!/bin/sh
user="setpriv --reuid=sealane --regid=sealane --clear-groups"
$user sealaned --version >/dev/null 2>&1 || user=
exec $user "$@"
"""
_SYSUSERS = r"""#!/bin/sh -eu
grep -q ^sealane: /etc/passwd && exit
echo 'sealane:x:59999:59999::/var/lib/sealane:/usr/sbin/nologin' >>/etc/passwd
echo 'sealane:x:59999:' >>/etc/group
"""
_SCP = r"""#!/bin/sh -eu
for last; do :; done
for from; do
    [ "$from" = "$last" ] && continue
    case "$from" in
    *:*) path=${from#*:} && "$HOSTS/${from%%:*}" cat "$path" >"$last/${path##*/}" ;;
    *)
        path="${last#*:}${from##*/}"
        "$HOSTS/${last%%:*}" install -m "$(stat -c %a "$from")" /dev/stdin "$path" <"$from"
        ;;
    esac
done
"""


@dataclass
class Host:
    """A host; its processes end with the context that created it."""

    name: str
    address: str
    root: Path
    holder: subprocess.Popen[str]

    @property
    def home(self) -> Path:
        """Path of its root user's home directory on this machine."""
        return self.root / "home"

    @property
    def log(self) -> str:
        """Return what its daemon has logged."""
        path = self.home / "log"
        return path.read_text() if path.exists() else ""

    @property
    def entering(self) -> list[str]:
        """Command prefix that runs a command there."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--"]

    def start(self, *command: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start a command there, in the home directory unless told otherwise."""
        # The mount namespace is entered at its root directory.
        moved = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd or self.home)]
        return subprocess.Popen(
            [*self.entering, *moved, *command],
            env=os.environ
            | {
                "HOME": str(self.home),
                "HOSTS": str(self.root.parent / "entering"),
                "PATH": f"{self.root.parent / 'bin'}:{PROGRAMS}:{os.environ['PATH']}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command there and return its output."""
        return end(self.start(*command, cwd=cwd), self.log)

    def run_block(self, block: str, *, cwd: Path | None = None) -> str:
        """Run a block of a document there."""
        return self.run("bash", "-eu", "-o", "pipefail", "-c", block, cwd=cwd)

    def write(self, path: str, content: bytes) -> None:
        """Write a file that only this host has."""
        subprocess.run(
            [*self.entering, "sh", "-c", f'mkdir -p "{Path(path).parent}" && cat > "{path}"'],
            input=content,
            check=True,
        )

    def stop_daemon(self) -> None:
        """Stop the daemon, if one runs, and wait for its end."""
        found = subprocess.run(
            [*self.entering, "cat", "/run/daemon"], capture_output=True, text=True, check=False
        )
        if found.returncode != 0:
            return
        pid = int(found.stdout)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        # Poll for its end, because it isn't our child.
        while _is_running(pid):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"{self.name}'s daemon did not end:\n{self.log}")
            time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def end(running: subprocess.Popen[str], log: str = "") -> str:
    """Wait for a command, which must succeed, and return its output."""
    try:
        said, complaints = running.communicate(timeout=PATIENCE_SECONDS)
    finally:
        running.kill()
    assert running.returncode == 0, f"{said}{complaints}\n{log}"
    return said


@contextlib.contextmanager
def hosts(root: Path, addresses: Mapping[str, str]) -> Iterator[dict[str, Host]]:
    """Run hosts by name, each linked to every other."""
    _write_stand_ins(root)
    with contextlib.ExitStack() as stack:
        made = {
            name: stack.enter_context(_host(root / name, name, address))
            for name, address in addresses.items()
        }
        for one, other in itertools.combinations(made.values(), 2):
            _link(one, other)
        for host in made.values():
            path = root / "entering" / host.address
            # As in scp, relative paths are below the home directory.
            path.write_text(
                f"#!/bin/sh\nexec {' '.join(host.entering)} "
                f"""sh -c 'cd "$0" && exec "$@"' {host.home} "$@"\n"""
            )
            path.chmod(0o700)
        yield made


def _write_stand_ins(root: Path) -> None:
    (root / "entering").mkdir()
    (root / "bin").mkdir()
    nothing = "#!/bin/sh\n"
    tmpfiles = "#!/bin/sh\ninstall -d -m 0750 -g sealane /etc/sealane\n"
    plain_host = Path(__file__).with_name("plain_host.py")
    for name, script in {
        "systemctl": _SYSTEMCTL,
        "as_user": _AS_USER,
        "systemd-sysusers": _SYSUSERS,
        "systemd-tmpfiles": tmpfiles,
        "scp": _SCP,
        "modprobe": nothing,
        "nvme": f'#!/bin/sh\nexec {sys.executable} {plain_host} "$@"\n',
    }.items():
        path = root / "bin" / name
        path.write_text(script)
        path.chmod(0o700)


@contextlib.contextmanager
def _host(root: Path, name: str, address: str) -> Iterator[Host]:
    for directory in ("etc", "work", "home"):
        (root / directory).mkdir(parents=True)
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-eu", "-c", _NEW_ROOT, "sh", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    host = Host(name, address, root, holder)
    with holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline().strip() != _READY:
                pytest.skip(f"no namespaces for hosts: {holder.communicate()[1].strip()}")
            try:
                yield host
            finally:
                host.stop_daemon()
        finally:
            holder.kill()


def _link(one: Host, other: Host) -> None:
    """Join two hosts with a veth pair, with a route only to the other end."""
    subprocess.run(
        [
            *(*one.entering, "ip", "link", "add", f"to-{other.name[:9]}", "type", "veth"),
            *("peer", "name", f"to-{one.name[:9]}", "netns", str(other.holder.pid)),
        ],
        check=True,
    )
    for here, there in ((one, other), (other, one)):
        device = f"to-{there.name[:9]}"
        for arguments in (
            ("addr", "add", here.address, "peer", there.address, "dev", device),
            ("link", "set", device, "up"),
        ):
            subprocess.run([*here.entering, "ip", *arguments], check=True)


@contextlib.contextmanager
def certified_tpms(machines: Mapping[str, Host], root: Path) -> Iterator[bytes]:
    """Give each host a TPM with certified endorsement keys; yield the manufacturer's roots."""
    authority = _write_maker(root)
    for host in machines.values():
        state = host.root / "tpm"
        state.mkdir()
        subprocess.run(
            [
                *("swtpm_setup", "--tpm2", "--create-ek-cert", "--runas", "root"),
                *("--tpm-state", f"dir://{state}", "--config", str(root / "setup.conf")),
            ],
            check=True,
            capture_output=True,
        )
    names = ("issuercert.pem", "swtpm-localca-rootca-cert.pem")
    with contextlib.ExitStack() as stack:
        for host in machines.values():
            stack.enter_context(_running_tpm(host))
        yield b"".join((authority / name).read_bytes() for name in names)


def _write_maker(root: Path) -> Path:
    """Write the files that swtpm_setup needs to act as a TPM manufacturer."""
    authority = root / "maker"
    authority.mkdir()
    (root / "maker.conf").write_text(
        f"statedir = {authority}\nsigningkey = {authority}/key.pem\n"
        f"issuercert = {authority}/issuercert.pem\ncertserial = {authority}/serial\n"
    )
    (root / "maker.options").write_text(
        "--platform-manufacturer Example\n--platform-version 1\n--platform-model Example\n"
    )
    (root / "setup.conf").write_text(
        f"create_certs_tool = {shutil.which('swtpm_localca')}\n"
        f"create_certs_tool_config = {root}/maker.conf\n"
        f"create_certs_tool_options = {root}/maker.options\nactive_pcr_banks = sha256\n"
    )
    return authority


@contextlib.contextmanager
def _running_tpm(host: Host) -> Iterator[None]:
    process = subprocess.Popen(
        [
            *(*host.entering, "swtpm", "socket", "--tpm2"),
            *("--tpmstate", f"dir={host.root / 'tpm'}"),
            *("--flags", "not-need-init,startup-clear"),
            *("--server", f"type=tcp,port={TPM_PORT}"),
            *("--ctrl", f"type=tcp,port={TPM_CONTROL}"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_tpm(host, process)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_for_tpm(host: Host, process: subprocess.Popen[bytes]) -> None:
    from pyroute2.netns import create_socket

    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        made = create_socket(
            f"/proc/{host.holder.pid}/ns/net", socket.AF_INET, socket.SOCK_STREAM, flags=0
        )
        with made, contextlib.suppress(OSError):
            made.settimeout(PATIENCE_SECONDS)
            made.connect(("127.0.0.1", TPM_CONTROL))
            made.sendall((1).to_bytes(4, "big"))
            if len(made.recv(4)) == 4:
                return
        time.sleep(0.05)
    raise AssertionError(f"the TPM of {host.name} does not start")
