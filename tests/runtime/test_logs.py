"""Logs on a full disk: what can't be written is lost, and nothing else."""

import json
import subprocess
import sys

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
