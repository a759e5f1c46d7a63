"""A stock Linux host uses a plain namespace of the target."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_lab.cluster import Cluster, Disk, cluster
from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

OPEN = "nqn.2026-11.example:lab-open"
DURABLE = "nqn.2026-11.example:lab-durable"
UUID = "33333333-2222-4333-8444-555555555555"


def _subsystems(_: Path) -> str:
    return f"""
[[target.subsystems]]
nqn = "{OPEN}"
allow_any_host = true
[[target.subsystems.namespaces]]
nsid = 1
store = "memory"
size_bytes = 67_108_864
uuid = "{UUID}"
"""


def _durable(root: Path) -> str:
    return (
        _subsystems(root)
        + f"""
[[target.subsystems]]
nqn = "{DURABLE}"
allow_any_host = true
[[target.subsystems.namespaces]]
nsid = 1
store = "file"
path = "{root / "disk"}"
size_bytes = 67_108_864
"""
    )


@pytest.fixture(scope="module")
def running_daemons() -> Iterator[Cluster]:
    with cluster(store="memory", subsystems=_subsystems) as made:
        yield made


def _disk(daemons: Cluster, nqn: str) -> Disk:
    return Disk(nqn, int(daemons.target.addresses["target"].rpartition(":")[2]), UUID)


@pytest.fixture
def disk(daemons: Cluster) -> Disk:
    return _disk(daemons, OPEN)


def test_host_uses_every_command(lab: Lab, disk: Disk) -> None:
    ran = lab.run(
        disk.connect("-i 2"),
        "inspect",
        "read_write",
        "write_zeroes",
        "deallocate",
        "compare",
        "verify_command",
        "out_of_range",
        "inspect",
        "reset",
        "disconnect",
        options={"cpus": 2},
    )
    namespace = ran.json("id-ns")
    assert namespace["nsze"] == 16384
    # compare, dataset management, write zeroes, verify
    assert ran.json("id-ctrl")["oncs"] & 0x8D == 0x8D
    smart = ran.json("smart-log")
    assert int(smart["host_write_commands"]) >= 5
    assert int(smart["host_read_commands"]) >= 10
    assert int(smart["data_units_written"]) >= 1


@pytest.mark.parametrize("digests", [(), ("-g",), ("-G",), ("-g", "-G")])
def test_load_with_digests(lab: Lab, disk: Disk, digests: tuple[str, ...]) -> None:
    lab.run(
        disk.connect("-i 2", *digests),
        "verify libaio 4k-256k 16 8",
        "filesystem",
        "disconnect",
        options={"cpus": 2},
    )


def test_target_is_killed_under_load(lab: Lab) -> None:
    with cluster(store="memory", subsystems=_durable) as daemons:

        def restart(guest: Guest) -> None:
            daemons.target.kill()
            daemons.target.start()

        lab.run(
            _disk(daemons, DURABLE).connect("-k 10", "--reconnect-delay=1", "--ctrl-loss-tmo=120"),
            "verify_begin libaio 4k-64k 16 24",
            "call restart",
            "verify_end",
            "recovered",
            "disconnect",
            calls={"restart": restart},
        )
