"""A host that connects to a volume which isn't back yet always gets an answer."""

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from sealane.daemon.gateway.data_path import EXPECTED_SECONDS, Gateway
from sealane.protocol.nvme.constants import AnaState, Status
from sealane.protocol.nvme.nqn import export_nqn
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import HostController

VOLUME = uuid.uuid4()


async def started() -> Gateway:
    """Return a gateway that expects the volume."""
    made = Gateway(traddr="127.0.0.1", trsvcid=0)
    await made.start()
    made.expect(str(VOLUME))
    return made


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = await started()
    yield made
    await made.stop()


async def refusal(gateway: Gateway) -> int:
    """Connect, and return the status that the host gets, well before it would wait in vain."""
    traddr, trsvcid = gateway.address
    host = HostController(
        traddr=traddr,
        trsvcid=trsvcid,
        subsystem_nqn=export_nqn(VOLUME),
        host_nqn="nqn.2026-11.dev.sealane:host",
    )
    with pytest.raises(NvmeStatusError) as caught:
        async with asyncio.timeout(EXPECTED_SECONDS - 1):
            await host.connect()
    return caught.value.status


async def test_during_a_drain_it_is_asked_at_once_to_come_later(gateway: Gateway) -> None:
    gateway.set_access(AnaState.INACCESSIBLE)
    assert await refusal(gateway) == Status.CONNECT_BUSY


async def test_one_that_waits_is_answered_when_a_drain_begins(gateway: Gateway) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(refusal(gateway))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        gateway.set_access(AnaState.INACCESSIBLE)
    assert waiting.result() == Status.CONNECT_BUSY


async def test_one_that_waits_is_answered_when_the_gateway_stops() -> None:
    gateway = await started()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(refusal(gateway))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await gateway.stop()
    assert waiting.result() == Status.CONNECT_BUSY
