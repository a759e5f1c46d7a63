"""The wheel: one abi3 wheel that holds every package and nothing outside `sealane/`."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in (ROOT / "src" / "sealane").iterdir() if path.is_symlink())


def sources() -> set[str]:
    """Return the wheel paths of all package files that a user needs."""
    names = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if (
                path.suffix in {".py", ".pyi", ".pem", ".proto", ".toml"}
                and "__pycache__" not in path.parts
            ):
                names.add(f"sealane/{path.relative_to(ROOT)}")
    for name in ("__init__.py", "errors.py", "reasons.py", "py.typed", "_native.pyi"):
        names.add(f"sealane/{name}")
    return names


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_holds_every_package_and_nothing_else(tmp_path: Path) -> None:
    wheel = os.environ.get("SEALANE_WHEEL")
    if wheel is None:
        # setuptools keeps what an earlier build copied, also of modules that are gone.
        for stale in (ROOT / "build").glob("lib*"):
            shutil.rmtree(stale)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "build",
                "--wheel",
                "--no-isolation",
                "--outdir",
                tmp_path,
                ROOT,
            ],
            check=True,
            capture_output=True,
        )
        (path,) = tmp_path.glob("*.whl")
    else:
        path = Path(wheel)
    assert "-cp311-abi3-" in path.name
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name for name in names if not name.startswith("sealane/")} == set()
    extension = {name for name in names if name.endswith(".so")}
    assert extension == {"sealane/_native.abi3.so"}
    assert names - extension == sources()
