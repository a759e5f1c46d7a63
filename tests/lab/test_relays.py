"""The lab without namespaces: the same links as relays between loopback ports."""

import contextlib
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labs import RunningLab, command, drain, wan
from patience import PATIENCE_SECONDS
from sealane.cli import lab as command_line
from sealane.lab.names import lab_names


@contextlib.contextmanager
def ends(
    start_lab: Callable[..., RunningLab], extra: str = ""
) -> Iterator[tuple[RunningLab, socket.socket, socket.socket]]:
    """Yield a client connected to a relayed link, and the server behind it."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
    ):
        server.bind(("127.0.0.1", 0))
        forward_to = f'forward_to = "127.0.0.1:{server.getsockname()[1]}"\n'
        # Late packets of a loaded machine don't void the run.
        lab = start_lab("late_max = 1.0\n" + wan("long", forward_to + extra), "--relays")
        host, _, port = lab.status["relays"]["long"].rpartition(":")
        client.connect((host, int(port)))
        client.settimeout(PATIENCE_SECONDS)
        server.settimeout(PATIENCE_SECONDS)
        yield lab, client, server


def test_a_relay_delays_loses_and_counts(start_lab: Callable[..., RunningLab]) -> None:
    with ends(start_lab, "loss = 0.1") as (lab, client, server):
        arrived = []
        for start in range(0, 2000, 100):
            for number in range(start, start + 100):
                client.send(struct.pack("<I", number))
            path = lab.wait_settled("long", start + 100)
            arrived += drain(server)
        assert len(arrived) == path["delivered_packets"] == 2000 - path["lost_packets"]

    # Binomial: 200, within five standard deviations.
    assert 133 <= path["lost_packets"] <= 267


def test_marks_cross_a_relay(start_lab: Callable[..., RunningLab]) -> None:
    with ends(start_lab, "red = { low_bytes = 0, high_bytes = 1 }") as (lab, client, server):
        server.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        client.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 2)
        for _ in range(20):
            client.send(bytes(1400))
        fields = [server.recvmsg(1500, 100)[1][0][2][0] for _ in range(20)]

    # All but the last leave packets in the buffer.
    assert lab.path("long")["marked_packets"] == fields.count(3) >= 15


def test_report_that_cannot_be_written_is_said_before_the_run(
    start_lab: Callable[..., RunningLab], tmp_path: Path
) -> None:
    ran, report = tmp_path / "ran", tmp_path / "absent" / "report.json"
    with ends(start_lab) as (lab, _, _):
        words = ("exec", "--lab", lab.name, "--report", report, "a", "--", "touch", ran)
        result = command(*words)

    assert (result.returncode, ran.exists()) == (1, False)
    assert result.stderr == f"sealane lab: {report}: No such file or directory\n"


def test_commands_learn_where_to_send(start_lab: Callable[..., RunningLab]) -> None:
    with ends(start_lab) as (lab, _, server), ThreadPoolExecutor(1) as pool:
        code = (
            "import os, socket; host, port = os.environ['SEALANE_LAB_LONG'].split(':')\n"
            "made = socket.socket(2, 2); made.sendto(b'hello', (host, int(port))); made.recv(10)"
        )
        words = ("exec", "--lab", lab.name, "a", "--", sys.executable, "-c", code)
        running = pool.submit(command, *words)
        said, sender = server.recvfrom(100)
        assert said == b"hello"
        # Packets on the link when the command ends aren't counted.
        server.sendto(b"heard", sender)
        result = running.result()

    assert result.returncode == 0, result.stderr
    assert "long →  1" in result.stderr


def test_without_root_links_are_relays_and_need_to_lead_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(wan("long"))
    monkeypatch.setattr(command_line.os, "geteuid", lambda: 1000)

    assert command_line.main(["up", str(path)]) == 2
    assert "wan long: forward_to: missing" in capsys.readouterr().err


def test_killing_the_holder_ends_its_relays(start_lab: Callable[..., RunningLab]) -> None:
    with ends(start_lab) as (lab, _, _):
        holder = lab.connection.pid
        children = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
        assert children
        watched = [os.pidfd_open(int(process)) for process in (holder, *children)]
        os.kill(holder, signal.SIGKILL)
        for descriptor in watched:
            assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0]
            os.close(descriptor)

    assert lab.name not in lab_names(os.geteuid())
