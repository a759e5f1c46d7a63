"""One cluster for the whole area: its daemons take seconds to start and nothing to share."""

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
    """Daemons that may be killed: not the ones that the other tests share."""
    with short_directory() as root, contextlib.ExitStack() as stack:
        made = Cluster(Site(root), stack)
        made.start()
        yield made


@pytest.fixture
async def world(cluster: Cluster) -> AsyncIterator[Attacked]:
    """A fresh volume of tenant t, attached at g1 through a proxy of its own."""
    async with attacked(cluster) as made:
        yield made
