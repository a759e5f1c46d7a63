"""The shipped unit with real daemons: example, checks, reload, priorities."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from control_plane import daemon, sealaned, short_directory
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "systemd"


def moved(text: str, root: Path) -> str:
    """Return the text for a machine whose file system is under `root`."""
    text = text.replace("credential:sealane.", f"{root}/etc/")
    for place, name in (
        ("/etc/sealane", "etc"),
        ("/var/lib/sealane", "var"),
        ("/run/sealane", "etc/sealaned-run"),  # where the tests' helper expects the ready file
    ):
        text = text.replace(place, f"{root}/{name}")
    return text


@pytest.fixture
def example() -> Iterator[Path]:
    """Return the example's configuration, with the keys and policy that the unit makes for it."""
    with short_directory() as root:
        (root / "etc").mkdir()
        shipped = moved((SYSTEMD / "sealaned.toml").read_text(), root)
        numbers = sorted({*re.findall(r"127\.0\.0\.1:\d+", shipped)})
        for known, free in zip(numbers, addresses_of_our_own(len(numbers)), strict=True):
            shipped = shipped.replace(known, free)
        path = root / "etc" / "sealaned.toml"
        path.write_text(shipped)
        assert sealaned("--config", path, "--set-up").returncode == 0
        yield path


def test_the_example_starts_as_it_is_shipped(example: Path) -> None:
    checked = sealaned("--config", example, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert not (example.parents[1] / "var").exists()  # a check creates nothing
    with daemon(example) as running:
        assert {"broker", "target", "gateway", "fabric_control", "metrics"} <= {*running.addresses}


# Faults: the file, its content, and exit code and reason of a check and of a start.
MISTAKES = {
    "no key encryption key": ("kek", None, 2, "config.unreadable"),
    "a short one": ("kek", b"short", 2, "key.size"),
    "no attestation key": ("attestation-key", None, 2, "config.unreadable"),
    "one that is none": ("attestation-key", b"-----BEGIN", 2, "attestation.key.malformed"),
    "no policy": ("policy.toml", None, 2, "config.unreadable"),
    "no trust anchor": ("anchor.pem", None, 2, "config.unreadable"),
    "one that is not": ("anchor.pem", b"none", 3, "certificate.anchor.malformed"),
    "a directory that is a file": ("../var/volumes", b"", 2, "directory.unusable"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_start_cannot_use_a_check_refuses(example: Path, mistake: str) -> None:
    name, content, exit_code, reason = MISTAKES[mistake]
    path = example.parent / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    if name == "anchor.pem":
        # The address of a broker on another machine.
        own = f"{example.parents[1]}/var/trust-anchor.pem"
        example.write_text(example.read_text().replace(own, str(path)))
    checked = sealaned("--config", example, "--check")
    started = sealaned("--config", example)
    assert checked.returncode == started.returncode == exit_code, checked.stderr + started.stderr
    assert checked.stderr == started.stderr
    assert f"[{reason}]" in checked.stderr


def test_a_drive_that_is_gone_is_waited_for(example: Path) -> None:
    text = example.read_text().replace(
        'store = "file" ', 'store = "nvme"\nnamespaces = ["/dev/ng99n99"] '
    )
    example.write_text(text)
    started = sealaned("--config", example)
    assert "[target.namespace.missing]" in started.stderr
    # The unit starts it again after this one, but not after 2.
    assert started.returncode == 4


def test_keys_and_directories_open_to_others_are_refused_by_a_check(example: Path) -> None:
    (example.parent / "kek").chmod(0o644)
    assert "[key.file.mode]" in sealaned("--config", example, "--check").stderr
    (example.parent / "kek").chmod(0o600)
    (example.parents[1] / "var").mkdir(mode=0o755)
    assert "[directory.mode]" in sealaned("--config", example, "--check").stderr


def test_a_reload_fails_where_the_daemon_refuses_it(example: Path) -> None:
    whole = example.read_text()
    assert "[daemon.stopped]" in sealaned("--config", example, "--reload").stderr
    with daemon(example) as running:
        done = sealaned("--config", example, "--reload")
        assert (done.returncode, done.stderr) == (0, "")
        # A check that begins right after a change of the file sees it.
        (example.parent / "policy.toml").write_text("version = \n")
        refused = sealaned("--config", example, "--reload")
        assert refused.returncode == 2
        assert "nothing was changed: " in refused.stderr
        example.write_text(whole + "[target2]\n")
        assert "config.key.unknown" in sealaned("--config", example, "--reload").stderr
        example.write_text(whole)
        running.kill()
        # Its ready file is still there, but another process may have its process id.
        left = sealaned("--config", example, "--reload")
        assert (left.returncode, "[daemon.stopped]" in left.stderr) == (4, True)


def test_the_journal_gets_priorities(example: Path) -> None:
    log = example.with_suffix(".journal")
    with log.open("wb") as sink:
        status = os.fstat(sink.fileno())
        journal = os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        started = [sys.executable, "-m", "sealane.daemon.main", "--config", str(example)]
        with subprocess.Popen(started, stderr=sink, stdout=sink, env=journal) as process:
            ready = example.parent / "sealaned-run" / "ready.json"
            wait_until(ready.exists, process)
            process.send_signal(signal.SIGHUP)
            (example.parent / "policy.toml").unlink()
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "reload_failed" in log.read_text(), process)
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0
        # A failed start is also logged as an error.
        assert subprocess.run(started, stderr=sink, env=journal, check=False).returncode == 2
    levels = {"debug": "7", "info": "6", "warning": "4", "error": "3"}
    *lines, last = log.read_text().splitlines()
    seen = set()
    for line in lines:
        found = re.fullmatch(r"<(\d)>({.*})", line)
        assert found is not None, line
        level = json.loads(found[2])["level"]
        assert found[1] == levels[level]
        seen.add(level)
    assert seen >= {"info", "warning", "error"}
    assert last.startswith("<3>sealaned: ")


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Poll for a condition while a process lives."""
    # Poll, because another process does it.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
