"""Fixtures of the kernel lab."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_lab import emulation
from kernel_lab.cluster import Cluster, Disk, cluster
from kernel_lab.lab import Lab

HERE = Path(__file__).resolve().parent
BUILD_SECONDS = 900
SIZE_MIB = 64


@pytest.fixture(scope="session")
def guest_cache() -> Path:
    """Build the guest once. Without QEMU or Debian's packages this fails; it never skips."""
    if not shutil.which(emulation.QEMU):
        pytest.fail(f"{emulation.QEMU} is not installed: make packages", pytrace=False)
    default = HERE.parents[1] / ".lab" / "guest"
    cache = Path(os.environ.get("SEALANE_LAB_CACHE", default))
    built = subprocess.run(
        [HERE / "build-guest", cache],
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if built.returncode != 0:
        pytest.fail(f"no guest could be built:\n{built.stdout}{built.stderr}", pytrace=False)
    return cache


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
