"""Logs on a full disk: what can't be written is lost, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from sealane.daemon.runtime.logs import get_logger, set_up_logs
reader, writer = os.pipe()
saved = os.dup(2)
set_up_logs("info", node="n")
get_logger().info("before")
with open("/dev/full", "wb", buffering=0) as full:
    os.dup2(full.fileno(), 2)
    for _ in range(3):
        get_logger().info("lost")
os.dup2(saved, 2)
get_logger().info("after")
"""


def test_lines_that_can_not_be_written_are_counted_and_end_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["before", "after", "log_lines_lost"]
    assert lines[2]["lines"] == 3


CUT = """
import os, resource, sys
from sealane.daemon.runtime.logs import get_logger, set_up_logs
set_up_logs("info", node="n")
with open(sys.argv[1], "wb", buffering=0) as file:
    os.dup2(file.fileno(), 2)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (10, most))
get_logger().info("cut")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
get_logger().info("after")
"""


def test_a_line_that_was_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log"
    subprocess.run([sys.executable, "-c", CUT, path], check=True)
    cut, *lines = path.read_text().splitlines()
    assert len(cut) == 10
    assert [json.loads(line)["event"] for line in lines] == ["after", "log_lines_lost"]
