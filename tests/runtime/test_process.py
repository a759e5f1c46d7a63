"""A daemon's process keeps its memory to itself."""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane import Site, daemon, short_directory
from sealane.daemon import main as main_module
from sealane.daemon.config import load_config
from sealane.daemon.runtime import process
from sealane.errors import UnavailableError

PR_GET_DUMPABLE = 3


def test_process_can_not_be_traced_by_its_jobs() -> None:
    forbid_then_ask = f"""
import ctypes, resource
from sealane.daemon.runtime.process import forbid_inspection
libc = ctypes.CDLL(None)
before = libc.prctl({PR_GET_DUMPABLE}, 0, 0, 0, 0)
forbid_inspection()
after = libc.prctl({PR_GET_DUMPABLE}, 0, 0, 0, 0)
print(before, after, *resource.getrlimit(resource.RLIMIT_CORE))
"""
    found = subprocess.run(
        [sys.executable, "-c", forbid_then_ask], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["1", "0", "0", "0"]


def test_daemon_does_not_start_where_it_can_be_inspected(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path_factory.mktemp("config") / "sealaned.toml"
    path.write_text(
        'node.name = "b"\n'
        'broker = { policy_file = "/nowhere/policy.toml", key_file = "/nowhere/kek", '
        "allow_unsigned_policy = true }\n"
    )

    def refuse() -> None:
        raise UnavailableError("process.inspectable", "the kernel refuses")

    monkeypatch.setattr(main_module, "forbid_inspection", refuse)
    monkeypatch.setattr(main_module.os, "umask", lambda _: 0)
    with pytest.raises(UnavailableError, match=r"process\.inspectable"):
        main_module.run(load_config(path), path)


def unlocked_private_memory(pid: int) -> list[str]:
    """Return the writable private mappings of a process that the kernel may swap out."""
    try:
        maps = Path(f"/proc/{pid}/smaps").read_text()
    except PermissionError:
        pytest.skip("a daemon's memory can be looked at by root only")
    found = re.findall(
        r"^([0-9a-f]+-[0-9a-f]+ rw.p .*)$(?:\n.*?)*?\nVmFlags:(.*)$", maps, re.MULTILINE
    )
    assert found
    return [mapping for mapping, flags in found if "lo" not in flags.split()]


@pytest.fixture
def lockable() -> None:
    """Skip where nobody lets this user lock memory without bound."""
    ask = "from sealane.daemon.runtime.process import lock_memory; lock_memory()"
    if subprocess.run([sys.executable, "-c", ask], capture_output=True, check=False).returncode:
        pytest.skip("memory can't be locked here: it takes LimitMEMLOCK=infinity or CAP_IPC_LOCK")


@pytest.mark.usefixtures("lockable")
@pytest.mark.parametrize("choice", ["", 'lock_memory = "require"', 'lock_memory = "off"'])
def test_every_page_of_a_daemon_is_locked_unless_it_is_told_otherwise(choice: str) -> None:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({})
        config = site.broker_config()
        config.write_text(config.read_text().replace("[broker]", f"{choice}\n[broker]"))
        with daemon(config) as broker:
            unlocked = unlocked_private_memory(broker.process.pid)
            status = Path(f"/proc/{broker.process.pid}/status").read_text()
            (locked,) = re.findall(r"^VmLck:\s+(\d+) kB$", status, re.MULTILINE)
            is_off = "off" in choice
            assert bool(unlocked) == is_off
            assert (int(locked) == 0) == is_off
            assert not [x for x in broker.log_lines() if x["event"] == "memory_swappable"]


def limited(size: int) -> tuple[str, ...]:
    """Return a command that runs another without CAP_IPC_LOCK, under a limit of locked memory."""
    program = (
        "import ctypes, os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({size}, {size}))\n"
        "ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)\n"  # PR_CAPBSET_DROP, CAP_IPC_LOCK
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    return (sys.executable, "-c", program)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1 << 20, 1 << 22])
def test_daemon_that_can_not_lock_its_memory_says_so_or_does_not_start(size: int) -> None:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({})
        config = site.broker_config()
        with daemon(config, prefix=limited(size)) as broker:
            (warning,) = [x for x in broker.log_lines() if x["event"] == "memory_swappable"]
            assert warning["reason"] == "process.memory.swappable"
            assert unlocked_private_memory(broker.process.pid)
        text = config.read_text().replace("[broker]", 'lock_memory = "require"\n[broker]')
        config.write_text(text)
        command = [*limited(size), sys.executable, "-m", "sealane.daemon.main"]
        refused = subprocess.run(
            [*command, "--config", str(config)], capture_output=True, text=True, check=False
        )
        assert refused.returncode == 4
        assert "process.memory.swappable" in refused.stderr


@pytest.mark.parametrize("hard", [1 << 20, 1 << 40])
def test_limit_that_would_be_used_up_later_is_not_taken_for_enough(
    hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlockall succeeds below a finite limit; allocations would fail when it is reached."""
    limits = [(hard, hard)]

    class Kernel:
        """Locks for whoever has any limit."""

        def mlockall(self, flags: int) -> int:
            assert flags == process.LOCK_EVERYTHING
            return 0 if limits[-1][0] else -1

    monkeypatch.setattr(process.ctypes, "CDLL", lambda *_, **__: Kernel())
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(process.resource, "setrlimit", lambda _, value: limits.append(value))
    with pytest.raises(UnavailableError, match=r"process\.memory\.swappable"):
        process.lock_memory()
    assert limits[-1] == (hard, hard)
    limits.append((1 << 20, process.resource.RLIM_INFINITY))
    process.lock_memory()
    assert limits[-1] == (process.resource.RLIM_INFINITY, process.resource.RLIM_INFINITY)


def end_of(child: subprocess.Popen[bytes]) -> int:
    """Kill a process by a signal that asks for a core file; return its wait status."""
    os.kill(child.pid, signal.SIGABRT)
    _, status = os.waitpid(child.pid, 0)
    child.returncode = -os.WTERMSIG(status)
    return status


def test_daemon_that_crashes_leaves_no_core_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        other = subprocess.Popen(["sleep", "600"])
        if not os.WCOREDUMP(end_of(other)):
            pytest.skip("no process leaves a core file here")
        with short_directory() as root:
            site = Site(root)
            site.write_policy({})
            with daemon(site.broker_config()) as broker:
                broker.was_killed = True
                assert not os.WCOREDUMP(end_of(broker.process))
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
