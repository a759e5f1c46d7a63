"""The package over its life: an upgrade, a removal, a purge."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from systemd_lab.conftest import install
from systemd_lab.machine import Machine

pytestmark = pytest.mark.lab_systemd

PACKED_MAX = 120 << 20
EXAMPLES = "/usr/share/doc/sealane/examples"
KEPT = (
    *("/etc/sealane/sealaned.toml", "/etc/sealane/policy.toml", "/etc/credstore/sealane.kek"),
    *("/var/lib/sealane/broker.sqlite", "/var/lib/sealane/volumes"),
)


def there(machine: Machine, *paths: str) -> bool:
    """Return True if all paths exist, False if none does."""
    found = {machine.attempt("test", "-e", path).returncode == 0 for path in paths}
    assert len(found) == 1, paths
    return found.pop()


@pytest.fixture(scope="module")
def newer(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the package under a later version number."""
    root = tmp_path_factory.mktemp("newer")
    subprocess.run(["dpkg-deb", "--raw-extract", package, root / "tree"], check=True)
    control = root / "tree" / "DEBIAN" / "control"
    version = re.compile(r"^(Version: .*)$", re.MULTILINE)
    control.write_text(version.sub(r"\1+next", control.read_text()))
    made = root / "sealane_next.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", root / "tree", made]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(root / "tree")
    return made


def test_an_upgrade_restarts_what_runs_and_keeps_the_rest(machine: Machine, newer: Path) -> None:
    machine.shell(f"cp {EXAMPLES}/broker.toml {EXAMPLES}/fabric.toml /etc/sealane/")
    machine.shell("sed -i 's/7440/7450/; s/7441/7451/' /etc/sealane/broker.toml")
    machine.shell("sealaned --config /etc/sealane/broker.toml --set-up")
    machine.shell("echo '# mine' >> /etc/sealane/sealaned.toml")
    machine.shell("systemctl start sealaned")
    machine.shell("cp /etc/sealane/policy.toml /etc/sealane/broker-policy.toml")
    machine.shell("systemctl start sealaned@broker")
    units = ("sealaned", "sealaned@broker", "sealaned@fabric")
    before = [machine.property(unit, "MainPID") for unit in units]
    machine.run("sealanectl", "volume", "create", "--size", "16MiB", "--display-name", "kept")

    said = install(machine, newer)
    assert "+next" in machine.run("dpkg-query", "-W", "-f", "${Version}", "sealane"), said
    after = [machine.property(unit, "MainPID") for unit in units]
    assert "0" not in after[:2], said + machine.journal()
    assert not {*before[:2]} & {*after[:2]}
    assert after[2] == "0"  # was not running
    assert "kept" in machine.run("sealanectl", "volume", "list")
    assert "# mine" in machine.run("cat", "/etc/sealane/sealaned.toml")


def test_a_removal_and_a_purge_leave_keys_and_data(machine: Machine, package: Path) -> None:
    machine.run("systemctl", "start", "sealaned")
    machine.run("sealanectl", "volume", "create", "--size", "16MiB", "--display-name", "kept")
    machine.run("apt-get", "remove", "--yes", "sealane")
    assert machine.property("sealaned", "ActiveState") == "inactive"
    assert not there(machine, "/usr/bin/sealaned", "/usr/lib/sealane")
    assert "left configuration, keys and data" in machine.run(
        "apt-get", "purge", "--yes", "sealane"
    )
    assert there(machine, *KEPT)
    install(machine, package)
    machine.run("systemctl", "start", "sealaned")
    assert "kept" in machine.run("sealanectl", "volume", "list")


def test_who_says_so_is_left_nothing(machine: Machine) -> None:
    machine.run("systemctl", "start", "sealaned")
    machine.shell("SEALANE_PURGE=everything apt-get purge --yes sealane")
    assert not there(machine, *KEPT)


def test_manual_pages_and_size(machine: Machine, package: Path) -> None:
    pages = machine.run("dpkg", "-L", "sealane").split()
    for page in ("man8/sealaned.8.gz", "man5/sealaned.toml.5.gz", "man1/sealanectl-volume.1.gz"):
        assert f"/usr/share/man/{page}" in pages
    assert package.stat().st_size < PACKED_MAX
    assert not any("/matplotlib/" in path for path in pages)
