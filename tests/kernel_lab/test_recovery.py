"""A stock Linux host survives crashes of our daemons, and they survive crashes of a host."""

import time

import pytest

from kernel_lab.cluster import Cluster, Disk
from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

PATIENT = ("-k 10", "--reconnect-delay=1", "--ctrl-loss-tmo=120")
LOAD = "4k-64k 16 24"
EXPIRY_SECONDS = 30.0


@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_target_is_killed_under_load(lab: Lab, daemons: Cluster, disk: Disk, engine: str) -> None:
    def restart(guest: Guest) -> None:
        daemons.target.kill()
        daemons.target.start()

    lab.run(
        disk.connect(*PATIENT),
        "fill z",
        f"verify_begin {engine} {LOAD}",
        "call restart",
        "verify_end",
        "recovered",
        f"verify {engine} 4k-64k 16 4",
        "disconnect",
        calls={"restart": restart},
    )


def test_gateway_is_killed_under_load(lab: Lab, daemons: Cluster, disk: Disk) -> None:
    def restart(guest: Guest) -> None:
        daemons.gateway.kill()
        daemons.gateway.start()

    # Beyond the load's blocks.
    lab.run(
        disk.connect(*PATIENT),
        "write_blocks 8000 32 z",
        f"verify_begin libaio {LOAD}",
        "call restart",
        "verify_end",
        "recovered",
        "check_blocks 8000 32 z",
        "verify libaio 4k-64k 16 4",
        "disconnect",
        calls={"restart": restart},
    )


def live_through(lab: Lab, daemons: Cluster, disk: Disk, ends: list[str]) -> str:
    """Use a file system while the gateway is stopped in these ways; return the guest's results."""

    def crash(guest: Guest) -> None:
        daemons.gateway.kill()
        daemons.gateway.start()

    def restart(guest: Guest) -> None:
        daemons.gateway.restart()

    steps = [step for end in ends for step in (f"call {end}", "files_go_on")]
    ran = lab.run(
        disk.connect(*PATIENT),
        "files_begin",
        *steps,
        "files_end",
        "disconnect",
        calls={"crash": crash, "restart": restart},
        timeout=1100,
    )
    return ran.output


@pytest.mark.lab_short
def test_a_file_system_outlives_its_gateways_process(
    lab: Lab, daemons: Cluster, disk: Disk
) -> None:
    live_through(lab, daemons, disk, ["restart", "crash"])


def test_a_file_system_outlives_ten_restarts_and_three_crashes_of_its_gateway(
    lab: Lab, daemons: Cluster, disk: Disk
) -> None:
    ends = ["restart"] * 10
    for place in (2, 6, 10):
        ends.insert(place, "crash")
    said = live_through(lab, daemons, disk, ends)
    assert "rounds verified" in said


def test_silent_host_loses_its_association(lab: Lab, daemons: Cluster, disk: Disk) -> None:
    def freeze(guest: Guest) -> None:
        daemons.new_log_lines()
        guest.pause()
        try:
            # Poll, because another process writes the log.
            deadline = time.monotonic() + EXPIRY_SECONDS
            seen: list[str] = []
            while not any('"queue_closed"' in line for line in seen):
                assert time.monotonic() < deadline, f"the association lives on: {seen}"
                time.sleep(0.1)
                seen += daemons.new_log_lines()
        finally:
            guest.resume()

    lab.run(
        disk.connect("-k 2", "--reconnect-delay=1"),
        "fill k",
        "call freeze",
        "recovered",
        "check_fill k",
        "disconnect",
        calls={"freeze": freeze},
    )
