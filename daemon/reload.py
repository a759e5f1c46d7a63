"""`sealaned --reload`: makes the running daemon reread its files, and waits for the outcome.

So a reload by the service manager fails if the daemon's reload fails. The daemon reports the
outcome in its ready file, which it replaces atomically.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sealane.daemon.config import Config
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.daemon.runtime.directories import Reloaded, RunDirectory
from sealane.errors import Error, UnavailableError, UsageError, VerificationError, foreign_reason

RELOAD_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.05
_FAMILIES: Final[dict[int, type[Error]]] = {2: UsageError, 3: VerificationError}


def reload(config: Config, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Reload the daemon of `config`; raises the daemon's error if its reload failed.

    UnavailableError `daemon.stopped` if it isn't running, `reload.timeout` if it reports no outcome
    within RELOAD_SECONDS.
    """
    directory = RunDirectory(Path(config.node.run_dir))
    asked_ns = monotonic_ns()
    pid = _ready(directory)["pid"]
    os.kill(pid, signal.SIGHUP)
    deadline = asked_ns + int(RELOAD_SECONDS * 1e9)
    while monotonic_ns() < deadline:
        found = _ready(directory)
        said = found.get("reload")
        # A reload that began before our signal may have read the files before they were changed.
        if found["pid"] == pid and said is not None and said["began_ns"] >= asked_ns:
            return _judge(Reloaded(**said))
        sleep(_LOOK_SECONDS)
    raise UnavailableError(
        "reload.timeout", f"process {pid} reported no outcome within {RELOAD_SECONDS:g} s"
    )


def _ready(directory: RunDirectory) -> dict[str, Any]:
    try:
        # A killed daemon leaves its file behind, and its pid may belong to another process by now.
        if directory.is_claimed:
            content: dict[str, Any] = json.loads(directory.ready_file.read_text())
            # Other numbers would make the signal one to many processes.
            if content["pid"] > 1:
                return content
    except FileNotFoundError:
        pass
    raise UnavailableError("daemon.stopped", f"no daemon is ready at {directory.ready_file.parent}")


def _judge(reloaded: Reloaded) -> None:
    if reloaded.exit_code == 0:
        return
    raise _FAMILIES.get(reloaded.exit_code, UnavailableError)(
        foreign_reason(reloaded.reason), f"nothing was changed: {reloaded.message}"
    )
