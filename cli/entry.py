"""Entry points of the three programs: thin, so that Ctrl-C is answered during imports too."""

import importlib
import signal
import sys
from typing import Final

_EXTRAS: Final = {"pyroute2": "lab"}
"""The extra of our package that has a library which isn't installed everywhere."""


def sealaned() -> int:
    """Run the daemon."""
    return _run("sealaned", "sealane.daemon.main")


def sealanectl() -> int:
    """Run the daemon's command-line client."""
    return _run("sealanectl", "sealane.cli.ctl")


def sealane() -> int:
    """Run what one runs by hand."""
    if sys.argv[1:2] == ["lab"]:
        # Without the demo's imports: what runs in a lab should not wait for them.
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
        needed = f"it needs {library}: pip install 'sealane[{extra}]'"
        print(f"{program}: {needed}", file=sys.stderr)
        return 2
