"""torch.distributed over fabric daemons; `make torch-test` uses Debian's torch."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from control_plane import Daemon, Site, daemon, short_directory
from labs import needs_root, running, wan

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is not installed (make torch-test)"
    ),
    # Importing torch takes half a minute in some versions.
    pytest.mark.timeout(400),
]
PROGRAMS = Path(__file__).parent
TIMEOUT_SECONDS = 180.0
LINK = """
rate_bits_per_second = 200_000_000
delay_micros = 12_500
buffer_bytes = 4_000_000
loss = 0.001
"""


@dataclass(frozen=True)
class Rank:
    """A process of a job: where it runs, and its fabric."""

    daemon: Daemon
    prefix: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def ranks_of(addresses: Sequence[str], prefixes: Sequence[Sequence[str]]) -> Iterator[list[Rank]]:
    """Run fabrics at these addresses, and a broker next to the first."""
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        names = [f"s{rank}" for rank in range(len(addresses))]
        site.write_policy({name: ["fabric"] for name in names})
        config = site.broker_config(listen=f"{addresses[0]}:0")
        broker = stack.enter_context(daemon(config, prefix=prefixes[0]))
        ranks = []
        for name, address, prefix in zip(names, addresses, prefixes, strict=True):
            fabric = (
                f'[fabric]\ncontrol_listen = "{address}:0"\ndata_listen = "{address}"\n'
                "rate_max_bits_per_second = 1000000000\n"
            )
            config = site.write_config(name, site.enrolment(name, broker) + fabric)
            ranks.append(Rank(stack.enter_context(daemon(config, prefix=prefix)), prefix))
        yield ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Rank]]:
    with ranks_of(["127.0.0.1"] * 2, [(), ()]) as found:
        yield found


def run(program: str, ranks: list[Rank], *arguments: str) -> list[str]:
    """Run a process for each rank; return their outputs."""
    processes = [
        subprocess.Popen(
            # Debian's torch supports only NumPy 1 and warns about it; the tests don't need it.
            [
                *(*rank.prefix, sys.executable, "-W", "ignore", str(PROGRAMS / program)),
                *(*arguments, str(number), str(len(ranks))),
            ],
            env=os.environ
            | {"SEALANE_SOCKET": rank.daemon.socket, "OMP_NUM_THREADS": "1"}
            | rank.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, rank in enumerate(ranks)
    ]
    try:
        results = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, complaint) in zip(processes, results, strict=True):
        assert process.returncode == 0, complaint
    return [output for output, _ in results]


def losses(backend: str, directory: Path, ranks: list[Rank]) -> list[list[float]]:
    """Train; return the losses of each rank."""
    return [json.loads(line) for line in run("train.py", ranks, backend, str(directory / backend))]


def test_training_over_sessions_has_the_loss_of_gloo(tmp_path: Path, ranks: list[Rank]) -> None:
    ours = losses("sealane", tmp_path, ranks)
    theirs = losses("gloo", tmp_path, ranks)

    assert ours[0] == ours[1]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[0][-1] < ours[0][0]


def test_one_rank_alone_trains_as_with_gloo(tmp_path: Path, ranks: list[Rank]) -> None:
    (ours,), (theirs,) = (losses(name, tmp_path, ranks[:1]) for name in ("sealane", "gloo"))
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_late_aborted_unequal_and_dead_ranks_end_the_operations_of_all(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    run("failures.py", ranks, str(tmp_path / "store"))


def test_tensors_lie_in_the_region(ranks: list[Rank]) -> None:
    near, far = (rank.daemon for rank in ranks)
    command = [sys.executable, "-W", "ignore", str(PROGRAMS / "arrays.py"), near.socket, far.socket]
    result = subprocess.run(
        [*command, "s1", far.addresses["fabric_control"]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@needs_root
def test_training_over_a_long_lossy_link_has_the_loss_of_gloo(tmp_path: Path) -> None:
    with running(tmp_path, "late_max = 1.0\n" + wan("ocean", link=LINK)) as lab:
        hosts = ["a", "b"]
        addresses = [lab.address(host, "ocean") for host in hosts]
        with ranks_of(addresses, [lab.entering(host) for host in hosts]) as found:
            for rank in found:
                rank.environment["GLOO_SOCKET_IFNAME"] = "ocean"
            before = lab.report("ocean")
            ours = losses("sealane", tmp_path, found)
            after = lab.report("ocean")
            theirs = losses("gloo", tmp_path, found)

    assert ours[0] == ours[1]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    lost, sent = (
        sum(
            report[way]["paths"][0][name] * sign
            for way in ("forward", "backward")
            for report, sign in ((after, 1), (before, -1))
        )
        for name in ("lost_packets", "delivered_packets")
    )
    assert sent > 1000, "the tensors crossed the link"
    assert lost > 0
