"""The control planes that the tests of volumes share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from volume_control import World, volume_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with volume_world(tmp_path) as made:
        yield made
