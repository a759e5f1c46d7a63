"""`sealane demo` for its user: one-line errors, and a clean Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

COMMAND = (
    sys.executable,
    "-c",
    "import sys; from sealane.cli.sealane import main; sys.exit(main())",
)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "demo", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent"], r"--input: absent does not exist, allowed: a readable file"),
        (["--input", "."], r"--input: \. is a directory, allowed: a regular file"),
        (["--input", "empty"], r"--input: empty has 0 bytes, allowed: 1 to \d+"),
        (["--messages", "0"], r"--messages: found '0', allowed: 1 to 1000"),
        (["--messages", "many"], r"--messages: found 'many', allowed: 1 to 1000"),
        (["--output", "empty"], r"--output: \S*empty is not a directory"),
        (["--inptu", "x"], r"unrecognized arguments: --inptu x"),
    ],
)
def test_mistakes_end_with_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    finished = run(*arguments, cwd=tmp_path)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert re.search(message, finished.stderr.splitlines()[-1])
    assert "Traceback" not in finished.stderr


def test_input_larger_than_the_volume_is_refused(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(bytes(2 << 20))
    finished = run("--input", "input", "--volume-size", str(1 << 20), cwd=tmp_path)
    assert finished.returncode == 2
    assert "--volume-size: found 1048576" in finished.stderr.splitlines()[-1]


def descendants_of_session(directory: Path) -> list[str]:
    """Return the command lines that name the demo's scratch directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in line:
                found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_leaves_nothing_running_and_nothing_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    # Unix socket paths are limited; pytest's directories are too long.
    with tempfile.TemporaryDirectory(prefix="s") as short:
        (Path(short) / "t").symlink_to(scratch)
        environment = {**os.environ, "TMPDIR": f"{short}/t"}
        with subprocess.Popen(
            [*COMMAND, "demo"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("fabric-far is ready"):
                    process.send_signal(number)
                    # A second signal must not leave anything behind, either.
                    process.send_signal(signal.SIGINT)
                    break
            last = process.stderr.read().splitlines()[-1]
            # Whichever of the two the process gets first.
            assert process.wait(timeout=PATIENCE_SECONDS) in {128 + number, 128 + signal.SIGINT}
        assert last.startswith("sealane: interrupted")
        assert descendants_of_session(Path(short)) == []
        assert list(scratch.iterdir()) == []
        assert not (tmp_path / "sealane-demo").exists()
