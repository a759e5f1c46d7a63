"""ECN between real sockets: packets are sent as ECT(0), and the peer confirms it."""

import asyncio
from typing import Any

from patience import PATIENCE_SECONDS
from session_pairs import connected


async def test_a_path_that_keeps_marks_is_found_capable(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (sender, receiver):
        await asyncio.gather(
            receiver.receive(offset=0, length=100_000), sender.send(offset=0, length=100_000)
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not sender.statistics()["is_ecn_capable"]:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
        assert sender.statistics()["ce_echoed"] == 0
