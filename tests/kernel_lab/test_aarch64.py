"""Arm: stores, sessions and a gateway in a guest whose kernel is Debian's for arm64.

`make lab-aarch64` sets SEALANE_AARCH64 to a directory with the wheel for aarch64, and the packages
that it needs, in `site`. What needs no kernel is tested faster, under QEMU's emulation of a process
(`make test-aarch64`).
"""

import compileall
import os
import re
import subprocess
from pathlib import Path

import pytest

from kernel_lab.architecture import ARM64
from kernel_lab.build import HOST_NQN
from kernel_lab.cluster import Cluster
from kernel_lab.conftest import LAB, SIZE_MIB, built_guest
from kernel_lab.engine import engine_program
from kernel_lab.lab import Lab
from kernel_lab.test_nvme_drive import FORMAT
from sealane.client import sync

pytestmark = [pytest.mark.lab_aarch64, pytest.mark.timeout(1800)]

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
GUEST_FILES = (
    TESTS / "patience.py",
    TESTS / "control_plane.py",
    TESTS / "fabric_daemons.py",
    HERE / "verbs_guest.py",
    HERE / "verbs_sessions.py",
    HERE / "arm_gateway.py",
)
TARGET = "aarch64-unknown-linux-gnu"
GUEST_SECONDS = 1200
SECTOR = 4096
PLACES = (0, 8000)
"""Sectors at which the job's `fill` writes 32 sectors."""
FILLED_BYTES = 32 * SECTOR


@pytest.fixture(scope="module")
def arm() -> Path:
    """Build a guest for arm64."""
    return built_guest(ARM64, LAB / "guest-arm64")


@pytest.fixture
def lab(arm: Path, tmp_path: Path) -> Lab:
    """Run jobs in guests for arm64."""
    return Lab(arm, tmp_path / "out")


@pytest.fixture(scope="module")
def site_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a disk image with the wheel and its packages."""
    site = Path(os.environ["SEALANE_AARCH64"]).resolve() / "site"
    # The guest's Python is of the same version, and emulated.
    compileall.compile_dir(site, quiet=2, workers=2)
    image = tmp_path_factory.mktemp("site") / "site.ext4"
    command = ["mke2fs", "-q", "-t", "ext4", "-m", "0", "-E", "root_owner=0:0", "-d", site, image]
    subprocess.run([*command, "700M"], check=True)
    return image


@pytest.fixture(scope="module")
def engine_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine's tests for aarch64."""
    directory = tmp_path_factory.mktemp("engine")
    return engine_program(directory, "--target", TARGET, strip="aarch64-linux-gnu-strip")


STORES = (
    *("sealed_file", "inline_file", "plain_file", "in_place_store", "emulated", "memory"),
    *("selection", "label", "write_window", "queued_pages"),
)
SOCKETS = (
    *("full_socket_tests", "session::lanes", "session::outbound", "session::path_threads"),
    *("session::ring_stress", "udp::"),
)


@pytest.mark.parametrize(
    "tests", [[f"storage::stores::{name}" for name in STORES], SOCKETS], ids=["stores", "sockets"]
)
def test_the_engine_does_what_it_does_elsewhere(
    lab: Lab, engine_tests: Path, tests: tuple[str, ...]
) -> None:
    options = {"file": (str(engine_tests),), "cpus": 2, "disk": ("64M", "1G"), "network": False}
    ran = lab.run("scratch", ("engine", *tests), options=options, timeout=GUEST_SECONDS)
    (counted,) = re.findall(r"test result: ok. (\d+) passed", ran.output)
    assert int(counted) >= len(tests)


def test_a_drive_does_what_every_store_does(lab: Lab, engine_tests: Path) -> None:
    options = {"file": (str(engine_tests),), "nvme": (f"64M,{FORMAT}",), "network": False}
    ran = lab.run("drive behaves_as_a_store_that_keeps_freshness", options=options, timeout=400)
    assert "1 passed" in ran.output


def test_a_session_carries_what_was_sent(lab: Lab, site_disk: Path) -> None:
    ran = lab.run(
        "site",
        "both_addresses",
        "plain_session",
        options={
            "file": tuple(map(str, GUEST_FILES)),
            "disk": (str(site_disk),),
            "memory": "2G",
            "cpus": 2,
        },
        timeout=GUEST_SECONDS,
    )
    seen = ran.json("plain")
    assert seen["paths"]["udp"]["packets_sent"] > 0


def write(daemons: Cluster, volume: str, letter: bytes) -> None:
    """Write what the job's `fill` writes, through this machine's gateway."""
    with sync.connect(daemons.gateway.daemon.socket) as client:
        attached = client.volumes.attach(volume, host_nqn=HOST_NQN)
        with client.open(attached) as disk:
            for place in PLACES:
                disk.write(place * SECTOR, letter * FILLED_BYTES)
            disk.flush()
        client.volumes.detach(volume)


def read(daemons: Cluster, volume: str) -> bytes:
    """Read what the job's `fill` wrote, through this machine's gateway."""
    with sync.connect(daemons.gateway.daemon.socket) as client:
        attached = client.volumes.attach(volume, host_nqn=HOST_NQN)
        with client.open(attached) as disk:
            found = b"".join(bytes(disk.read(at * SECTOR, FILLED_BYTES)) for at in PLACES)
        client.volumes.detach(volume)
    return found


def test_a_linux_host_and_its_gateway_on_arm_share_a_volume_with_a_gateway_here(
    lab: Lab, daemons: Cluster, site_disk: Path, tmp_path: Path
) -> None:
    name = daemons.create_volume(size_mib=SIZE_MIB)
    write(daemons, name, b"x")
    broker, target = daemons.broker.addresses, daemons.target.addresses
    listening = (broker["broker"], broker["attestation"], *target.values())
    ports = [address.rpartition(":")[2] for address in listening if address.startswith("127.")]
    site = guest_site(daemons, tmp_path / "site")
    lab.run(
        "site",
        ("relay", *ports),
        ("gateway", name),
        "check_fill x",
        "verify libaio 4k-64k 8 4",
        "fill y",
        "gateway_ends",
        options={
            "file": (str(site), *map(str, GUEST_FILES)),
            "disk": (str(site_disk),),
            "memory": "2G",
            "cpus": 2,
        },
        timeout=GUEST_SECONDS,
    )
    assert read(daemons, name) == b"y" * FILLED_BYTES * len(PLACES)


def guest_site(daemons: Cluster, made: Path) -> Path:
    """Write the files of gateway h, as they are in the guest."""
    (made / "broker").mkdir(parents=True)
    root = daemons.site.root
    target = daemons.target.addresses["target_control"]
    section = f'[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\ntarget_address = "{target}"\n'
    enrolment = daemons.site.enrolment("h", daemons.broker, timeout_seconds=120)
    config = daemons.site.write_config("h", enrolment + section)
    (made / "h.toml").write_text(config.read_text().replace(str(root), "/job/site"))
    for name in ("h.pem", "broker/trust-anchor.pem"):
        (made / name).write_bytes((root / name).read_bytes())
    return made
