"""A lost device ends its gateways and volumes exactly once, however the loss is noticed."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from device.memory_anchor import MemoryAnchor
from patience import PATIENCE_SECONDS
from sealane.daemon.device.anchors.anchor import CATALOGUE
from sealane.daemon.device.directory import Device, DeviceFile
from sealane.daemon.node.peers import PeerIncarnation, ServedDevice
from sealane.daemon.target.device import authorize_at, keep_served
from sealane.errors import Error, UnavailableError, VerificationError

PEER = PeerIncarnation(spiffe_id="spiffe://sealane/gateway/g", incarnation=b"G" * 16)
FENCED = VerificationError("device.fenced", "moved")


class Broker:
    """Answers requests about peers and devices."""

    def __init__(self) -> None:
        self.refusal: Error | None = None
        self.asked: list[ServedDevice | None] = []
        self.closed: list[ServedDevice] = []

    async def authorize(
        self,
        nonce: bytes,  # noqa: ARG002
        peers: Sequence[PeerIncarnation],
        *,
        device: ServedDevice | None = None,
    ) -> Sequence[str]:
        self.asked.append(device)
        if self.refusal is not None:
            raise self.refusal
        return [""] * len(peers)

    async def close(self, served: ServedDevice) -> None:
        self.closed.append(served)
        if self.refusal is not None:
            raise self.refusal


class Target:
    """Records what it is told to end, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def lose_all(self, reason: str) -> None:
        self.told.append(("gateways", reason))

    async def report(self, is_good: bool) -> None:
        pass

    async def abandon(self, loss: Error) -> None:
        self.told.append(("volumes", loss.reason))


class World:
    def __init__(self, directory: Path) -> None:
        self.broker, self.target, self.anchor = Broker(), Target(), MemoryAnchor()
        self.file = DeviceFile(directory)
        self.device = Device(
            ServedDevice(device_id=self.file.device_id, fencing_epoch=3),
            file=self.file,
            secret=bytearray(range(32)),
            anchor=self.anchor,
        )
        broker: Any = self.broker
        self.ask = authorize_at(broker, self.device)

    async def abandoned(self) -> None:
        """Wait until a loss has been handled."""
        stand_ins: list[Any] = [self.broker, self.target]
        broker, target = stand_ins

        async def reopen() -> None:
            raise AssertionError("a device that isn't given back was taken up again")

        serving = keep_served(
            self.device,
            reopen,
            client=broker,
            trust=broker,
            authorizations=target,
            service=target,
            report=target.report,
        )
        await asyncio.wait_for(serving, PATIENCE_SECONDS)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def _by_authorization(world: World) -> None:
    world.broker.refusal = FENCED
    with pytest.raises(VerificationError, match=r"device\.fenced"):
        await world.ask(b"", [PEER])


async def _by_anchor(world: World) -> None:
    world.anchor.errors = [FENCED]
    with pytest.raises(VerificationError, match=r"device\.fenced"):
        await world.device.anchors.advance(CATALOGUE, 1, b"x")


@pytest.mark.parametrize("notice", [_by_authorization, _by_anchor])
async def test_lost_device_ends_gateways_then_volumes_and_lets_the_next_owner_in(
    world: World, tmp_path: Path, notice: Callable[[World], Any]
) -> None:
    await notice(world)
    await world.abandoned()
    assert world.target.told == [("gateways", "device.fenced"), ("volumes", "device.fenced")]
    assert world.broker.closed == [world.device.served]
    assert world.device._secret == bytes(32)
    # The directory is released, and gateways are refused without asking the broker again.
    DeviceFile(tmp_path).release()
    questions = len(world.broker.asked)
    assert await world.ask(b"", [PEER, PEER]) == ["device.fenced"] * 2
    assert len(world.broker.asked) == questions


@pytest.mark.parametrize(
    "error",
    [UnavailableError("peer.unreachable", "gone"), VerificationError("node.revoked", "we")],
)
async def test_other_refusals_do_not_lose_the_device(world: World, error: Error) -> None:
    world.broker.refusal = error
    with pytest.raises(type(error)):
        await world.ask(b"", [PEER])
    assert world.device.loss is None
    world.broker.refusal = None
    assert await world.ask(b"", [PEER]) == [""]
    assert world.broker.asked == [world.device.served] * 2
    await world.device.close()


async def test_anchor_that_fails_for_good_loses_the_device(world: World) -> None:
    world.anchor.errors = [UnavailableError("anchor.failed", "disk broken")]
    with pytest.raises(UnavailableError, match=r"anchor\.failed"):
        await world.device.anchors.advance(CATALOGUE, 1, b"x")
    # The process ends, and the next one opens the device again.
    with pytest.raises(UnavailableError, match=r"anchor\.failed"):
        await world.abandoned()
    assert world.target.told[0] == ("gateways", "anchor.failed")
