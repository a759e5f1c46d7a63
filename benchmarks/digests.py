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


NATIVE: Final = Path(__file__).parent.parent / "native"
EMULATOR: Final = [
    file
    for folder in ("engine/src/emulator", "proto/src/fabric", "proto/src/link")
    for file in sorted((NATIVE / folder).rglob("*.rs"))
]
"""The sources of the link lab's emulator."""


def digest(
    modules: Iterable[ModuleType] = (),
    files: Iterable[Path] = (),
    *,
    engine: Iterable[Path] = (Path(str(_native.__file__)),),
) -> str:
    """Return a digest of the native engine, of the modules' sources and of the files.

    `engine` names instead the sources of the only part of it that matters.
    """
    found = hashlib.sha256()
    sources = [Path(str(inspect.getsourcefile(module))) for module in modules]
    for path in [*engine, *sources, *files]:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
