"""docs/start/first-volume.md does what it says, command by command."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import daemon, short_directory
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
PAGE = (ROOT / "docs" / "start" / "first-volume.md").read_text()


@pytest.fixture
def home() -> Iterator[Path]:
    with short_directory() as root:
        yield root


def run(home: Path, *command: str) -> str:
    environment = os.environ | {"HOME": str(home), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_newcomer_gets_a_volume_by_the_pages_commands(home: Path) -> None:
    prepare, start, volume = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    # The last command asks for the page's ports: they may be somebody else's here.
    run(home, "sh", "-eu", "-c", prepare)
    path = home / "sealane" / "etc" / "sealaned.toml"
    text = path.read_text()
    numbers = sorted({*re.findall(r"127\.0\.0\.1:\d+", text)})
    for known, free in zip(numbers, addresses_of_our_own(len(numbers)), strict=True):
        text = text.replace(known, free)
    # Where the tests' helper looks for the ready file.
    text = text.replace(f"{home}/sealane/run", f"{path.parent}/sealaned-run")
    path.write_text(text)
    assert start.startswith("sealaned --config ~/sealane/etc/sealaned.toml &\n")
    with daemon(path) as running:
        (home / "sealane" / "run").symlink_to(Path(running.socket).parent)
        assert "first" in run(home, "sh", "-eu", "-c", volume)
        run(home, sys.executable, "-c", program)
    kept = [path for path in (home / "sealane" / "state").rglob("*") if path.is_file()]
    assert any(path.stat().st_size > 1 << 20 for path in kept)
    assert not [path for path in kept if b"sealed before" in path.read_bytes()]
