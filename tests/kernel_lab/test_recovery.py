"""A stock Linux host outlives our daemons, and our daemons outlive a host."""

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
        calls={"restart": restart},
    )
    # Attached again it has another secret, so the host has to connect anew.
    again = daemons.attach(disk.volume)
    assert again.secret != disk.secret
    lab.run(
        again.connect(),
        "check_blocks 8000 32 z",
        "verify libaio 4k-64k 16 4",
        "disconnect",
    )


def test_silent_host_loses_its_association(lab: Lab, daemons: Cluster, disk: Disk) -> None:
    def freeze(guest: Guest) -> None:
        daemons.new_log_lines()
        guest.pause()
        try:
            # Another process writes the log: looking again is the only way to hear of it.
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
