"""docs/start/first-volume.md and first-session.md work as described, command by command."""

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import daemon, short_directory
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own
from sealane.daemon.runtime.statistics import UNKNOWN

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
START = ROOT / "docs" / "start"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language, in order."""
    text = (START / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def home() -> Iterator[Path]:
    with short_directory() as root:
        yield root


def start(home: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"HOME": str(home), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(running: subprocess.Popen[str]) -> str:
    try:
        said, complaints = running.communicate(timeout=PATIENCE_SECONDS)
    finally:
        running.kill()
    assert running.returncode == 0, complaints
    return said


def run(home: Path, *command: str) -> str:
    return end(start(home, *command))


@pytest.mark.slow
def test_a_newcomer_gets_a_volume_and_a_session_by_the_pages_commands(home: Path) -> None:
    prepare, begin, volume = blocks("first-volume.md", "sh")
    (program,) = blocks("first-volume.md", "python")
    listener, opener = blocks("first-session.md", "python")
    (plan,) = blocks("first-session.md", "sh")
    # Replace the page's ports, which may be in use here.
    run(home, "sh", "-eu", "-c", prepare)
    path = home / "sealane" / "etc" / "sealaned.toml"
    text = path.read_text()
    numbers = sorted({*re.findall(r"127\.0\.0\.1:\d+", text)})
    for known, free in zip(numbers, addresses_of_our_own(len(numbers)), strict=True):
        text = text.replace(known, free)
        opener = opener.replace(known, free)
    # The tests' helper expects the ready file here.
    text = text.replace(f"{home}/sealane/run", f"{path.parent}/sealaned-run")
    path.write_text(text)
    assert begin.startswith("sealaned --config ~/sealane/etc/sealaned.toml &\n")
    with daemon(path) as running:
        (home / "sealane" / "run").symlink_to(Path(running.socket).parent)
        assert "first" in run(home, "sh", "-eu", "-c", volume)
        run(home, sys.executable, "-c", program)
        listening = start(home, sys.executable, "-c", listener)
        assert "65536 bytes there in " in run(home, sys.executable, "-c", opener)
        # Each figure has a description.
        with urllib.request.urlopen(f"http://{running.addresses['metrics']}/metrics") as answer:
            metrics = answer.read().decode()
        assert "sealane_target_volume_sectors_stored_total{" in metrics
        assert UNKNOWN.help not in metrics
        assert end(listening) == "received 65536 bytes and sent them back\n"
        run(home, "sh", "-eu", "-c", plan)
    kept = [path for path in (home / "sealane" / "state").rglob("*") if path.is_file()]
    assert any(path.stat().st_size > 1 << 20 for path in kept)
    assert not [path for path in kept if b"sealed before" in path.read_bytes()]
