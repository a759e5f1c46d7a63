"""Fixture: two fabrics."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fabrics import Fabric, fabric, settings


@pytest.fixture
async def fabrics(tmp_path: Path) -> AsyncIterator[tuple[Fabric, Fabric]]:
    async with (
        fabric(settings(tmp_path, "a"), "fabric-a") as left,
        fabric(settings(tmp_path, "b"), "fabric-b") as right,
    ):
        yield left, right


@pytest.fixture
def make_fabric(tmp_path: Path) -> Callable[..., contextlib.AbstractAsyncContextManager[Fabric]]:
    def make(name: str, **options: Any) -> contextlib.AbstractAsyncContextManager[Fabric]:
        changes = {
            key: options.pop(key)
            for key in ("change_offer", "change_answer", "change_shown", "change_subject")
            if key in options
        }
        return fabric(replace(settings(tmp_path, name), **options), name, **changes)

    return make
