"""Sessions over InfiniBand verbs, on soft-RoCE: queue pairs alone, and daemons as packaged."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from control_plane import short_directory
from kernel_lab.emulation import Guest
from kernel_lab.lab import Calls, GuestFailedError, Lab, Run

pytestmark = [pytest.mark.lab_verbs, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
NATIVE = TESTS.parent / "native"
GUEST_FILES = (
    TESTS / "patience.py",
    TESTS / "control_plane.py",
    TESTS / "fabric_daemons.py",
    HERE / "verbs_guest.py",
    HERE / "verbs_sessions.py",
)
REFUSED = ("replayed", "forged", "misdirected", "malformed", "unknown_epoch")
"""Counters of packets that were not taken."""
MODES = pytest.mark.parametrize("mode", ["send", "write"])
LOSSY = "delay 2ms 1ms loss 2% duplicate 1%"


def built(*target: str) -> Path:
    """Build a program of sealane-verbs for the guest; return its path."""
    made = subprocess.run(
        [
            *("cargo", "build", "--locked", "--release", "-p", "sealane-verbs", *target),
            *("--message-format=json", "--quiet"),
        ],
        cwd=NATIVE,
        check=True,
        capture_output=True,
        text=True,
    )
    messages = map(json.loads, made.stdout.splitlines())
    (program,) = {found for each in messages if (found := each.get("executable"))}
    return Path(program)


@pytest.fixture(scope="module")
def queue_pair_tests() -> Path:
    """Build the tests of native/verbs/tests."""
    return built("--test", "soft_roce")


def disk_of(package: Path, directory: Path) -> Path:
    """Make a disk image with a package's files in a directory; return its path."""
    root, image = directory / "root", directory / "package.ext4"
    subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, image, "300M"], check=True)
    shutil.rmtree(root)
    return image


@pytest.fixture(scope="module")
def package_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a disk image with the package's files."""
    package = Path(os.environ["SEALANE_DEB"]).resolve()
    image = disk_of(package, tmp_path_factory.mktemp("package"))
    yield image
    image.unlink()


def run_queue_pairs(mode: str, program: Path, tests: str = "") -> str:
    """Return the step that runs the queue pairs' tests."""
    run = f"./{program.name} --ignored --nocapture --test-threads=1 {tests}"
    return f"SEALANE_VERBS_MODE={mode} {run}"


@pytest.mark.parametrize("mode", [pytest.param("send", marks=pytest.mark.lab_verbs_short), "write"])
def test_queue_pairs_keep_datagrams_whole(lab: Lab, queue_pair_tests: Path, mode: str) -> None:
    ran = lab.run(
        "roce_pair 4200",
        run_queue_pairs(mode, queue_pair_tests, "--skip small"),
        options={"file": (str(queue_pair_tests),), "cpus": 2},
    )

    assert "test result: ok. 9 passed" in ran.output


def test_queue_pairs_need_packets_of_2048_bytes(lab: Lab, queue_pair_tests: Path) -> None:
    ran = lab.run(
        "roce_pair 1500",
        run_queue_pairs("send", queue_pair_tests, "small"),
        options={"file": (str(queue_pair_tests),)},
    )

    assert "test result: ok. 1 passed" in ran.output


def test_queue_pairs_over_a_network_that_loses_and_reorders(
    lab: Lab, queue_pair_tests: Path
) -> None:
    ran = lab.run(
        f"roce_pair 4200 {LOSSY}",
        *(run_queue_pairs(mode, queue_pair_tests, "lossy") for mode in ("send", "write")),
        options={"file": (str(queue_pair_tests),), "cpus": 2},
    )

    assert ran.output.count("in order: false") == 2
    assert "1000 of 1000 arrived" not in ran.output


def sessions(
    lab: Lab, disk: Path, scenario: str, mode: str, network: str = "4200", *files: Path
) -> Any:
    """Run a scenario of verbs_sessions.py; return its figures."""
    ran = lab.run(
        f"roce_pair {network}",
        "installed",
        f"sessions {scenario} {mode}",
        timeout=600,
        options={
            "file": tuple(map(str, (*GUEST_FILES, *files))),
            "disk": (str(disk),),
            "cpus": 2,
            "memory": "2G",
        },
    )
    return ran.json(scenario)


@MODES
def test_a_session_uses_both_wires_and_each_takes_over(
    lab: Lab, package_disk: Path, mode: str
) -> None:
    figures = sessions(lab, package_disk, "both", mode)

    assert figures["unit_bytes"] == 4032
    for wire in ("udp", "verbs"):
        assert figures["paths"][wire]["packets_sent"] > 100, wire
    assert figures["device_failures"] > 0


def test_peers_with_no_queue_pair_for_both_use_udp(lab: Lab, package_disk: Path) -> None:
    figures = sessions(lab, package_disk, "limited", "send")

    assert set(figures["paths"]) == {"udp"}
    assert "fabric.pinned_bytes_max" in figures["unavailable"]


@MODES
@pytest.mark.parametrize("network", ["4200", f"4200 {LOSSY}"], ids=["clean", "lossy"])
def test_a_session_over_verbs_only(lab: Lab, package_disk: Path, mode: str, network: str) -> None:
    figures = sessions(lab, package_disk, "only", mode, network)

    assert figures["paths"]["verbs"]["packets_sent"] > 1000
    assert figures["paths"]["verbs"]["device_failures"] == 0


@MODES
def test_forged_messages_to_a_queue_pair_reach_no_job(
    lab: Lab, package_disk: Path, mode: str
) -> None:
    figures = sessions(lab, package_disk, "forged", mode, "4200", built("--example", "forge"))

    counted = figures["statistics"]
    # In turn: one that was heard before, the same with one bit changed, any bytes. Most of those
    # changed have a number that was seen, too.
    assert counted["replayed"] >= 300
    assert counted["malformed"] >= 300
    assert counted["forged"] >= 1
    assert sum(counted[name] for name in REFUSED) >= 900


def test_two_machines_and_the_death_of_one(
    guest_cache: Path, package_disk: Path, tmp_path: Path
) -> None:
    far: list[Guest] = []

    def machine(number: int, name: str, link: str, calls: Calls) -> Run:
        disk = shutil.copy(package_disk, tmp_path / f"{name}.ext4")
        return Lab(guest_cache, tmp_path / name).run(
            *(f"roce_card {number}", "installed", f"call {name}", f"machine {name}"),
            calls=calls,
            timeout=600,
            options={
                "file": (*map(str, GUEST_FILES), str(HERE / "verbs_machines.py")),
                "disk": (str(disk),),
                "memory": "1500M",
                # From which its card's address is made.
                "name": name,
                "link": (link,),
            },
        )

    with short_directory() as directory, ThreadPoolExecutor(1) as threads:
        link = directory / "link"
        dying = threads.submit(machine, 2, "far", f"listen:{link}", {"far": far.append})
        while not link.exists() and not dying.done():
            time.sleep(0.1)
        ran = machine(
            1,
            "near",
            f"connect:{link}",
            {"near": lambda _: None, "kill": lambda _: far[0].cut_power()},
        )
        with pytest.raises(GuestFailedError) as died:
            dying.result()

    assert "message 7 is whole" in died.value.output
    figures = ran.json("near")
    assert figures["wire"] == "verbs"
    # The message in flight, or the one that was posted after the end.
    assert figures["reason"] in {"session.message.outcome_unknown", "session.message.aborted"}
    assert figures["close_reason"] == "session.closed.idle_timeout"
    assert figures["seconds"] < 30
