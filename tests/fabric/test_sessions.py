"""The fabric role end to end: gRPC, establishment, ring hand-over, transfer, limits, closing."""

import asyncio
import contextlib
import hashlib
import os
import random
import socket
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sealane._native import Emulator
from sealane.client.session import (
    ErasureCoded,
    ReceiveSession,
    Reliability,
    SelectiveRepeat,
    SendSession,
    SessionError,
    fetch_ring,
    listen_session,
    open_session,
)
from sealane.daemon.fabric import ring_socket
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import sessions_pb2

REGION = 2 << 20
RATE = 200_000_000
MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]


async def wait_listening(fabric: Any, name: str = "data") -> None:
    async with asyncio.timeout(5):
        while name not in fabric.service._listeners:
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def connected(
    left: Any, right: Any, *, via: str | None = None, name: str = "data"
) -> AsyncIterator[tuple[SendSession, ReceiveSession]]:
    """Open a session from left to right, both jobs in this process."""
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(
                stack.enter_async_context(
                    listen_session(right.sessions, name, region_bytes=REGION)
                )
            )
            await wait_listening(right, name)
            opening = tasks.create_task(
                stack.enter_async_context(
                    open_session(
                        left.sessions,
                        name,
                        region_bytes=REGION,
                        peer_node=right.name,
                        peer_address=right.address,
                        rate_bits_per_second=RATE,
                        via_address=via or "",
                    )
                )
            )
        yield opening.result(), listening.result()


async def transfer(
    sender: SendSession, receiver: ReceiveSession, reliability: Reliability | None = None
) -> None:
    content = random.Random(9).randbytes(700_001)
    sender.region[: len(content)] = content
    async with asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(receiver.receive(offset=4096, length=1 << 20))
        sending = tasks.create_task(
            sender.send(
                offset=0, length=len(content), reliability=reliability, immediate=0xABCDEF01
            )
        )
    received, sent = receiving.result(), sending.result()
    landed = receiver.region[received.offset : received.offset + received.length]
    assert hashlib.sha256(landed).digest() == hashlib.sha256(content).digest()
    assert received.immediate == 0xABCDEF01
    assert (sent.length, sent.message) == (len(content), received.message)
    assert sent.duration_seconds > len(content) * 8 / RATE


@pytest.mark.parametrize("reliability", [SelectiveRepeat(), ErasureCoded(k=32, m=8)])
async def test_job_sends_to_job(fabrics: tuple[Any, Any], reliability: Reliability) -> None:
    async with connected(*fabrics) as (sender, receiver):
        await transfer(sender, receiver, reliability)

        assert sender.session.direction == "send"
        assert receiver.session.direction == "receive"
        assert receiver.session.peer_node == "fabric-a"


class RelayToLater:
    """An emulator must know where to forward to before the session exists: announce it by via."""


async def test_session_runs_through_an_emulated_link(
    fabrics: tuple[Any, Any], make_fabric: MakeFabric
) -> None:
    left, right = fabrics
    links: list[Emulator] = []

    async with contextlib.AsyncExitStack() as stack:
        honest = left.service._establish_with

        async def establish(address: str, node: str, offer: Any) -> Any:
            answer = await honest(address, node, offer)
            links.append(
                Emulator(
                    rate_bits_per_second=RATE,
                    delay_ns=5_000_000,
                    buffer_bytes=1 << 24,
                    loss_ppb=10_000_000,
                    seed=3,
                    forward_to=answer.data_address,
                )
            )
            stack.callback(links[0].stop)
            return answer

        del honest, establish
