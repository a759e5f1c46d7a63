"""All-reduce between sites of the link lab: hosts in namespaces, each hop over a long, lossy link.

Sites of even rank are on one side, those of odd rank on the other, so that every hop crosses the
link. `make ring-lab` uses eight sites.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lab_site
from control_plane import short_directory
from labs import RunningLab, needs_root, running, wan

pytestmark = needs_root

SIZES = [int(size) for size in os.environ.get("SEALANE_RING_SITES", "3").split(",")]
LINK = """
rate_bits_per_second = 200_000_000
delay_micros = 12_500
buffer_bytes = 4_000_000
loss = 0.03
"""
TIMEOUT_SECONDS = 100.0


@contextlib.contextmanager
def lab_of(directory: Path, size: int) -> Iterator[RunningLab]:
    """Return a topology with hosts s0, s1, … on the two sides of a link."""
    names = [f"s{rank}" for rank in range(size)]
    topology = wan("ocean", left='", "'.join(names[::2]), right='", "'.join(names[1::2]), link=LINK)
    with running(directory, "late_max = 1.0\n" + topology) as lab:
        yield lab


@contextlib.contextmanager
def sites_of(lab: RunningLab, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a process for each site; kill them at the end."""
    with short_directory() as root, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(size):
            name = f"s{rank}"
            command = [sys.executable, lab_site.__file__, str(root), name]
            words = [lab.address(name, "ocean"), str(rank), str(size)]
            process = subprocess.Popen(
                [*lab.entering(name), *command, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(lab_site.__file__).parent)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def results(processes: list[subprocess.Popen[str]]) -> list[dict[str, str]]:
    """Send all addresses to all sites; return the results of each."""
    members = ""
    for process in processes:
        assert process.stdout is not None
        members += process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(members)
        process.stdin.flush()
    found = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(line) for line in found]


@pytest.mark.parametrize("size", SIZES)
def test_sites_get_the_sum_of_all(tmp_path: Path, size: int) -> None:
    with lab_of(tmp_path, size) as lab, sites_of(lab, size) as processes:
        found = results(processes)
        report = lab.report("ocean")

    total: Any = np.sum([lab_site.contribution(rank) for rank in range(size)], axis=0)
    brief = (total.view(np.uint32) >> 16).astype(np.uint16)
    expected = {"float32": lab_site.digest(total), "bfloat16": lab_site.digest(brief)}
    assert found == [expected] * size
    for way in ("forward", "backward"):
        assert report[way]["paths"][0]["lost_packets"] > 0, way
