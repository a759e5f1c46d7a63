"""The drain of a target: gateways that are away for a moment, and stores that fail."""

import asyncio
import uuid
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway.back_end import RETRY_SECONDS_MAX
from sealane.daemon.target import drain
from sealane.daemon.target.drain import GATEWAY_AWAY_SECONDS, TargetDrain
from sealane.daemon.target.store_flush import failures
from sealane.transport.tasks import TaskOwner

VOLUME = uuid.uuid4()
HERE, ELSEWHERE = "nqn.own", "nqn.other"


class Stores:
    """A target or its plain subsystems, as the drain sees them."""

    def __init__(self) -> None:
        self.volume_ids = {VOLUME}
        self.using: set[tuple[uuid.UUID, str]] = set()
        self.errors: dict[str, OSError] = {}
        self.flushes = 0

    def users(self) -> set[tuple[uuid.UUID, str]]:
        return self.using

    def busy(self, settle_seconds: float) -> list[tuple[str, str]]:  # noqa: ARG002 - as the real one
        return []

    def set_draining(self, *, is_draining: bool) -> None:
        assert is_draining

    async def flush(self) -> dict[str, OSError]:
        self.flushes += 1
        return self.errors


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_SECONDS", "POLL_SECONDS", "_FLUSH_RETRY_SECONDS"):
        monkeypatch.setattr(drain, name, 0.01)


def made(target: Stores) -> TargetDrain:
    service = SimpleNamespace(admission=SimpleNamespace(known=None), is_draining=False)
    return TargetDrain(service, target, Stores(), own_nqn=HERE)  # type: ignore[arg-type]


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not happened():  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)


async def test_a_gateway_that_lost_its_queues_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert GATEWAY_AWAY_SECONDS > RETRY_SECONDS_MAX, "a gateway retries within that time"
    monkeypatch.setattr(drain, "GATEWAY_AWAY_SECONDS", 0.5)
    target, tasks = Stores(), TaskOwner()
    target.using = {(VOLUME, HERE), (VOLUME, ELSEWHERE)}
    role = made(target)
    role.begin_drain()
    # A gateway of this daemon is drained with it.
    assert {use.detail: use.ends for use in role.uses()} == {
        "open at nqn.own": True,
        "open at nqn.other": False,
    }
    draining = tasks.start(role.drain(lambda: 0), name="drain")
    for _ in range(3):
        target.using, known = set(), target.using
        await asyncio.sleep(0.2)
        assert not target.flushes
        target.using = known
        await asyncio.sleep(0.1)
    target.using = set()
    await draining
    assert target.flushes == 1
    assert not role.uses()


async def test_a_store_that_fails_keeps_no_other_from_being_flushed() -> None:
    synced = []

    def full() -> None:
        raise OSError("full")

    failed = await failures({"a": full, "b": lambda: synced.append("b"), "c": full})
    assert ([*failed], synced) == (["a", "c"], ["b"])


async def test_stores_that_fail_are_named_until_they_are_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain, "GATEWAY_AWAY_SECONDS", 0.01)
    target, tasks = Stores(), TaskOwner()
    role = made(target)
    role.begin_drain()
    assert [(use.detail, use.ends) for use in role.uses()] == [("not flushed yet", True)]
    target.errors = {"v": OSError("full"), "w": OSError("gone")}
    draining = tasks.start(role.drain(lambda: 0), name="drain")
    shown = "v can't be flushed: full; w can't be flushed: gone"
    await until(lambda: [(use.detail, use.ends) for use in role.uses()] == [(shown, False)])
    target.errors = {}
    await draining
    assert not role.uses()
