"""TPMs of machines: swtpm in their networks, with endorsement keys that our maker certified."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from patience import PATIENCE_SECONDS
from systemd_lab.machine import Machine

TPM_PORT = 2321
TPM_CONTROL = 2322
"""In a network of its own any port is free."""


@contextlib.contextmanager
def certified_tpms(machines: Mapping[str, Machine], root: Path) -> Iterator[bytes]:
    """Give each machine a TPM with certified endorsement keys; yield the manufacturer's roots."""
    authority = _write_maker(root)
    for host in machines.values():
        state = host.directory / "tpm"
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
def _running_tpm(host: Machine) -> Iterator[None]:
    process = subprocess.Popen(
        [
            *(*host.networking, "swtpm", "socket", "--tpm2"),
            *("--tpmstate", f"dir={host.directory / 'tpm'}"),
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


def _wait_for_tpm(host: Machine, process: subprocess.Popen[bytes]) -> None:
    from pyroute2.netns import create_socket

    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        made = create_socket(
            f"/proc/{host.init}/ns/net", socket.AF_INET, socket.SOCK_STREAM, flags=0
        )
        with made, contextlib.suppress(OSError):
            made.settimeout(PATIENCE_SECONDS)
            made.connect(("127.0.0.1", TPM_CONTROL))
            made.sendall((1).to_bytes(4, "big"))
            if len(made.recv(4)) == 4:
                return
        time.sleep(0.05)
    raise AssertionError(f"the TPM of {host.name} does not start")
