"""Entry points of the three programs: thin, so that Ctrl-C is handled during imports, too."""

import importlib
import signal
import sys
from typing import Final

_EXTRAS: Final = {"pyroute2": "lab"}
"""For each optional library, the extra of this package that installs it."""


def sealaned() -> int:
    """Run the daemon."""
    return _run("sealaned", "sealane.daemon.main")


def sealanectl() -> int:
    """Run the daemon's command-line client."""
    return _run("sealanectl", "sealane.cli.ctl")


def sealane() -> int:
    """Run `sealane`: the demo or the link lab."""
    if sys.argv[1:2] == ["lab"]:
        # Skips the demo's imports: commands run in a lab should not wait for them.
        return _run("sealane lab", "sealane.cli.lab", sys.argv[2:])
    return _run("sealane", "sealane.cli.sealane")


def _run(program: str, module: str, arguments: list[str] | None = None) -> int:
    try:
        return int(importlib.import_module(module).main(arguments))
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(library)
        if extra is None:
            raise
        missing = f"{library} is not installed: pip install 'sealane[{extra}]'"
        print(f"{program}: {missing}", file=sys.stderr)
        return 2
