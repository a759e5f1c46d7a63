"""A daemon's process keeps its memory to itself."""

import subprocess
import sys

import pytest

from sealane.daemon import main as main_module
from sealane.daemon.config import load_config
from sealane.errors import UnavailableError

PR_GET_DUMPABLE = 3


def test_process_can_not_be_traced_by_its_jobs() -> None:
    forbid_then_ask = f"""
import ctypes, resource
from sealane.daemon.process import forbid_inspection
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
