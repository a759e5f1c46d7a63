"""In the lab's guests: what both programs about sessions over verbs need."""

import asyncio
import contextlib
import sys

from patience import PATIENCE_SECONDS
from sealane.client import Client
from sealane.client.grants import open_session
from sealane.client.session import Session
from sealane.errors import UnavailableError


async def opened(
    stack: contextlib.AsyncExitStack, client: Client, peer: str, *, region_bytes: int, rate: int
) -> Session:
    """Open a session to fabric b at that address, once it listens; close it with the stack."""
    async with asyncio.timeout(5 * PATIENCE_SECONDS):
        while True:
            try:
                return await stack.enter_async_context(
                    open_session(
                        client.sessions,
                        "gradients",
                        region_bytes=region_bytes,
                        peer_node="b",
                        peer_address=peer,
                        rate_bits_per_second=rate,
                    )
                )
            except UnavailableError as error:
                print(error, file=sys.stderr)
            await asyncio.sleep(0.5)
