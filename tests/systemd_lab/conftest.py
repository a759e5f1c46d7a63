"""Fixtures of the systemd lab: the package, an image of Debian, a machine."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from systemd_lab.machine import Machine, booted, layer

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".lab" / "systemd"
RELEASE = "bookworm"
PACKAGES = (
    *("systemd-sysv", "dbus", "iproute2", "python3"),
    *("nvme-cli", "openssl", "openssh-client", "openssh-server", "libtss2-tcti-swtpm0"),
)
"""What the image has besides Debian's smallest system and what the package depends on."""


def install(machine: Machine, package: Path) -> str:
    """Install the package on a machine; return what was printed."""
    machine.put(package, "/root/sealane.deb")
    return machine.run("apt-get", "install", "--yes", "--quiet", "/root/sealane.deb")


@pytest.fixture(scope="session")
def package() -> Path:
    """Return the package: SEALANE_DEB, which `make lab-systemd` builds."""
    for program in ("mmdebstrap", "systemd-nspawn"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is not installed: make packages", pytrace=False)
    return Path(os.environ["SEALANE_DEB"]).resolve()


@pytest.fixture(scope="session")
def image(package: Path) -> Iterator[str]:
    """Yield the root of a Debian system that can install the package without a network."""
    shown = subprocess.run(
        ["dpkg-deb", "--field", package, "Depends"], check=True, capture_output=True, text=True
    ).stdout
    needed = {each.split()[0] for each in shown.split(",")}
    names = ",".join(sorted({*needed, *PACKAGES}))
    recipe = hashlib.sha256(names.encode()).hexdigest()[:16]
    archive = CACHE / f"{RELEASE}-{recipe}.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = archive.with_suffix(".new.tar")
        subprocess.run(
            [
                *("mmdebstrap", "--quiet", "--variant=minbase", "--skip=output/dev"),
                *(f"--include={names}", RELEASE, draft),
            ],
            check=True,
        )
        draft.rename(archive)
    with tempfile.TemporaryDirectory(prefix="sealane-image-", dir="/dev/shm") as root:
        subprocess.run(["tar", "-xf", archive, "-C", root], check=True)
        # Would connect to the kernel's NVMe, which a container doesn't have.
        Path(root, "etc/systemd/system/nvmf-autoconnect.service").symlink_to("/dev/null")
        yield root


@pytest.fixture(scope="session")
def image_with_package(image: str, package: Path) -> Iterator[str]:
    """Yield an image on which the package was installed, and nothing else done."""
    with layer() as kept:
        with booted(image, kept=kept) as machine:
            install(machine, package)
            machine.run("rm", "/root/sealane.deb")
        yield f"{kept}/upper:{image}"


@pytest.fixture
def machine(image_with_package: str) -> Iterator[Machine]:
    """Boot a machine on which the package was installed."""
    with booted(image_with_package) as made:
        yield made
