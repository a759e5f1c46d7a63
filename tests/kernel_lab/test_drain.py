"""A stock Linux host during drains: with another path it goes on there, without one it waits."""

import time

import pytest

from control_plane import sealanectl
from kernel_lab.cluster import Cluster, Disk, Node
from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PATIENT = ("-k 10", "--reconnect-delay=1", "--ctrl-loss-tmo=120")


def drain(gateway: Node) -> str:
    socket = gateway.daemon.socket
    ended = sealanectl("--socket", socket, "node", "drain", "--yes")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def undrain(gateway: Node) -> None:
    ended = sealanectl("--socket", gateway.daemon.socket, "node", "undrain")
    assert ended.returncode == 0, ended.stderr


def test_a_host_without_another_path_waits(lab: Lab, daemons: Cluster, disk: Disk) -> None:
    def drained(guest: Guest) -> None:
        drain(daemons.gateway)
        time.sleep(2)

    def restart(guest: Guest) -> None:
        daemons.gateway.restart()

    def undrained(guest: Guest) -> None:
        undrain(daemons.gateway)

    lab.run(
        disk.connect(*PATIENT),
        f"path_is {disk.port} optimized",
        "files_begin",
        "call drained",
        "call undrained",
        f"path_is {disk.port} optimized",
        "goes_on",
        "call drained",
        "call restart",
        f"path_is {disk.port} optimized",
        "goes_on",
        "files_end",
        "disconnect",
        calls={"drained": drained, "undrained": undrained, "restart": restart},
    )


def test_a_host_with_another_path_goes_on_there(lab: Lab, daemons: Cluster, disk: Disk) -> None:
    second = daemons.start_gateway("h")
    other = daemons.attach(disk.volume, at=second)
    assert other.nqn == disk.nqn
    said = []

    def drained(guest: Guest) -> None:
        said.append(drain(daemons.gateway))

    def restart(guest: Guest) -> None:
        daemons.gateway.restart()

    def drain_other(guest: Guest) -> None:
        said.append(drain(second))

    def undrain_other(guest: Guest) -> None:
        undrain(second)

    lab.run(
        disk.connect(*PATIENT),
        ("add_path", other.port, f"--dhchap-secret={other.secret}", *PATIENT),
        f"path_is {disk.port} optimized",
        f"path_is {other.port} optimized",
        "files_begin",
        "call drained",
        # Drained, and the host hasn't stopped.
        "goes_on",
        "call restart",
        f"path_is {disk.port} optimized",
        "call drain_other",
        "goes_on",
        "call undrain_other",
        f"path_is {other.port} optimized",
        "files_end",
        "disconnect",
        calls={
            "drained": drained,
            "restart": restart,
            "drain_other": drain_other,
            "undrain_other": undrain_other,
        },
    )
    daemons.detach(disk.volume, at=second)
    # The host left by itself: nothing was cut off when the time was over.
    assert len(said) == 2
    assert not any("overdue" in each for each in said)
