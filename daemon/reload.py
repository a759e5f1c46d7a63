"""`sealaned --reload`: tells the running daemon to read its files again, and hears how that ended.

The service manager's reload then fails where the daemon's does. What the daemon says is in its
ready file, which one call replaces as a whole.
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
    """Reload the daemon of `config`; raises the error that kept it from it.

    UnavailableError `daemon.stopped` if it doesn't run, `reload.timeout` if it says nothing within
    RELOAD_SECONDS.
    """
    directory = RunDirectory(Path(config.node.run_dir))
    asked_ns = monotonic_ns()
    pid = _ready(directory)["pid"]
    os.kill(pid, signal.SIGHUP)
    deadline = asked_ns + int(RELOAD_SECONDS * 1e9)
    while monotonic_ns() < deadline:
        found = _ready(directory)
        said = found.get("reload")
        # One that began before we asked may have read the files before they were changed.
        if found["pid"] == pid and said is not None and said["began_ns"] >= asked_ns:
            return _judge(Reloaded(**said))
        sleep(_LOOK_SECONDS)
    raise UnavailableError("reload.timeout", f"process {pid} said nothing for {RELOAD_SECONDS:g} s")


def _ready(directory: RunDirectory) -> dict[str, Any]:
    try:
        # A killed daemon leaves its file, and its number may be another process's by now.
        if directory.is_claimed:
            content: dict[str, Any] = json.loads(directory.ready_file.read_text())
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
