"""A stock Linux host uses the gateway's namespace."""

import pytest

from kernel_lab.build import HOST_ID, HOST_NQN
from kernel_lab.cluster import Cluster, Disk
from kernel_lab.lab import Lab, Run

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

SIZE_MIB = 64
BLOCKS = SIZE_MIB * 256
TWO_QUEUES = {"cpus": 2}  # Linux makes no more queues than it has processors


def _check_identity(ran: Run, disk: Disk) -> None:
    controller = ran.json("id-ctrl")
    assert controller["subnqn"] == disk.nqn
    assert controller["mn"].strip() == "Sealane"
    assert controller["cntrltype"] == 1
    assert (controller["sqes"], controller["cqes"]) == (0x66, 0x44)
    assert controller["vwc"] & 1
    assert controller["kas"] > 0
    assert controller["ioccsz"] * 16 >= 64 + 8192
    namespace = ran.json("id-ns")
    assert namespace["nsze"] == namespace["ncap"] == BLOCKS
    assert namespace["nguid"] == disk.uuid.replace("-", "")
    [block_format] = namespace["lbafs"]
    assert (block_format["ds"], block_format["ms"]) == (12, 0)
    [device] = ran.json("list")["Devices"]
    assert (device["NameSpace"], device["PhysicalSize"]) == (1, SIZE_MIB << 20)


def _check_connection(ran: Run, disk: Disk) -> None:
    [host] = ran.json("list-subsys")
    assert (host["HostNQN"], host["HostID"]) == (HOST_NQN, HOST_ID)
    [subsystem] = host["Subsystems"]
    assert subsystem["NQN"] == disk.nqn
    [path] = subsystem["Paths"]
    assert (path["Transport"], path["State"]) == ("tcp", "live")
    assert f"trsvcid={disk.port}" in path["Address"]
    assert ran.text("queue-count").strip() == "3"  # the admin queue and two for I/O
    assert ran.text("write-cache").strip() == "write back"
    assert ran.text("logical-block-size").strip() == "4096"


@pytest.mark.lab_short
def test_host_lives_on_a_namespace(lab: Lab, daemons: Cluster, disk: Disk) -> None:
    ran = lab.run(
        disk.connect("-i 2"),
        "inspect",
        "read_write",
        "verify libaio 4k-64k 16 4",
        "filesystem",
        "reset",
        "disconnect",
        options=TWO_QUEUES,
    )
    _check_identity(ran, disk)
    _check_connection(ran, disk)
    assert ran.json("smart-log")["critical_warning"] == 0
    assert all(entry["error_count"] == 0 for entry in ran.json("error-log")["errors"])
    assert "disconnected 1 controller" in ran.text("disconnect")
    attachment = daemons.attachment(disk.volume)
    assert attachment.sectors_sealed >= 4 * 256
    assert attachment.refusals == 0


def test_host_is_refused_beyond_the_end(lab: Lab, disk: Disk) -> None:
    lab.run(disk.connect(), "out_of_range", "disconnect")


@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_random_writes_read_back(lab: Lab, disk: Disk, engine: str) -> None:
    lab.run(
        disk.connect("-i 2"),
        f"verify {engine} 4k-4k 1 2",
        f"verify {engine} 4k-4k 32 8",
        f"verify {engine} 128k-128k 8 16",
        f"verify {engine} 4k-1m 16 24 --rwmixread=30 --fsync=64",
        "disconnect",
        options=TWO_QUEUES,
    )


def test_host_comes_back_after_disconnecting(lab: Lab, disk: Disk) -> None:
    lab.run(
        disk.connect(),
        "fill x",
        "disconnect",
        disk.connect(),
        "check_fill x",
        "disconnect",
    )


def test_digests_are_granted(lab: Lab, disk: Disk) -> None:
    # Linux refuses a connection that doesn't grant its request.
    lab.run(
        disk.connect("-i 2", "-g", "-G"),
        "read_write",
        "verify libaio 4k-256k 16 8",
        "disconnect",
        options=TWO_QUEUES,
    )


def test_discovery_leads_to_the_namespace(lab: Lab, disk: Disk) -> None:
    ran = lab.run(
        f"discover {disk.port}",
        ("connect_all", disk.nqn, disk.port, f"--dhchap-secret={disk.secret}"),
        "read_write",
        "disconnect",
    )
    records = ran.json("discovery")["records"]
    [record] = [each for each in records if each["subnqn"] == disk.nqn]
    assert (record["trtype"], record["trsvcid"]) == ("tcp", str(disk.port))


@pytest.mark.parametrize("step", ["write_zeroes", "deallocate", "compare", "verify_command"])
def test_optional_commands(lab: Lab, disk: Disk, step: str) -> None:
    lab.run(disk.connect(), step, "disconnect")


def test_features_are_what_the_host_set(lab: Lab, disk: Disk) -> None:
    ran = lab.run(disk.connect("-i 2", "-k 20"), "features 0x06 0x07 0x0f", options=TWO_QUEUES)
    values = dict(line.split() for line in ran.text("features").splitlines())
    assert int(values["0x06"], 16) == 1  # volatile write cache, on
    assert int(values["0x07"], 16) & 0xFFFF >= 1  # I/O queues minus one
    assert int(values["0x0f"], 16) >= 20_000  # keep-alive, ms
