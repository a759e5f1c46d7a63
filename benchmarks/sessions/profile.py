"""Profile of a session's processor time: samples of both ends' threads by activity.

Uses `perf record` with call chains of the kernel; without `perf` there is no profile.
"""

import collections
import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

SAMPLES_PER_SECOND: Final = 1999
TIMEOUT_SECONDS: Final = 120
ATTACH_SECONDS: Final = 0.5
"""Upper bound for the time `perf` takes to attach; it doesn't report when it has."""

PARTS: Final = (
    ("AES-256-GCM", ("sealane_gcm", "aes_gcm", "gcm128", "aead_aes")),
    ("doorbells", ("unix_stream_",)),
    ("sleeping and waking", ("sys_poll", "sys_ppoll", "do_poll")),
    ("receive calls", ("recvmmsg", "recvmsg")),
    ("send calls, including the other end's interrupt", ("sendmsg", "net_rx_action")),
    ("copies between region and packet", ("memcpy", "memmove", "memset")),
)
"""Activities, and function names in a call chain that identify them; the first match counts."""
JOBS: Final = "jobs"
MACHINE: Final = "machine and worker"
OTHER: Final = "other"


def part_of(command: str, frames: Sequence[str]) -> str:
    """Return the activity of a sample, given its thread's name and its `perf script` frames."""
    for part, names in PARTS:
        if any(name in frame for frame in frames for name in names):
            return part
    if "_native" in frames[0]:
        return MACHINE
    return JOBS if command.startswith("python") else OTHER


def shares(text: str) -> dict[str, float]:
    """Return the share of each activity in the output of `perf script`; shares add up to 1."""
    counts: collections.Counter[str] = collections.Counter()
    for block in text.split("\n\n"):
        command, *frames = block.strip("\n").split("\n")
        if frames:
            counts[part_of(command.strip(), frames)] += 1
    return {part: count / counts.total() for part, count in counts.most_common()}


@contextlib.contextmanager
def profiled(pids: Sequence[int]) -> Iterator[dict[str, float]]:
    """Profile processes, including later threads; the shares are filled in at the end."""
    found: dict[str, float] = {}
    if (perf := shutil.which("perf")) is None:
        yield found
        return
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "perf.data")
        options = ["-q", "-g", "-e", "cpu-clock", "-F", str(SAMPLES_PER_SECOND), "-o", data]
        # All processors: with --pid, `perf` wouldn't follow threads created later.
        recording = subprocess.Popen([perf, "record", "-a", *options], stderr=subprocess.PIPE)
        try:
            time.sleep(ATTACH_SECONDS)
            yield found
        finally:
            recording.send_signal(signal.SIGINT)
            recording.communicate(timeout=TIMEOUT_SECONDS)
        script = [perf, "script", "-i", data, "-F", "comm,ip,sym,dso"]
        ours = ["--pid", ",".join(map(str, pids))]
        printed = subprocess.run([*script, *ours], check=True, capture_output=True, text=True)
        found.update(shares(printed.stdout))
