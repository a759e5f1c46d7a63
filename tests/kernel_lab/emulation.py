"""Boots a guest under QEMU, runs one job in it, and answers the job's calls meanwhile."""

import contextlib
import hashlib
import os
import re
import selectors
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_lab import layout
from kernel_lab.architecture import Architecture, architecture
from kernel_lab.layout import LabError

TIMED_OUT = 124
NO_STATUS = 125

KERNEL_OPTIONS = (
    *("panic=-1", "nokaslr", "mitigations=off", "random.trust_cpu=on", "rcupdate.rcu_expedited=1"),
    *("nowatchdog", "audit=0", "apparmor=0", "cryptomgr.notests"),
)

_SIZE = re.compile(r"(\d+)([KMG])")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FORWARD = re.compile(r"(?:(udp):)?(\d+):(\d+)")
# A line of the monitor's `info usernet`: protocol, descriptor, address, port here, …, port there.
_USERNET = re.compile(r"TCP\[HOST_FORWARD\]\s+\d+\s+\S+\s+(\d+)\s+\S+\s+(\d+)")
_POLL_SECONDS = 0.1
_MONITOR_SECONDS = 30.0
_LINE_BYTES_MAX = 4096


@dataclass(frozen=True, kw_only=True)
class GuestOptions:
    """Options of a guest. Lists hold values of run-guest's options with the same names."""

    cache: Path
    job: tuple[str, ...] = ()
    shell: bool = False
    timeout: float = 120.0
    file: tuple[str, ...] = ()
    out: Path | None = None
    forward: tuple[str, ...] = ()
    network: bool = True
    tap: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    disk: tuple[str, ...] = ()
    nvme: tuple[str, ...] = ()
    tpm: Path | None = None
    memory: str = "1G"
    cpus: int = 1
    append: str = ""
    qemu: str = ""
    name: str = "guest"
    verbose: bool = False


# Called with a guest and the job's word; its result becomes lab-ready's exit status.
OnReady = Callable[["Guest", str], int]


class Guest:
    """A running guest: forwards its console and implements the host side of the control protocol.

    The guest sends lines: "ready WORD", answered with "go STATUS" once `on_ready` has ended (in a
    thread of its own, so that the guest's console goes on), and "exit STATUS" as the last.
    """

    def __init__(
        self,
        options: GuestOptions,
        directory: Path,
        *,
        console: Callable[[bytes], None],
        on_ready: OnReady,
    ) -> None:
        self._options = options
        self._console = console
        self._on_ready = on_ready
        self._deadline = None if options.shell else time.monotonic() + options.timeout
        self._control, control = socket.socketpair()
        self._monitor, monitor = socket.socketpair()
        self._monitor.settimeout(_MONITOR_SECONDS)
        self._received = b""
        self._answering: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.status: int | None = None
        self._process = subprocess.Popen(
            qemu_command(options, directory, control, monitor),
            stdin=None if options.shell else subprocess.DEVNULL,
            stdout=None if options.shell else subprocess.PIPE,
            stderr=None if options.shell else subprocess.STDOUT,
            pass_fds=[control.fileno(), monitor.fileno()],
        )
        control.close()
        monitor.close()

    def run(self) -> int:
        """Wait until the guest ends; return the job's exit status, TIMED_OUT or NO_STATUS."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, self._read_control)
            if self._process.stdout:
                selector.register(self._process.stdout, selectors.EVENT_READ, self._copy_console)
            while selector.get_map():
                if self._deadline and time.monotonic() > self._deadline:
                    self._say(f"ended after {self._options.timeout:g} s")
                    return TIMED_OUT
                for key, _ in selector.select(_POLL_SECONDS):
                    if not key.data():
                        selector.unregister(key.fileobj)
        self._process.wait()
        if self.status is None:
            self._say("the guest ended without an exit status")
            return NO_STATUS
        return self.status

    def stop(self) -> None:
        """End the guest if it still runs, and wait for a call in progress."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._answering:
            self._answering.join()
        if self._process.stdout:
            self._process.stdout.close()
        self._control.close()
        self._monitor.close()

    def cut_power(self) -> None:
        """Kill the guest, like a power failure that keeps its drives."""
        self._process.kill()

    def pause(self) -> None:
        """Stop the guest's processors. Its connections stay open, and silent."""
        self._ask("stop")

    def resume(self) -> None:
        """Let the processors go on."""
        self._ask("cont")

    def forwarded_port(self, guest_port: int) -> int:
        """Return the loopback port of this machine that leads to a port of the guest."""
        for here, there in _USERNET.findall(self._ask("info usernet")):
            if int(there) == guest_port:
                return int(here)
        raise LabError(f"port {guest_port} of the guest is not forwarded")

    def _ask(self, command: str) -> str:
        """Execute a monitor command; return its output."""
        # An unknown command marks the end: the monitor answers in order, and names it.
        mark = f"end-{time.monotonic_ns():x}"
        self._monitor.sendall(f"{command}\n{mark}\n".encode())
        answer = b""
        while f"unknown command: '{mark}'".encode() not in answer:
            data = self._monitor.recv(4096)
            if not data:
                raise LabError(f"the guest ended before its monitor answered {command!r}")
            answer += data
        return answer.decode()

    def _say(self, text: str) -> None:
        self._console(f"kernel lab: {text}\n".encode())

    def _copy_console(self) -> bool:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 65536)
        self._console(data)
        return bool(data)

    def _read_control(self) -> bool:
        try:
            data = self._control.recv(_LINE_BYTES_MAX)
        except ConnectionResetError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "exit":
                self.status = int(value)
                self._monitor.sendall(b"quit\n")
            elif word == "ready":
                self._answering = threading.Thread(target=self._answer, args=(value,))
                self._answering.start()
        return bool(data)

    def _answer(self, word: str) -> None:
        try:
            status = self._on_ready(self, word)
        except BaseException as error:  # noqa: BLE001  # raised to the caller at the guest's end
            self.failure = error
            status = 1
        with contextlib.suppress(OSError):  # the guest has ended
            self._control.sendall(b"go %d\n" % (status & 0xFF))


def run(options: GuestOptions, *, console: Callable[[bytes], None], on_ready: OnReady) -> int:
    """Boot a guest, run its job to the end, and collect what it left in /out.

    Returns as `Guest.run`. Raises LabError if there is no guest or no QEMU, and whatever
    `on_ready` raised.
    """
    qemu = architecture_of(options.cache).qemu
    if not shutil.which(qemu):
        raise LabError(f"{qemu} is not installed: make packages, or apt-get install it")
    with tempfile.TemporaryDirectory(prefix="kernel-lab-") as name:
        directory = Path(name)
        _write_initramfs(options, directory / "initramfs")
        guest = Guest(options, directory, console=console, on_ready=on_ready)
        try:
            status = guest.run()
        finally:
            guest.stop()
        collected = directory / "out.tar"
        if options.out and collected.stat().st_size:
            options.out.mkdir(parents=True, exist_ok=True)
            unpacking = ["tar", "-C", options.out, "--no-same-owner", "-xf", collected]
            subprocess.run(unpacking, check=True)
    if guest.failure is not None:
        raise guest.failure
    return status


def architecture_of(cache: Path) -> Architecture:
    """Return the processor of a built guest; LabError if there is no guest."""
    manifest = layout.read_manifest(cache) or {}
    if layout.ARCHITECTURE not in manifest:
        raise LabError(f"{cache}: no guest there; run build-guest first")
    return architecture(manifest[layout.ARCHITECTURE])


def _write_initramfs(options: GuestOptions, path: Path) -> None:
    """Append the job's files to the guest's initramfs."""
    with path.open("wb") as stream:
        stream.write((options.cache / layout.INITRAMFS).read_bytes())
        archive = layout.Cpio(stream)
        command = ["/bin/bash"]
        if options.job:
            script, *rest = options.job
            archive.tree(Path(script), "job/script")
            executable = os.access(script, os.X_OK)
            command = [*([] if executable else ["/bin/sh"]), "./script", *rest]
        for item in options.file:
            source, _, name = item.partition(":")
            archive.tree(Path(source), f"job/{name or Path(source).name}")
        archive.file("job/.run", f"exec {shlex.join(command)}\n".encode())
        archive.close()


def _disk_file(directory: Path, name: str, value: str) -> Path:
    """Yield a disk's file: an existing one, or a scratch file of a given size."""
    if Path(value).exists():
        return Path(value)
    size = _SIZE.fullmatch(value)
    if size is None:
        raise LabError(f"{value}: neither a file nor a size such as 64M")
    path = directory / f"disk-{name}"
    with path.open("wb") as stream:
        stream.truncate(int(size[1]) * _UNITS[size[2]])
    return path


def _networks(options: GuestOptions) -> Iterator[str]:
    if options.network:
        forwards = ""
        for item in options.forward:
            parts = _FORWARD.fullmatch(item)
            if parts is None:
                raise LabError(f"--forward {item}: expected two port numbers, as in 4420:4420")
            forwards += f",hostfwd={parts[1] or 'tcp'}:127.0.0.1:{parts[2]}-:{parts[3]}"
        yield f"user,ipv6=off{forwards}"
    for name in options.tap:
        yield f"tap,ifname={name},script=no,downscript=no"
    for item in options.link:
        role, _, path = item.partition(":")
        if role not in ("listen", "connect") or not path:
            raise LabError(f"--link {item}: expected listen:PATH or connect:PATH")
        server = "on" if role == "listen" else "off"
        yield f"stream,addr.type=unix,addr.path={path},server={server}"


def _devices(options: GuestOptions, directory: Path) -> Iterator[str]:
    for number, backend in enumerate(_networks(options)):
        kind, _, rest = backend.partition(",")
        yield from ("-netdev", f"{kind},id=net{number},{rest}")
        address = hashlib.sha256(f"{options.name}/{number}".encode()).digest()[:3].hex(":")
        yield from ("-device", f"virtio-net-pci,netdev=net{number},mac=52:54:00:{address}")
    for number, item in enumerate(options.disk):
        path = _disk_file(directory, f"v{number}", item)
        yield from ("-drive", f"if=none,id=disk{number},format=raw,cache=writeback,file={path}")
        yield from ("-device", f"virtio-blk-pci,drive=disk{number},serial=disk{number}")
    for number, item in enumerate(options.nvme):
        value, comma, properties = item.partition(",")
        path = _disk_file(directory, f"n{number}", value)
        yield from ("-drive", f"if=none,id=nvme{number},format=raw,file={path}")
        yield from ("-device", f"nvme,id=ctrl{number},serial=lab{number}")
        yield from ("-device", f"nvme-ns,bus=ctrl{number},drive=nvme{number}{comma}{properties}")
    if options.tpm:
        yield from ("-chardev", f"socket,id=tpm,path={options.tpm}")
        yield from ("-tpmdev", "emulator,id=tpm0,chardev=tpm", "-device", "tpm-tis,tpmdev=tpm0")


def qemu_command(
    options: GuestOptions, directory: Path, control: socket.socket, monitor: socket.socket
) -> list[str]:
    """Return QEMU's command line for a guest whose scratch files are in `directory`."""
    guest = options.cache
    arch = architecture_of(guest)
    # With a TPM there are more ACPI tables, which QEMU overwrites with the initrd on a direct boot.
    direct = not options.tpm and (guest / layout.DIRECT_KERNEL).exists()
    kernel = guest / (layout.DIRECT_KERNEL if direct else layout.KERNEL)
    kernel_options = [*arch.kernel_options, *KERNEL_OPTIONS, f"lab.name={options.name}"]
    kernel_options.append("loglevel=7" if options.verbose else "loglevel=4")
    if options.network:
        kernel_options.append("lab.net=user")
    if options.shell:
        kernel_options.append("lab.shell")
    kernel_options.append(options.append)
    root_disk = f"if=none,id=root,format=raw,snapshot=on,file={guest / layout.ROOT_IMAGE}"
    command = [
        *(arch.qemu, "-accel", "tcg,thread=multi", *arch.machine),
        *("-smp", options.cpus, "-m", options.memory),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", kernel, "-initrd", directory / "initramfs"),
        *("-append", " ".join(kernel_options)),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=monitor,fd={monitor.fileno()}", "-mon", "monitor"),
        *("-drive", root_disk),
        *("-device", f"virtio-blk-pci,drive=root,serial={layout.ROOT_SERIAL}"),
        *("-device", "virtio-serial-pci"),
        *("-chardev", f"socket,id=control,fd={control.fileno()}"),
        *("-device", f"virtserialport,chardev=control,name={layout.CONTROL_PORT}"),
        *("-chardev", f"file,id=files,path={directory / 'out.tar'}"),
        *("-device", f"virtserialport,chardev=files,name={layout.FILES_PORT}"),
        *_devices(options, directory),
        *shlex.split(options.qemu),
    ]
    return [str(word) for word in command]
