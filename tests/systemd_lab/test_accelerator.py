"""A card's driver as a unit beside the daemon, by docs/operate/accelerators.md; it is killed."""

import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerators.cards import LABEL, Maker, program
from patience import PATIENCE_SECONDS
from systemd_lab.machine import PYTHON, Machine
from systemd_lab.test_restarts import LOAD

pytestmark = pytest.mark.lab_systemd

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "accelerators.md").read_text()
SECTION = PAGE.partition("### The card's driver as a unit")[2].partition("\n### ")[0]
MAKE_USER, START_BOTH = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
(UNIT,) = re.findall(r"```ini\n# (\S+)\n(.*?)```", SECTION, re.DOTALL)
POLICY, CONFIGURATION = re.findall(r"```toml\n(.*?)```", PAGE.partition("### ")[0], re.DOTALL)
CARD = "sealane-card"
KILLS = 3
SECTORS = 8
"""Sectors that each card seals before it is killed."""
CONFIG = "/etc/sealane/sealaned.toml"


def wait_until(holds: Callable[[], bool], machine: Machine) -> None:
    """Wait until something holds; fail with the journal."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, machine.journal() + machine.journal(CARD)
        time.sleep(0.1)


def card(machine: Machine) -> dict[str, object]:
    """Return what the gateway says of its card."""
    said = machine.run("sealanectl", "offload", "get", LABEL, "--output", "json")
    found: dict[str, object] = json.loads(said)
    return found


def is_in_use(machine: Machine) -> bool:
    return card(machine)["state"] == "in_use"


def figure(machine: Machine, name: str) -> int:
    """Return a figure of the card."""
    found = card(machine)[name]
    assert isinstance(found, int)
    return found


def wait_for_figure(machine: Machine, name: str, at_least: int) -> None:
    """Wait until a figure of the card has grown."""
    wait_until(lambda: figure(machine, name) >= at_least, machine)


def give_card(machine: Machine, maker: Maker) -> None:
    """Put an emulated card's program, key and certificate on a machine, and start it as a unit."""
    (_, key, _, certificates), hardware_id = maker.card("1")
    machine.put(Path(program()), "/usr/local/bin/sealane-dpu")
    machine.run("chmod", "755", "/usr/local/bin/sealane-dpu")
    machine.write("/etc/credstore/sealane-card.key", Path(key).read_bytes(), 0o600)
    machine.put(Path(certificates), "/etc/sealane-card/card.pem")
    machine.put(maker.path, "/etc/sealane/card-roots.pem")
    machine.run_block(MAKE_USER)
    path, unit = UNIT
    machine.write(path, unit.encode())

    # The first start makes keys and policy; then both files get what the page says.
    machine.run("systemctl", "start", "sealaned")
    machine.run("sealanectl", "volume", "create", "--size", "16MiB", "--display-name", "first")
    firmware = hashlib.sha256(Path(program()).read_bytes()).hexdigest()
    reference = POLICY[POLICY.index("[[reference]]") :].replace("…", firmware)
    devices = f'devices = ["{hardware_id}"]'
    machine.write("/root/reference", reference.encode())
    machine.shell(
        f"sed -i 's/^version = 1$/version = 2/; s/^roles = .*/&\\n{devices}/' "
        "/etc/sealane/policy.toml; cat /root/reference >> /etc/sealane/policy.toml"
    )
    secondary, gateway = CONFIGURATION.split("[gateway]\n")
    machine.write("/root/secondary", secondary.encode())
    machine.shell(
        f"sed -i 's/^\\[gateway\\]$/&\\n{gateway.strip()}/; "
        's|^policy_file = .*|&\\ncard_roots = "/etc/sealane/card-roots.pem"|\' '
        f"{CONFIG}; cat /root/secondary >> {CONFIG}"
    )


def kill(machine: Machine) -> None:
    """Kill the card's unit once the card has sealed; return when it is used again."""
    wait_for_figure(machine, "sectors_sealed", figure(machine, "sectors_sealed") + SECTORS)
    losses, restarts = figure(machine, "losses"), int(machine.property(CARD, "NRestarts"))
    machine.run("systemctl", "kill", "--signal=SIGKILL", CARD)
    wait_for_figure(machine, "losses", losses + 1)
    wait_until(lambda: int(machine.property(CARD, "NRestarts")) == restarts + 1, machine)
    wait_until(lambda: is_in_use(machine), machine)


def test_a_host_does_not_notice_a_card_whose_unit_is_killed(
    machine: Machine, tmp_path: Path
) -> None:
    give_card(machine, Maker(tmp_path / "maker"))
    # The socket is its group's. The daemon isn't in it yet.
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", CARD)
    machine.run("systemctl", "restart", "sealaned")
    probed = machine.attempt("sealanectl", "offload", "probe", LABEL)
    assert (probed.returncode != 0, "[evidence.secondary.failed]" in probed.stderr) == (True, True)

    machine.run_block(START_BOTH)
    wait_until(lambda: is_in_use(machine), machine)
    daemon = machine.property("sealaned", "MainPID")
    with machine.start(PYTHON, "-c", LOAD, "/run/sealane/sealaned.sock") as load:
        assert load.stdout is not None
        assert load.stdout.readline() == "begun\n"
        for _ in range(KILLS):
            kill(machine)
        machine.run("touch", "/run/stop")
        said, complaints = load.communicate(timeout=PATIENCE_SECONDS)
    assert load.returncode == 0, complaints + machine.journal()
    seen, found = json.loads(said), card(machine)
    print(seen["rounds"], max((p for _, p in seen["pauses"]), default=0.0), found)
    assert found["refusals"] == 0
    assert machine.property("sealaned", "MainPID") == daemon


def test_the_daemon_starts_its_card_first_and_does_without_one(
    machine: Machine, tmp_path: Path
) -> None:
    give_card(machine, Maker(tmp_path / "maker"))
    machine.run_block(START_BOTH)
    wait_until(lambda: is_in_use(machine), machine)
    machine.run("systemctl", "stop", CARD)
    wait_until(lambda: not is_in_use(machine), machine)
    machine.run("systemctl", "restart", "sealaned")
    assert machine.property(CARD, "ActiveState") == "active"
    wait_until(lambda: is_in_use(machine), machine)
    invocation = machine.property("sealaned", "InvocationID")
    log = machine.run("journalctl", "--output=cat", f"_SYSTEMD_INVOCATION_ID={invocation}")
    assert "device_silent" not in log, "the gateway attested without its card"

    machine.run("systemctl", "stop", CARD)
    machine.shell(f"rm {UNIT[0]}; systemctl daemon-reload")
    machine.run("systemctl", "restart", "sealaned")
    assert machine.property(CARD, "ActiveState") == "inactive"
    assert card(machine)["state"] == "not_in_use"
    machine.run("sealanectl", "volume", "list")

    # Without the group the unit can't be started: the page says so.
    machine.shell(f"userdel {CARD}")
    assert machine.attempt("systemctl", "restart", "sealaned").returncode != 0
    assert "216" in machine.property("sealaned", "ExecMainStatus")
