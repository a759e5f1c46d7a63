"""A target after the loss of its device: which losses it recovers from, and which it doesn't."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.node.peers import ServedDevice
from sealane.daemon.target import device as target_device
from sealane.daemon.target.device import keep_served
from sealane.errors import Error, UnavailableError, VerificationError

SERVED = ServedDevice(device_id=uuid.UUID(int=1), fencing_epoch=1)


@dataclass
class Target:
    """All collaborators of `keep_served` in one; records its calls."""

    losses: list[Error]
    answers: list[Error | None] = field(default_factory=list)
    openings: list[Error | None] = field(default_factory=list)
    did: list[str] = field(default_factory=list)
    served: ServedDevice = SERVED
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    reports: list[bool] = field(default_factory=list)

    async def wait_lost(self) -> Error:
        if not self.losses:
            await asyncio.Event().wait()
        return self.losses.pop(0)

    def lose_all(self, reason: str) -> None:
        self.did.append(reason)

    async def abandon(self, loss: Error) -> None:
        assert loss.reason == self.did[-1]
        self.did.append("abandon")

    async def close(self, *_: object) -> None:
        self.did.append("close")

    async def authorize(self, nonce: bytes, peers: Sequence[Any], *, device: object) -> list[str]:
        assert (len(nonce), list(peers), device) == (32, [], SERVED)
        self._say("asked", self.answers)
        return []

    async def reopen(self) -> None:
        self._say("opened", self.openings)

    async def resume(self) -> None:
        self.did.append("resume")
        self.resumed.set()

    def _say(self, what: str, said: list[Error | None]) -> None:
        self.did.append(what)
        error = said.pop(0)
        if error is not None:
            raise error

    async def kept(self) -> None:
        me: Any = self
        await keep_served(
            me,
            self.reopen,
            client=me,
            trust=me,
            authorizations=me,
            service=me,
            report=self.report,
        )

    async def report(self, is_good: bool) -> None:
        self.reports.append(is_good)


def refusal(reason: str) -> VerificationError:
    return VerificationError(reason, "a broker said so")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_device, "GIVEN_BACK_SECONDS", 0)


@pytest.mark.parametrize("reason", ["device.fenced", "device.forgotten", "anchor.failed"])
async def test_device_that_was_opened_elsewhere_stays_lost(reason: str) -> None:
    target = Target([refusal(reason)])
    async with asyncio.timeout(PATIENCE_SECONDS):
        await target.kept()
    assert target.did == [reason, "abandon", "close", "close"]
    assert target.reports == [True, False]


async def test_device_that_can_not_be_anchored_ends_the_process_which_opens_it_again() -> None:
    target = Target([UnavailableError("anchor.failed", "an error of the disk")])
    with pytest.raises(UnavailableError) as ended:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await target.kept()
    assert ended.value.exit_code == 4
    assert target.did == ["anchor.failed", "abandon", "close", "close"]
    assert target.reports == [True, False]


async def test_device_that_was_given_away_is_asked_for_until_it_is_back() -> None:
    target = Target(
        [refusal("device.owner.refused")],
        answers=[
            refusal("device.owner.refused"),
            UnavailableError("peer.unreachable", "no broker"),
            refusal("certificate.expired"),
            refusal("device.fenced"),
            refusal("device.moved"),
        ],
        openings=[UnavailableError("device.busy", "the other one ends"), None],
    )
    keeping = asyncio.ensure_future(target.kept())
    await asyncio.wait_for(target.resumed.wait(), PATIENCE_SECONDS)
    await asyncio.sleep(0)
    keeping.cancel()
    assert target.reports == [True, False, True]
    assert target.did[4:] == ["asked"] * 4 + ["opened", "asked", "opened", "resume"]


@pytest.mark.parametrize(
    ("answers", "openings"),
    [
        ([refusal("device.forgotten")], []),
        ([refusal("device.fenced")], [refusal("device.anchor.mismatch")]),
    ],
)
async def test_device_that_is_given_back_changed_is_not_opened(
    answers: list[Error | None], openings: list[Error | None]
) -> None:
    target = Target([refusal("device.moved")], answers=answers, openings=openings)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await target.kept()
    assert "resume" not in target.did
