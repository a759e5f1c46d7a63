"""A target and a gateway that the tests of this folder share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from target.pair import World, make_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with make_world(tmp_path / "store") as made:
        yield made
