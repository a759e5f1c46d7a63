"""The systemd unit: as restricted as possible, but permitting everything the roles call."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sealane.errors import UsageError, VerificationError

UNIT = Path(__file__).parents[2] / "systemd" / "sealaned.service"
EXAMPLES = sorted({UNIT.with_name("sealaned.toml"), *UNIT.parent.glob("examples/*.toml")})
EXPOSURE_MAX = 13
"""Tenths; up to 2.9 systemd calls a service OK."""
CALLED = (
    *("memfd_create", "ftruncate", "mmap", "madvise", "socketpair", "eventfd2"),  # rings
    *("pidfd_open", "poll", "getsockopt", "sendmsg", "recvmsg"),  # jobs and their descriptors
    *("epoll_create1", "epoll_ctl", "tgkill"),  # wake-ups by jobs; interrupted threads
    *("sendmmsg", "recvmmsg", "setsockopt", "ppoll", "epoll_wait"),  # packets
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),  # stores
    *("fallocate", "fdatasync", "ioctl", "flock", "statx", "preadv", "pwritev"),
    "mlockall",  # keys never go to swap
    *("clone3", "prctl", "prlimit64", "getrandom", "timerfd_create", "setpriority"),
)
KEPT_OUT = ("mount", "ptrace", "process_vm_readv", "bpf", "setuid", "setrlimit", "keyctl")

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def test_the_daemon_has_a_user_of_its_own_and_lets_nobody_else_at_its_socket() -> None:
    lines = UNIT.read_text().splitlines()
    assert {"User=sealane", "Group=sealane", "UMask=0077", "RuntimeDirectoryMode=0700"} <= {*lines}
    assert "SupplementaryGroups" not in UNIT.read_text()
    sysusers = (UNIT.parent / "sealane.sysusers").read_text().splitlines()
    user, *groups = [line.split() for line in sysusers if not line.startswith("#")]
    assert (*user[:3], user[-1]) == ("u", "sealane", "-", "/usr/sbin/nologin")
    assert groups == [
        ["g", f"sealane-{name}", "-", "-"] for name in ("operators", "jobs", "readers")
    ]


def test_names_of_users_can_be_looked_up_before_the_daemon_starts() -> None:
    (after,) = [each for each in UNIT.read_text().splitlines() if each.startswith("After=")]
    assert "nss-user-lookup.target" in after.removeprefix("After=").split()


def test_the_drop_in_for_jobs_tells_users_apart_and_opens_their_directory_only() -> None:
    dropped = (UNIT.parent / "drop-ins" / "jobs.conf").read_text().splitlines()
    settings = [line for line in dropped if "=" in line and not line.startswith("#")]
    assert settings == ["PrivateUsers=no", "ReadWritePaths=/run/sealane-jobs"]
    made = (UNIT.parent / "sealane.tmpfiles").read_text().splitlines()
    assert "d /run/sealane-jobs 0711 sealane sealane -" in made


def test_the_drop_in_for_cards_opens_no_device() -> None:
    dropped = (UNIT.parent / "drop-ins" / "accelerator.conf").read_text().splitlines()
    settings = [line for line in dropped if "=" in line and not line.startswith("#")]
    assert settings == [
        "Wants=sealane-card.service",
        "After=sealane-card.service",
        "SupplementaryGroups=sealane-card",
    ]


def test_a_wrong_configuration_is_not_tried_again() -> None:
    settings: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals:
            settings.setdefault(name, []).append(value)
    (codes,) = settings["RestartPreventExitStatus"]
    assert {UsageError.exit_code, VerificationError.exit_code} == {*map(int, codes.split())}
    # The setting concerns the main process: a failing check before it would be retried forever.
    assert "ExecStartPre" not in settings
    assert settings["ExecReload"] == [settings["ExecStart"][0] + " --reload"]


def template_of(unit: Path) -> str:
    """Return the unit's template, as the package has it."""
    sed = ["sed", "-f", UNIT.with_name("instance.sed"), unit]
    return subprocess.run(sed, capture_output=True, text=True, check=True).stdout


def test_an_instance_has_files_of_its_own() -> None:
    named = re.compile(r"/etc/sealane/\S+|(?:State|Runtime)Directory=\S+|LoadCredential=\S+")
    found = named.findall(template_of(UNIT))
    assert found == [
        *("/etc/sealane/%i.toml", "/etc/sealane/%i.toml"),
        *("StateDirectory=sealane-%i", "RuntimeDirectory=sealane-%i"),
        "LoadCredential=sealane.%i.kek",
        "LoadCredential=sealane.%i.attestation-key",
        "LoadCredential=sealane.%i.hsm-pin",
        "LoadCredential=sealane.%i.etcd-key",
    ]
    setup = template_of(UNIT.with_name("sealaned-setup.service"))
    assert "ConditionPathExists=!/var/lib/sealane-%i/state.lock\n" in setup
    assert "Before=sealaned@%i.service\n" in setup
    assert "sealaned-setup@%i.service\n" in template_of(UNIT)


def test_instances_called_as_their_roles_restart_in_order() -> None:
    after = {
        path.stem: re.findall(r"sealaned@(\w+)\.service", path.read_text().partition("[Unit]")[2])
        for path in sorted((UNIT.parent / "order").iterdir())
    }
    assert after == {"fabric": ["broker"], "gateway": ["broker", "target"], "target": ["broker"]}
    # One transaction of all, which ends when they have started.
    lines = UNIT.read_text().splitlines()
    assert {"PartOf=sealane.target", "Before=sealane.target"} <= {*lines}


def test_examples_name_the_credentials_and_directories_of_their_unit() -> None:
    for path in EXAMPLES:
        example = tomllib.loads(path.read_text())
        is_instance = path.parent != UNIT.parent
        suffix = f"-{path.stem}" if is_instance else ""
        unit = template_of(UNIT).replace("%i", path.stem) if is_instance else UNIT.read_text()
        assert example["node"]["state_dir"] == f"/var/lib/sealane{suffix}"
        assert example["node"]["run_dir"] == f"/run/sealane{suffix}"
        named = re.findall(r'^\w*key_file = "credential:(\S+)"', path.read_text(), re.MULTILINE)
        assert named
        for name in named:
            assert f"LoadCredential={name}\n" in unit


def test_unit_loads(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("sealaned")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/bin/sealaned", str(program)))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=True
    )
    assert UNIT.name not in found.stderr, found.stderr


def analyze(*arguments: str | Path) -> str:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=True
    ).stdout


def groups() -> dict[str, set[str]]:
    """Return the members of each group of system calls: calls and groups."""
    found: dict[str, set[str]] = {}
    for line in analyze("syscall-filter").splitlines():
        word = line.strip()
        if line.startswith("@"):
            members = found.setdefault(word, set())
        elif line.startswith(" ") and not word.startswith("#"):
            members.add(word)
    return found


def calls_of(word: str, known: dict[str, set[str]]) -> set[str]:
    if not word.startswith("@"):
        return {word}
    return {call for each in known[word] for call in calls_of(each, known)}


def allowed() -> set[str]:
    """Return the system calls permitted by the unit's filter lines, applied in order."""
    found: set[str] = set()
    known = groups()
    for line in UNIT.read_text().splitlines():
        name, _, value = line.partition("=")
        if name != "SystemCallFilter":
            continue
        words = value.lstrip("~").split()
        named = {call for word in words for call in calls_of(word, known)}
        found = found - named if value.startswith("~") else found | named
    return found


def test_unit_is_closed_to_what_no_role_needs() -> None:
    for unit in (UNIT, UNIT.with_name("sealaned-setup.service")):
        analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit)


def test_unit_keeps_keys_out_of_core_files_and_swap() -> None:
    lines = UNIT.read_text().splitlines()
    assert {"LimitCORE=0", "LimitMEMLOCK=infinity", "MemorySwapMax=0"} <= {*lines}
    for path in EXAMPLES:
        example = tomllib.loads(path.read_text())
        assert example["node"]["lock_memory"] == "prefer"
        assert '"require" where memory can be locked' in path.read_text()


def test_filter_lets_through_what_the_roles_call() -> None:
    found = allowed()
    assert set(CALLED) <= found
    assert not found & set(KEPT_OUT)
    families = "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"
    assert families in UNIT.read_text().splitlines()
