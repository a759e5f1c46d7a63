"""One cluster for all tests here, because daemons take seconds to start and can be shared."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from attacks.world import Attacked, Cluster, attacked
from control_plane import Site, short_directory


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        made = Cluster(Site(root), stack)
        made.start()
        yield made


@pytest.fixture(scope="module")
def mortal_cluster() -> Iterator[Cluster]:
    """A cluster of its own, whose daemons the test may kill."""
    with short_directory() as root, contextlib.ExitStack() as stack:
        made = Cluster(Site(root), stack)
        made.start()
        yield made


@pytest.fixture
async def world(cluster: Cluster) -> AsyncIterator[Attacked]:
    """A new volume of tenant t, attached at g1 through its own proxy."""
    async with attacked(cluster) as made:
        yield made
