"""The store `nvme` on QEMU's emulated drive with 64 bytes of metadata."""

import re
import shutil
from pathlib import Path

import pytest

from kernel_lab.emulation import Guest
from kernel_lab.engine import engine_program
from kernel_lab.lab import GuestFailedError, Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

DRIVE_BYTES = 64 << 20
FORMAT = "ms=64,mset=1,logical_block_size=4096,physical_block_size=4096"


@pytest.fixture(scope="module")
def engine_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine's tests as a program without debug information."""
    return engine_program(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "drive.img"
    with path.open("wb") as file:
        file.truncate(DRIVE_BYTES)
    return path


def run(lab: Lab, engine_tests: Path, image: Path, step: str) -> str:
    options = {"file": (str(engine_tests),), "nvme": (f"{image},{FORMAT}",), "network": False}
    return lab.run(step, options=options, timeout=400).output


def anchored(output: str) -> str:
    """Return the state last anchored for the store."""
    return re.findall(r"ANCHORED ([0-9a-f]{130})\b", output)[-1]


@pytest.mark.parametrize(
    "test",
    [
        "behaves_as_a_store",
        "behaves_as_a_store_that_keeps_freshness",
        "grows_as_far_as_the_namespace",
    ],
)
def test_drive_does_what_every_store_does(
    lab: Lab, engine_tests: Path, image: Path, test: str
) -> None:
    assert "1 passed" in run(lab, engine_tests, image, f"drive {test}")


def test_power_cut_loses_nothing_flushed_and_an_older_image_is_refused(
    lab: Lab, engine_tests: Path, image: Path, tmp_path: Path
) -> None:
    state = anchored(run(lab, engine_tests, image, "drive lay_out"))
    older = tmp_path / "older.img"
    shutil.copyfile(image, older)

    def cut(guest: Guest) -> None:
        guest.cut_power()

    options = {"file": (str(engine_tests),), "nvme": (f"{image},{FORMAT}",), "network": False}
    with pytest.raises(GuestFailedError) as caught:
        lab.run(
            f"drive_until_cut write_until_power_is_cut {state}",
            calls={"cut": cut},
            options=options,
            timeout=400,
        )
    state = anchored(caught.value.output)
    opened = run(lab, engine_tests, image, f"drive has_what_was_flushed {state}")
    assert "1 passed" in opened
    shutil.copyfile(older, image)
    assert "1 passed" in run(lab, engine_tests, image, f"drive is_refused {anchored(opened)}")
