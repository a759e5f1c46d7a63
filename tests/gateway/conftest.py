"""Control planes shared by the tests of volumes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from volume_control import World, volume_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with volume_world(tmp_path) as made:
        yield made
