"""Rings of fabrics in one process, each with a job."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fabrics import fabric, settings
from sealane.client.collectives import Group, Member, join

SESSIONS = 8
"""Two of the ring, and one with each other rank."""
Act = Callable[[Group], Awaitable[Any]]


class Ring:
    """Fabrics at sites; `run` runs a job at each, all in one group."""

    def __init__(self, fabrics: list[Any]) -> None:
        self.fabrics = fabrics
        self.members = [Member(node=one.name, address=one.address) for one in fabrics]
        self._number = 0

    async def run(self, *acts: Act, size: int | None = None, **options: Any) -> list[Any]:
        """Run an action for all ranks, or one for each; return their results or errors."""
        self._number += 1
        members = self.members[: size or len(self.members)]
        name = f"group {self._number}"

        async def one(rank: int) -> Any:
            client: Any = SimpleNamespace(sessions=self.fabrics[rank].sessions)
            terms = {"rate_bits_per_second": 200_000_000, "timeout_seconds": 20.0, **options}
            async with join(client, name, rank=rank, members=members, **terms) as group:
                return await acts[rank % len(acts)](group)

        jobs = (one(rank) for rank in range(len(members)))
        return await asyncio.gather(*jobs, return_exceptions=True)


@contextlib.asynccontextmanager
async def ring_of(directory: Path, size: int) -> AsyncIterator[Ring]:
    async with contextlib.AsyncExitStack() as stack:
        names = [f"site-{index}" for index in range(size)]
        yield Ring(
            [
                await stack.enter_async_context(
                    fabric(replace(settings(directory, name), sessions_max=SESSIONS), name)
                )
                for name in names
            ]
        )
