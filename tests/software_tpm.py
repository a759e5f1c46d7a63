"""swtpm as a process of its own, for the tests of TPM evidence and anchors."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

_GET_CAPABILITY = (1).to_bytes(4, "big")


class SoftwareTpm:
    """One TPM, whose memory is a directory. Serves one connection at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.tcti = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch on; a TPM that was on before keeps what is not volatile."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._try_start():
            assert time.monotonic() < deadline, "swtpm does not start"

    def stop(self) -> None:
        """Switch off without a word, as a power cut does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self) -> None:
        """Reset the machine."""
        self.stop()
        self.start()

    def _try_start(self) -> bool:
        port, control = _ports()
        with control:
            self._process = subprocess.Popen(
                [
                    "swtpm",
                    "socket",
                    "--tpm2",
                    *("--tpmstate", f"dir={self.directory}"),
                    *("--flags", "not-need-init,startup-clear"),
                    *("--server", f"type=tcp,port={port}"),
                    *("--ctrl", f"type=tcp,fd={control.fileno()}"),
                ],
                stderr=subprocess.DEVNULL,
                pass_fds=[control.fileno()],
            )
        self.tcti = f"swtpm:host=127.0.0.1,port={port}"
        if _answers(port + 1):
            return True
        # Somebody else took the port of the TPM's own socket.
        self.stop()
        return False


def _ports() -> tuple[int, socket.socket]:
    """Return a free port, and the control channel's socket, listening on the next one.

    That one is ours before swtpm is there: whoever answers on it is our swtpm, and no connection
    that we make can by chance be one to itself or to another's.
    """
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            control = socket.socket()
            try:
                control.bind(("127.0.0.1", port + 1))
                control.listen()
            except (OSError, OverflowError):
                control.close()
            else:
                return port, control


def _answers(port: int) -> bool:
    """Whether swtpm answers on its control channel, which it does when it has all its sockets."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as channel:
            channel.sendall(_GET_CAPABILITY)
            return len(channel.recv(4)) == 4
    except OSError:
        return False


@contextlib.contextmanager
def software_tpm(directory: Path) -> Iterator[SoftwareTpm]:
    """Run a TPM; skips the test where its programs aren't installed."""
    if shutil.which("swtpm") is None:
        pytest.skip("swtpm is not installed (make packages)")
    pytest.importorskip("tpm2_pytss", reason="tpm2-pytss is not installed (make packages build)")
    tpm = SoftwareTpm(directory)
    tpm.start()
    try:
        yield tpm
    finally:
        if tpm._process is not None:
            tpm.stop()
