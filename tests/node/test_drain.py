"""The drain of a daemon's roles together: one that fails, and one that is used again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from prometheus_client import Gauge

from patience import PATIENCE_SECONDS
from sealane.daemon.node import drain
from sealane.daemon.node.drain import DrainState, NodeDrain, Use


class Role:
    """A role that is in use until told otherwise."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.is_used = False
        self.begun = 0
        self.is_serving = True
        self.services: Sequence[str] = ("x",)

    def begin_drain(self) -> None:
        self.begun += 1
        self.is_serving = False
        if self.failures:
            raise self.failures.pop()

    def uses(self) -> list[Use]:
        return [Use(role="x", name="n", detail="d", ends=False)] if self.is_used else []

    async def drain(self, seconds_left: Callable[[], float]) -> None:  # noqa: ARG002 - of every role
        if self.failures:
            raise self.failures.pop()
        while self.is_used:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)

    async def end_drain(self) -> None:
        self.is_serving = True


@pytest.fixture
async def drained(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NodeDrain]:
    monkeypatch.setattr(drain, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(drain, "_RETRY_SECONDS", 0.01)

    async def report(services: Sequence[str], is_serving: bool) -> None:
        assert services

    made = NodeDrain(
        [Role(), Role()],
        report=report,
        draining=Gauge("draining", "d", registry=None),
        drained=Gauge("drained", "d", registry=None),
    )
    yield made
    await made.close()


def roles(made: NodeDrain) -> list[Role]:
    return made._roles  # type: ignore[return-value]


async def until(made: NodeDrain, state: DrainState) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while made.state != state:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)


async def test_a_fault_in_one_role_ends_no_drain(drained: NodeDrain) -> None:
    first, second = roles(drained)
    second.is_used = True
    await drained.begin(100)
    first.failures = [RuntimeError("a"), RuntimeError("b")]
    await asyncio.sleep(0.1)
    assert drained.state == DrainState.DRAINING
    second.is_used = False
    await until(drained, DrainState.DRAINED)
    assert not first.failures
    await drained.end()
    assert (drained.state, first.is_serving) == (DrainState.SERVING, True)


async def test_a_drain_that_failed_to_begin_begins_again_and_ends(drained: NodeDrain) -> None:
    first, second = roles(drained)
    for _ in range(2):
        first.failures = [RuntimeError("a")]
        with pytest.raises(RuntimeError):
            await drained.begin(100)
    await drained.begin(100)
    assert (first.begun, second.begun) == (3, 1)
    await until(drained, DrainState.DRAINED)
    await drained.end()
    first.failures = [RuntimeError("a")]
    with pytest.raises(RuntimeError):
        await drained.begin(100)
    await drained.end()
    assert (drained.state, first.is_serving) == (DrainState.SERVING, True)


async def test_a_role_that_is_used_again_is_not_drained(drained: NodeDrain) -> None:
    first, _ = roles(drained)
    await drained.begin(100)
    await until(drained, DrainState.DRAINED)
    first.is_used = True
    assert drained.state == DrainState.DRAINING
    await asyncio.sleep(0.05)
    first.is_used = False
    await until(drained, DrainState.DRAINED)
