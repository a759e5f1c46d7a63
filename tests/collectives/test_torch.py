"""torch.distributed over two fabric daemons; `make torch-test` uses Debian's torch."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import Daemon, Site, daemon, short_directory

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (make torch-test)"
)
FABRIC = '[fabric]\ncontrol_listen = "127.0.0.1:0"\nrate_max_bits_per_second = 1000000000\n'
PROGRAM = Path(__file__).parent / "train.py"


@pytest.fixture(scope="module")
def sites() -> Iterator[list[Daemon]]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"a": ["fabric"], "b": ["fabric"]})
        broker = stack.enter_context(daemon(site.broker_config()))
        yield [
            stack.enter_context(
                daemon(site.write_config(name, site.enrolment(name, broker) + FABRIC))
            )
            for name in ("a", "b")
        ]


def run(backend: str, store: Path, sites: list[Daemon]) -> list[list[float]]:
    """Run a process at each site; gives the losses each has printed."""
    processes = [
        subprocess.Popen(
            # Debian's torch knows NumPy 1 only, and says so; what is tested needs none of it.
            [sys.executable, "-W", "ignore", str(PROGRAM), backend, str(store), str(rank), "2"],
            env=os.environ | {"SEALANE_SOCKET": site.socket, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, site in enumerate(sites)
    ]
    results = [process.communicate(timeout=90) for process in processes]
    for process, (_, complaint) in zip(processes, results, strict=True):
        assert process.returncode == 0, complaint
    return [json.loads(output) for output, _ in results]


def test_training_over_sessions_has_the_loss_of_gloo(tmp_path: Path, sites: list[Daemon]) -> None:
    ours = run("sealane", tmp_path / "ours", sites)
    theirs = run("gloo", tmp_path / "theirs", sites)

    assert ours[0] == ours[1]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[0][-1] < ours[0][0]
