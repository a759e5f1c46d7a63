"""A new operator: installs the package, starts the unit, makes the usual mistakes."""

import json
import re
from pathlib import Path

import pytest

from systemd_lab.conftest import install
from systemd_lab.machine import PYTHON, Machine, booted, layer

pytestmark = [pytest.mark.lab_systemd, pytest.mark.lab_systemd_short]

EXPOSURE_MAX = 1.3
"""Of `systemd-analyze security`, which calls less than 2 "OK"."""
CONFIGURATION = "/etc/sealane/sealaned.toml"
KEY = "/etc/credstore/sealane.kek"


def status_of(machine: Machine, *options: str) -> dict[str, object]:
    """Return what the daemon says of itself."""
    said = machine.run("sealanectl", *options, "status", "--output", "json")
    found: dict[str, object] = json.loads(said)
    return found


def fails_once(machine: Machine, unit: str = "sealaned") -> str:
    """Start a unit, which must fail and not be tried again; return what it logged."""
    assert machine.attempt("systemctl", "start", unit).returncode != 0
    assert machine.property(unit, "ActiveState") == "failed"
    assert machine.property(unit, "NRestarts") == "0"
    invocation = machine.property(unit, "InvocationID")
    return machine.run("journalctl", "--output=cat", f"_SYSTEMD_INVOCATION_ID={invocation}")


def test_two_commands_give_a_machine_with_every_role(image: str, package: Path) -> None:
    with booted(image) as machine:
        install(machine, package)
        assert machine.property("sealaned", "ActiveState") == "inactive"
        assert machine.property("sealaned", "UnitFileState") == "disabled"
        machine.run("systemctl", "start", "sealaned")
        assert status_of(machine)["roles"] == ["broker", "target", "gateway", "fabric"]
        machine.run("sealanectl", "volume", "create", "--size", "16MiB", "--display-name", "first")
        name = machine.run("sealanectl", "volume", "get", "first", "-o", "name").strip()
        assert machine.run("sealanectl", "volume", "list", "-o", "name").split() == [name]
        beginning = name.removeprefix("volumes/")[:8]
        assert name in machine.run("sealanectl", "volume", "get", beginning)
        typo = machine.attempt("sealanectl", "volume", "delete", "fisrt", "--yes")
        assert (typo.returncode, "[name.not_found]" in typo.stderr) == (4, True)

        security = machine.run("systemd-analyze", "security", "--no-pager", "sealaned")
        (exposure,) = re.findall(r"Overall exposure level for sealaned.service: ([\d.]+)", security)
        assert float(exposure) <= EXPOSURE_MAX, security
        for path, owner in (
            (KEY, "root 600"),
            ("/etc/sealane", "root 750"),
            ("/var/lib/sealane", "sealane 700"),
        ):
            assert machine.run("stat", "-c", "%U %a", path).strip() == owner, path
        assert machine.run("runuser", "-u", "nobody", "--", "sh", "-c", f"! cat {KEY}") == ""
        # The sandbox hides most of /proc, and not the process from itself.
        scrape = (
            "import urllib.request as u;"
            "print(u.urlopen('http://127.0.0.1:7449/metrics').read().decode())"
        )
        assert "process_start_time_seconds " in machine.run(PYTHON, "-c", scrape)
        # Warnings are found by their priority, and what matters begins the line.
        warned = machine.journal("sealaned", "--priority=warning").splitlines()
        assert any(line.startswith('{"event": "unsigned_policy", "message"') for line in warned)
        assert not any('"level": "info"' in line for line in warned)


def test_a_reload_says_what_is_wrong_and_changes_nothing(machine: Machine) -> None:
    machine.run("systemctl", "start", "sealaned")
    machine.run("systemctl", "reload", "sealaned")
    machine.shell(f"echo '[target2]' >> {CONFIGURATION}")
    assert machine.attempt("systemctl", "reload", "sealaned").returncode != 0
    assert "[config.key.unknown]" in machine.journal("sealaned")
    assert machine.property("sealaned", "ActiveState") == "active"
    assert status_of(machine)["node"] == "node-1"


def test_a_killed_daemon_is_back_with_what_it_had(machine: Machine) -> None:
    machine.run("systemctl", "start", "sealaned")
    machine.run("sealanectl", "volume", "create", "--size", "16MiB", "--display-name", "kept")
    machine.run("systemctl", "kill", "--signal=SIGKILL", "sealaned")
    # Just after the kill, systemd may still take the unit for active.
    machine.shell("until systemctl show -P NRestarts sealaned | grep -qv '^0$'; do sleep 0.1; done")
    machine.shell("until systemctl is-active --quiet sealaned; do sleep 0.1; done")
    assert machine.property("sealaned", "NRestarts") == "1"
    assert "kept" in machine.run("sealanectl", "volume", "list")
    # The first start made the keys: no later one makes others.
    assert machine.journal("sealaned-setup").count("made ") == 3


def test_a_reboot_keeps_everything(image_with_package: str) -> None:
    with layer() as kept:
        with booted(image_with_package, kept=kept) as machine:
            machine.run("systemctl", "enable", "--now", "sealaned")
            machine.run(
                "sealanectl", "volume", "create", "--size", "16MiB", "--display-name", "old"
            )
        with booted(image_with_package, kept=kept) as machine:
            assert "old" in machine.run("sealanectl", "volume", "list")


def test_mistakes_are_one_line_and_not_tried_again(machine: Machine) -> None:
    machine.run("systemctl", "start", "sealaned")
    machine.run("systemctl", "stop", "sealaned")

    machine.shell(f"mv {KEY} /root/kek")
    said = fails_once(machine)
    missing = (
        "sealaned: broker.key_file: the unit has no credential sealane.kek; it comes from "
        f"{KEY}, if the unit has the line LoadCredential=sealane.kek [config.unreadable]"
    )
    assert missing in said
    assert f"{KEY}: No such file or directory" in machine.attempt("sealaned", "--check").stderr

    machine.shell(f"install -m 0644 /root/kek {KEY}")
    assert "[key.file.mode]" in machine.attempt("sealaned", "--check").stderr
    machine.shell(f"chmod 0600 {KEY}")
    assert machine.run("sealaned", "--check") == ""

    machine.shell(
        f"sed -i 's/^listen = .127.0.0.1:4421./listen = \"192.0.2.1:4421\"/' {CONFIGURATION}"
    )
    assert "a loopback address:port" in fails_once(machine)
    machine.shell(f"rm {CONFIGURATION}")
    assert f"{CONFIGURATION}: No such file or directory" in fails_once(machine)
