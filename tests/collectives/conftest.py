"""A ring of four sites."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from collectives_ring import Ring, ring_of


@pytest.fixture
async def ring(tmp_path: Path) -> AsyncIterator[Ring]:
    async with ring_of(tmp_path, 4) as made:
        yield made
