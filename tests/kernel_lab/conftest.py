"""Fixtures of the kernel lab."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_lab.architecture import AMD64, Architecture
from kernel_lab.cluster import Cluster, Disk, cluster
from kernel_lab.lab import Lab

HERE = Path(__file__).resolve().parent
LAB = HERE.parents[1] / ".lab"
BUILD_SECONDS = 900
SIZE_MIB = 64


def built_guest(arch: Architecture, cache: Path) -> Path:
    """Build a guest unless it is there. Without QEMU or Debian's packages the test fails."""
    for program in filter(None, (arch.qemu, arch.runner.emulator)):
        if not shutil.which(program):
            pytest.fail(f"{program} is not installed: make packages", pytrace=False)
    built = subprocess.run(
        [HERE / "build-guest", "--arch", arch.name, cache],
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if built.returncode != 0:
        pytest.fail(f"no guest could be built:\n{built.stdout}{built.stderr}", pytrace=False)
    return cache


@pytest.fixture(scope="session")
def guest_cache() -> Path:
    """Build the guest once."""
    return built_guest(AMD64, Path(os.environ.get("SEALANE_LAB_CACHE", LAB / "guest")))


@pytest.fixture
def lab(guest_cache: Path, tmp_path: Path) -> Lab:
    """Run jobs in guests."""
    return Lab(guest_cache, tmp_path / "out")


@pytest.fixture(scope="module")
def running_daemons() -> Iterator[Cluster]:
    """Broker, target and gateway, on a file store."""
    with cluster(store="file") as made:
        yield made


@pytest.fixture
def daemons(running_daemons: Cluster) -> Iterator[Cluster]:
    """Daemons shared by a module's tests; their logs are in the test's output."""
    running_daemons.new_log_lines()
    yield running_daemons
    for line in running_daemons.new_log_lines():
        print(line)


@pytest.fixture
def disk(daemons: Cluster) -> Iterator[Disk]:
    """A volume attached at the gateway."""
    name = daemons.create_volume(size_mib=SIZE_MIB)
    yield daemons.attach(name)
    daemons.remove_volume(name)
