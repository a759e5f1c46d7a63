"""The OCI image under Podman: every role, a job in another container, and a restart."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from control_plane import short_directory
from patience import PATIENCE_SECONDS

pytestmark = [pytest.mark.lab_image, pytest.mark.timeout(600)]
IO_URING = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
# Podman's own limits are beyond those that a process without CAP_SYS_RESOURCE may set.
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")


@dataclass
class Podman:
    """Podman with images, containers and volumes of its own, and the loaded image."""

    root: Path
    image: str = ""

    def __call__(self, *words: str, content: str | None = None) -> str:
        """Run it and return its output; it must succeed."""
        done = self.run(*words, content=content)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(self, *words: str, content: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run it."""
        # Beside cgroups of version 1, only runc starts containers.
        runtime = ["--runtime", "runc"] if shutil.which("runc") else []
        return subprocess.run(
            [
                *("podman", "--root", str(self.root / "root"), "--runroot", str(self.root / "run")),
                *("--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"),
                *("--events-backend", "file", *runtime, *words),
            ],
            capture_output=True,
            check=False,
            text=True,
            input=content,
            timeout=PATIENCE_SECONDS,
        )

    def container(self, *words: str, network: str = "none") -> str:
        """Run the image with the volumes of a daemon."""
        volumes = ("etc:/etc/sealane", "state:/var/lib/sealane", "run:/run/sealane")
        mounts = [word for volume in volumes for word in ("--volume", volume)]
        allowed = f"--security-opt=seccomp={self.profile}"
        return self("run", allowed, "--network", network, *LIMITS, *mounts, *words)

    @property
    def profile(self) -> Path:
        """Podman's seccomp profile, with the system calls that docs/operate/containers.md names."""
        path = self.root / "seccomp.json"
        if not path.exists():
            own = self("info", "--format", "{{.Host.Security.SECCOMPProfilePath}}")
            profile = json.loads(Path(own).read_text())
            profile["syscalls"].insert(0, {"names": IO_URING, "action": "SCMP_ACT_ALLOW"})
            path.write_text(json.dumps(profile))
        return path

    @contextlib.contextmanager
    def daemon(self) -> Iterator[str]:
        """Run the daemon as the image does; yield its container, and stop it as Podman does."""
        container = self.container("--detach", self.image)
        try:
            give_up = time.monotonic() + PATIENCE_SECONDS
            while self.run("exec", container, "sealanectl", "status").returncode != 0:
                assert time.monotonic() < give_up, self.run("logs", container).stderr
                time.sleep(0.5)
            yield container
            self("stop", "--time", "30", container)
            ended = self("inspect", "--format", "{{.State.ExitCode}}", container)
            assert ended == "0", self.run("logs", container).stderr
        finally:
            self("rm", "--force", "--time", "0", container)


@pytest.fixture
def podman() -> Iterator[Podman]:
    """Load the image SEALANE_IMAGE, which `make lab-image` builds."""
    if shutil.which("podman") is None:
        pytest.skip("no podman: make packages installs it")
    archive = Path(os.environ["SEALANE_IMAGE"]).resolve()
    with short_directory() as root:
        made = Podman(root)
        made.image = made("load", "--quiet", "--input", str(archive)).split()[-1]
        try:
            yield made
        finally:
            made("rm", "--all", "--force", "--time", "0")
            made("volume", "rm", "--all", "--force")
            made("rmi", "--all", "--force")


def test_a_volume_written_in_one_container_is_read_in_the_next(podman: Podman) -> None:
    podman.container("--rm", "--user", "root", podman.image, "--set-up")
    with podman.daemon() as first:
        podman("exec", first, "sealanectl", "volume", "create", "--size", "1MiB")
        [volume] = podman("exec", first, "sealanectl", "-o", "name", "volume", "list").split()
        write = ("sealanectl", "volume", "write", volume)
        podman("exec", "--interactive", first, *write, content="sealed")
    with podman.daemon() as second:
        # A job in a container of its own: it has the daemon's socket and network.
        read = (podman.image, "volume", "read", volume, "--length", "6")
        words = ("--rm", "--entrypoint", "sealanectl", *read)
        assert podman.container(*words, network=f"container:{second}") == "sealed"
