"""The OCI image: what is in it, and that its daemon serves."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

pytestmark = pytest.mark.lab_image
CONFIG = "/etc/sealane/sealaned.toml"


def buildah(*words: str) -> str:
    done = subprocess.run(
        ["buildah", *words], capture_output=True, check=False, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def command(container: str, *words: str, user: str = "sealane") -> list[str]:
    return ["buildah", "run", "--isolation", "chroot", "--user", user, container, "--", *words]


def run(container: str, *words: str, user: str = "sealane") -> str:
    return buildah(*command(container, *words, user=user)[1:])


@pytest.fixture
def container() -> Iterator[str]:
    """Make a container of the image SEALANE_IMAGE, which `make lab-image` builds."""
    if shutil.which("buildah") is None:
        pytest.fail("buildah is not installed: make packages", pytrace=False)
    archive = Path(os.environ["SEALANE_IMAGE"]).resolve()
    name = buildah("from", "--quiet", f"oci-archive:{archive}")
    try:
        yield name
    finally:
        image = json.loads(buildah("inspect", name))["FromImageID"]
        buildah("rm", name)
        buildah("rmi", "--force", image)


def test_the_image_starts_the_daemon_as_its_own_user(container: str) -> None:
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    assert config["Entrypoint"] == ["/usr/bin/sealaned", "--config", CONFIG]
    assert config["User"] == "sealane:sealane"
    assert set(config["Volumes"]) == {"/var/lib/sealane", "/run/sealane"}
    version = config["Labels"]["org.opencontainers.image.version"]
    assert version.startswith(run(container, "sealaned", "--version").split()[-1])
    # Nothing that a daemon doesn't need, and nothing that its user could change.
    assert run(container, "sh", "-c", "command -v systemctl || echo none") == "none"
    others = " ".join(f"-not -path '{each}*'" for each in ("/proc/", "/dev/", "/run/lock", "/*tmp"))
    writable = f"find / -xdev -writable -not -type l {others}"
    found = set(run(container, "sh", "-c", f"{writable} 2>/dev/null || true").splitlines())
    assert found <= {"/etc/sealane/credentials", "/run/sealane", "/var/lib/sealane"}


def test_without_keys_it_says_which_is_missing_and_how_to_make_it(container: str) -> None:
    done = subprocess.run(
        command(container, "sealaned", "--config", CONFIG),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 2
    assert "/etc/sealane/policy.toml" in done.stderr


@contextlib.contextmanager
def served(container: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the daemon as the image does; end it by its stop signal."""
    script = f"echo $$ > /run/sealane/pid && exec sealaned --config {CONFIG}"
    with (
        log.open("wb") as lines,
        subprocess.Popen(command(container, "sh", "-c", script), stderr=lines) as daemon,
    ):
        try:
            yield daemon
        finally:
            # Processes of this isolation are in this machine's PID namespace.
            pid = int(run(container, "cat", "/run/sealane/pid"))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            daemon.wait(PATIENCE_SECONDS)


def test_set_up_once_it_serves_every_role(container: str, tmp_path: Path) -> None:
    run(container, "sealaned", "--config", CONFIG, "--set-up", user="root")
    log = tmp_path / "log"
    with served(container, log) as daemon:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            answer = subprocess.run(
                command(container, "sealanectl", "status", "--output", "json"),
                capture_output=True,
                check=False,
                text=True,
            )
            if answer.returncode == 0:
                break
            assert daemon.poll() is None, log.read_text()
            assert time.monotonic() < give_up, answer.stderr
            time.sleep(0.5)
        status = json.loads(answer.stdout)
        assert {"broker", "target", "gateway", "fabric"} <= set(status["roles"])
    assert daemon.returncode == 0
