"""swtpm as a process of its own, for the tests of TPM evidence and anchors."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_START_SECONDS = 10.0


class SoftwareTpm:
    """One TPM, whose memory is a directory. Serves one connection at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.tcti = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch on; a TPM that was on before keeps what is not volatile."""
        deadline = time.monotonic() + _START_SECONDS
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
        port = _free_ports()
        self._process = subprocess.Popen(
            [
                "swtpm",
                "socket",
                "--tpm2",
                *("--tpmstate", f"dir={self.directory}"),
                *("--flags", "not-need-init,startup-clear"),
                *("--server", f"type=tcp,port={port}"),
                *("--ctrl", f"type=tcp,port={port + 1}"),
            ],
            stderr=subprocess.DEVNULL,
        )
        while self._process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port + 1)).close()
                self.tcti = f"swtpm:host=127.0.0.1,port={port}"
                return True
            time.sleep(0.005)
        return False  # somebody else took a port


def _free_ports() -> int:
    """Return a port that is free like the next one, where the TCTI expects the control channel."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


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
