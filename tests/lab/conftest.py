import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labs import RunningLab, running


@pytest.fixture
def start_lab(tmp_path: Path) -> Iterator[Callable[..., RunningLab]]:
    """Return a function that starts labs, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(topology: str, *options: str, name: str | None = None) -> RunningLab:
            return stack.enter_context(running(tmp_path, topology, *options, name=name))

        yield start
