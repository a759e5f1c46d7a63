"""The drop-ins for drives and RDMA: the unit starts with each, though its machine has no device."""

import pytest

from systemd_lab.machine import Machine

pytestmark = pytest.mark.lab_systemd

DROP_INS = "/usr/share/sealane/drop-ins"
TAKEN = "/etc/systemd/system/sealaned.service.d"


def test_the_unit_starts_with_drop_ins_for_devices(machine: Machine) -> None:
    for name in ("drives", "rdma"):
        machine.shell(f"rm -rf {TAKEN}; mkdir -p {TAKEN}; cp {DROP_INS}/{name}.conf {TAKEN}/")
        machine.shell("systemctl daemon-reload; systemctl restart sealaned")
        assert machine.property("sealaned", "PrivateDevices") == "no"
        assert machine.property("sealaned", "DevicePolicy") == "closed"
        machine.run("sealanectl", "status")
