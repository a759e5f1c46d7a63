"""Digests of the code that a result depends on: after a change, cells are measured again."""

import hashlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Final

import sealane.planning.model
from sealane import _native

MODEL: Final = sorted(Path(str(sealane.planning.model.__file__)).parent.glob("*.py"))
"""The sources of the completion-time model."""


def digest(modules: Iterable[ModuleType] = (), files: Iterable[Path] = ()) -> str:
    """Return a digest of the native engine, of the modules' sources and of the files."""
    found = hashlib.sha256()
    sources = [Path(str(inspect.getsourcefile(module))) for module in modules]
    for path in [Path(str(_native.__file__)), *sources, *files]:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
