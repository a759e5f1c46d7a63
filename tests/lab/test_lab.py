"""`sealane lab` for its user: up, exec, status, down, and every way to end."""

import contextlib
import json
import os
import select
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labs import SEALANE, RunningLab, command, needs_root, running, wan
from patience import PATIENCE_SECONDS
from sealane.lab.names import lab_names, socket_address

pytestmark = needs_root


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLab]:
    with running(Path(tmp_path_factory.mktemp("lab")), "late_max = 1.0\n" + wan("long")) as lab:
        yield lab


def run(lab: RunningLab, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return command("exec", "--lab", lab.name, *words, **options)


def run_sender(
    lab: RunningLab, payload: str, *options: str, packets: int
) -> subprocess.CompletedProcess[str]:
    """Send `packets` from host a to b over link "long"; end once they have passed it.

    Packets on the link when the command ends aren't counted.
    """
    send = f"[socket.socket(2, 2).sendto({payload}, ('b', 9)) for _ in range({packets})]"
    words = (*options, "a", "--", "python3", "-c", f"import socket; {send}; input()")
    before = lab.path("long")["offered_packets"]
    with subprocess.Popen(
        [*SEALANE, "exec", "--lab", lab.name, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lab.wait_settled("long", before + packets)
        out, errors = process.communicate("\n", timeout=PATIENCE_SECONDS)
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


def test_a_command_runs_as_a_host_and_its_end_is_the_end_of_exec(shared: RunningLab) -> None:
    script = (
        "cat /proc/sys/net/ipv4/tcp_no_metrics_save /etc/hosts; "
        "ls /sys/class/net; ls -d /proc/1; exit 5"
    )

    result = run(shared, "b", "--", "bash", "-c", f"echo $SEALANE_LAB_HOST; {script}")

    assert result.returncode == 5
    words = result.stdout.split()
    assert words[:2] == ["b", "1"]
    assert words[words.index("10.77.0.1") + 1 :][:2] == ["a.long", "a"]
    assert words[-3:] == ["lo", "long", "/proc/1"]
    assert f"b in lab {shared.name}" in result.stderr
    assert "added delay p50" in result.stderr


def test_the_report_of_a_run_counts_only_its_packets(shared: RunningLab, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = ("--report", str(path), "--output", "json")

    results = [run_sender(shared, "bytes(72)", *words, packets=1) for _ in range(2)]

    assert [result.returncode for result in results] == [0, 0], results
    report = json.loads(path.read_text())
    assert json.loads(results[1].stderr) == report
    ways = {way["direction"]: way for way in report["ways"]}
    assert (ways["forward"]["packets"], ways["forward"]["bytes"]) == (1, 100)
    # b answers with ICMP port unreachable, unless its kernel has reached its rate limit.
    assert ways["backward"]["packets"] in {0, 1}
    assert report["void"] == []


def test_a_void_run_ends_with_its_own_code(start_lab: Callable[..., RunningLab]) -> None:
    # Nothing leaves within a microsecond of its time, and none may be late.
    lab = start_lab("slip_micros_max = 1\nlate_max = 0.0\n" + wan("long"))

    result = run_sender(lab, "b''", packets=50)

    assert result.returncode == 3
    assert "VOID  long →" in result.stderr


def test_signals_reach_the_command(shared: RunningLab) -> None:
    # Blocked before it reports ready, so that an early signal isn't lost.
    code = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
sys.exit(9 if signal.sigwait({signal.SIGTERM}) == signal.SIGTERM else 1)
"""
    with _started(shared, "python3", "-c", code) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 9


def test_a_command_gets_the_signals_as_exec_got_them(shared: RunningLab) -> None:
    code = "import signal; print(list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))"

    assert run(shared, "a", "--", "python3", "-c", code).stdout == "[]\n"


@contextlib.contextmanager
def _started(lab: RunningLab, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command as host a that reports when it is ready."""
    with subprocess.Popen(
        [*SEALANE, "exec", "--lab", lab.name, "a", "--", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("nobody", "--", "true"), "no host 'nobody'"),
        (("a", "--", "no-such-command"), "no-such-command: No such file"),
        (("a",), "no command"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    shared: RunningLab, words: tuple[str, ...], problem: str
) -> None:
    result = run(shared, *words)

    assert result.returncode == 2
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1


def test_status_lists_labs_and_shows_one(shared: RunningLab) -> None:
    names = [row["name"] for row in json.loads(command("status", "--output", "json").stdout)]
    assert shared.name in names
    shown = command("status", shared.name).stdout
    assert "10.77.0.2, fd5e:a1a4:e::2" in shown
    assert "long ←" in shown
    assert "report" in json.loads(command("status", shared.name, "--output", "json").stdout)


def test_labs_stand_side_by_side_with_the_same_addresses(
    shared: RunningLab, start_lab: Callable[..., RunningLab]
) -> None:
    other = start_lab(wan("long"))
    for lab, count in ((shared, 1), (other, 2)):
        with lab.receiver("b", "long") as receiver, lab.open_socket("a") as sender:
            sender.connect(receiver.getsockname())
            for _ in range(count):
                sender.send(lab.name.encode())
            assert [receiver.recv(100).decode() for _ in range(count)] == [lab.name] * count
    assert shared.address("a", "long") == other.address("a", "long")


def test_a_name_is_given_once(shared: RunningLab, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(wan("long"))

    result = command("up", path, "--unmeasured", "--name", shared.name)

    assert result.returncode == 2
    assert f"lab {shared.name} is already running" in result.stderr


def test_a_machine_is_not_asked_for_more_than_it_carries(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(wan("long").replace("= 50_000_000", "= 400_000_000_000").replace("5_000", "0"))

    name = f"t{uuid.uuid4().hex[:10]}"
    result = command("up", path, "--name", name)

    assert result.returncode == 2
    assert "packets per second of 1500 bytes" in result.stderr
    assert "lab.capacity" in result.stderr
    assert name not in lab_names(0)


def test_down_is_done_once_and_asked_as_often_as_one_likes(
    start_lab: Callable[..., RunningLab],
) -> None:
    lab = start_lab(wan("long"))
    results = [command("down", lab.name, "--output", "json") for _ in range(2)]

    assert [json.loads(result.stdout) for result in results] == [
        {"ended": [lab.name]},
        {"ended": []},
    ]
    assert [result.returncode for result in results] == [0, 0]
    assert lab.name not in lab_names(0)
    assert f"lab {lab.name} is not running" in run(lab, "a", "--", "true").stderr


def namespaces(kind: str) -> dict[int, str]:
    """Namespaces of a kind by the process that is in them; what has ended has a PID namespace."""
    found: dict[int, str] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(directory.name)] = str((directory / "ns" / kind).readlink())
    return found


def test_killing_the_holder_leaves_nothing(start_lab: Callable[..., RunningLab]) -> None:
    interfaces = Path("/proc/net/dev").read_text().count("\n")
    lab = start_lab(wan("long") + wan("other"))
    holder = lab.connection.pid
    # A host's process without parent or session.
    script = "setsid sleep 1000 & echo ready; exec sleep 1000"
    with (
        _started(lab, "bash", "-c", script) as process,
        # While this is open, no other lab gets its number.
        Path(f"/proc/{holder}/ns/pid").open("rb"),
    ):
        world = namespaces("pid")[holder]

        def members() -> dict[int, str]:
            networks = namespaces("net")
            inside = {pid for pid, its in namespaces("pid").items() if its == world}
            return {pid: networks[pid] for pid in inside & networks.keys()}

        watched = [os.pidfd_open(pid) for pid in (*members(), process.pid)]
        networks = {*members().values()} - {namespaces("net")[os.getpid()]}
        assert len(networks) == 3  # a and both links: b has no process
        assert Path("/proc/net/dev").read_text().count("\n") == interfaces

        os.kill(holder, signal.SIGKILL)

        for descriptor in watched:
            assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0], (
                "a process outlived its lab"
            )
            os.close(descriptor)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert not members()

    assert "has ended" in errors
    assert lab.name not in lab_names(0)
    assert command("down", lab.name).returncode == 0


def test_killing_exec_ends_the_command(shared: RunningLab) -> None:
    with _started(shared, "bash", "-c", "echo ready; exec sleep 1000") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        watched = [os.pidfd_open(int(child)) for child in children]
        process.kill()
        for descriptor in watched:
            assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0]
            os.close(descriptor)
    assert watched


def test_killing_up_leaves_no_lab(tmp_path: Path) -> None:
    name = f"t{uuid.uuid4().hex[:10]}"
    path = tmp_path / "x.toml"
    path.write_text(wan("long"))
    # It measures for a second while its name is already taken; retry if we are late.
    while True:
        with subprocess.Popen([*SEALANE, "up", path, "--name", name], stdout=subprocess.PIPE) as up:
            while name not in lab_names(0):
                assert up.poll() is None
            up.kill()
        if up.returncode == -signal.SIGKILL:
            break
        command("down", name)
    while name in lab_names(0):
        pass


def test_a_lab_that_somebody_else_holds_is_not_asked() -> None:
    code = """
import os, socket, sys
os.setuid(65534)
squatter = socket.socket(socket.AF_UNIX)
squatter.bind(sys.argv[1].replace("@", chr(0)))
squatter.listen()
print(flush=True)
sys.stdin.read()
"""
    name = f"t{uuid.uuid4().hex[:10]}"
    address = socket_address(name, 0).replace("\0", "@")
    with subprocess.Popen(
        ["python3", "-c", code, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as squatter:
        assert squatter.stdout is not None
        squatter.stdout.readline()
        result = command("status", name)
        squatter.kill()

    assert result.returncode == 2
    assert "belongs to user id 65534" in result.stderr


def test_a_stranger_is_not_answered(shared: RunningLab) -> None:
    code = """
import os, socket, sys
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1].replace("@", chr(0)))
try:
    peer.sendall(b'{"request": "down"}\\n')
    sys.exit(len(peer.recv(1000)))
except ConnectionError:
    pass
"""
    address = socket_address(shared.name, 0).replace("\0", "@")

    result = subprocess.run(["python3", "-c", code, address], timeout=PATIENCE_SECONDS, check=False)

    assert result.returncode == 0
    assert command("status", shared.name).returncode == 0


def test_measure_says_what_this_machine_carries() -> None:
    (row,) = json.loads(command("measure", "--mtu", "1500", "--output", "json").stdout)

    assert row["packets_per_second"] > 1000
    assert row["allowed_packets_per_second"] == int(0.6 * row["packets_per_second"])
    assert 0 < row["idle_slip_p50_micros"] <= row["idle_slip_p99_micros"]


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["exec", "--help"]])
def test_help_is_there(arguments: list[str]) -> None:
    assert command(*arguments).stdout.startswith("usage: sealane lab")
