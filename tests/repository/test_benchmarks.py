"""Benchmarks are run by hand; these tests check that each of them starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from software_tpm import NO_TPM_LIBRARY

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(each.parent.name for each in ROOT.glob("benchmarks/*/__main__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_benchmark_imports_what_it_needs_and_says_what_it_measures(package: str) -> None:
    if package == "control":
        pytest.importorskip("tpm2_pytss", reason=NO_TPM_LIBRARY)
    command = [sys.executable, "-m", f"benchmarks.{package}", "--help"]
    said = subprocess.run(
        command,
        cwd=ROOT,
        # As the make targets do: where PYTHONSAFEPATH is set, the working directory isn't searched.
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert f"benchmarks.{package}" in said.stdout
