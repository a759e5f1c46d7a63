"""swtpm as a process, for tests of TPM evidence and anchors."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.crypto.evidence.tpm2 import Introduction

NO_TPM_LIBRARY = "tpm2-pytss is not installed (make packages build)"
_GET_CAPABILITY = (1).to_bytes(4, "big")


class SoftwareTpm:
    """A TPM with its state in a directory. It serves one connection at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.tcti = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch it on; non-volatile state is kept."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._try_start():
            assert time.monotonic() < deadline, "swtpm does not start"

    def stop(self) -> None:
        """Switch it off without a shutdown, as a power cut does."""
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
        # Another process took the port of the TPM's socket.
        self.stop()
        return False


def _ports() -> tuple[int, socket.socket]:
    """Return a free port, and the control channel's socket, listening on the next port.

    We open it before swtpm starts. So only our swtpm can answer there, and no connection of ours
    can reach itself or another process by chance.
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
    """Return whether swtpm answers on its control channel; then all of its sockets are open."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as channel:
            channel.sendall(_GET_CAPABILITY)
            return len(channel.recv(4)) == 4
    except OSError:
        return False


@contextlib.contextmanager
def software_tpm(directory: Path) -> Iterator[SoftwareTpm]:
    """Run a TPM; skip the test if its programs aren't installed."""
    if shutil.which("swtpm") is None:
        pytest.skip("swtpm is not installed (make packages)")
    pytest.importorskip("tpm2_pytss", reason=NO_TPM_LIBRARY)
    tpm = SoftwareTpm(directory)
    tpm.start()
    try:
        yield tpm
    finally:
        if tpm._process is not None:
            tpm.stop()


def with_attestation_key_of(driver: Any, parent: str, *, attempt: int = 0) -> None:
    """Make an open `tpm2` driver attest with another restricted signing key of its TPM.

    `parent` is a hierarchy (`owner`, `platform`, `null`, `endorsement`), or `child` for a key below
    a storage key of the endorsement hierarchy. Each `attempt` gives another key.
    """
    from tpm2_pytss import TPM2B_PUBLIC, TPM2B_SENSITIVE_CREATE
    from tpm2_pytss.constants import ESYS_TR

    from sealane.daemon.node.evidence import tpm2_keys

    template = TPM2B_PUBLIC.parse(
        "ecc256:ecdsa-sha256:null", objectAttributes=tpm2_keys._AK_ATTRIBUTES
    )
    template.publicArea.unique.ecc.x = attempt.to_bytes(32, "big")
    template.publicArea.unique.ecc.y = bytes(32)

    def child(esapi: Any) -> tuple[Any, bytes]:
        storage = TPM2B_PUBLIC.parse(
            "ecc256:aes128cfb", objectAttributes=tpm2_keys._STORAGE_ATTRIBUTES
        )
        context, _ = tpm2_keys._primary(esapi, ESYS_TR.ENDORSEMENT, storage)
        with driver._keys._loaded(esapi, context) as above:
            private, public, *_ = esapi.create(above, TPM2B_SENSITIVE_CREATE(), template)
            handle = esapi.load(above, private, public)
            return tpm2_keys._saved(esapi, handle), bytes(public.publicArea.marshal())

    def made(esapi: Any) -> tuple[Any, bytes]:
        if parent == "child":
            return child(esapi)
        return tpm2_keys._primary(esapi, getattr(ESYS_TR, parent.upper()), template)

    driver._keys._ak, driver._keys.attestation_key = driver._tpm.call(made)
    driver._introduction = Introduction(
        endorsement_key=driver._keys.endorsement_key, attestation_key=driver._keys.attestation_key
    ).encode()
