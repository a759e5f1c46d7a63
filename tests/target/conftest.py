"""Fixtures: a target and a gateway, shared by the tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from target.pair import World, make_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with make_world(tmp_path / "store") as made:
        yield made
