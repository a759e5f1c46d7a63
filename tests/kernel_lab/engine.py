"""The engine's tests as a program for guests."""

import json
import subprocess
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"


def engine_program(directory: Path, *options: str, strip: str = "strip") -> Path:
    """Build the engine's tests with Cargo's options; put them, stripped, into a directory."""
    built = subprocess.run(
        [
            *("cargo", "test", "--locked", "-p", "sealane-engine", "--lib", "--no-run"),
            *("--message-format=json", *options),
        ],
        cwd=NATIVE,
        capture_output=True,
        text=True,
        check=True,
    )
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    (program,) = {message["executable"] for message in messages if message.get("executable")}
    stripped = directory / "engine_tests"
    subprocess.run([strip, "-o", stripped, program], check=True)
    return stripped
