"""Each role alone: four instances of the unit on one machine, by docs/operate/instances.md."""

import re
from pathlib import Path

import pytest

from systemd_lab.machine import Machine
from systemd_lab.test_first_start import status_of

pytestmark = pytest.mark.lab_systemd

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate" / "instances.md"


def test_the_pages_commands_give_an_instance_for_each_role(machine: Machine) -> None:
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL):
        machine.shell(block)
    for role in ("broker", "target", "gateway", "fabric"):
        status = status_of(machine, "--socket", f"/run/sealane-{role}/sealaned.sock")
        assert status["roles"] == [role]
    assert "first" in machine.run(
        "sealanectl", "--socket", "/run/sealane-gateway/sealaned.sock", "volume", "list"
    )
    # One may stop, and takes nothing of the others away.
    machine.run("systemctl", "stop", "sealaned@fabric")
    assert machine.property("sealaned@gateway", "ActiveState") == "active"
    assert machine.shell("ls /run | grep sealane").split() == [
        *("sealane-broker", "sealane-gateway", "sealane-jobs", "sealane-target"),
    ]
