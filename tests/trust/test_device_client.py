"""A target accepts a broker's answer about its device only if it is signed for that device."""

import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from sealane.crypto.hpke import Context, seal_signed
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.device.broker_calls import DeviceClient, OpenedDevice
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.peers import ServedDevice
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.v1 import devices_pb2
from trust.world import Site

D = uuid.UUID(int=13)
SECRET = bytes(range(32))


@dataclass
class World:
    """A target's client, and a broker with scripted answers."""

    site: Site
    identity: Identity
    client: DeviceClient
    state: devices_pb2.DeviceState = field(
        default_factory=lambda: devices_pb2.DeviceState(device_id=str(D), fencing_epoch=7)
    )
    shown: bytes | None = None
    context: dict[str, Any] = field(default_factory=dict)
    signer: Site | None = None
    refusal: str = ""

    def answer(self, request: devices_pb2.OpenDeviceRequest) -> devices_pb2.OpenDeviceResponse:
        state = self.state.SerializeToString()
        values: dict[str, Any] = {
            "purpose": "device secret",
            "recipient": self.identity.subject.spiffe_id,
            "incarnation": self.identity.keys.incarnation,
            "request_id": request.request_id,
            "volume_id": str(D),
            "key_epoch": self.state.fencing_epoch,
            "beside": hashlib.sha256(state).digest(),
            **self.context,
        }
        sealed = seal_signed(
            SECRET,
            recipient_key=self.identity.keys.kem_public,
            context=Context(**values),
            signing_key=(self.signer or self.site).authority.signing_key,
        )
        return devices_pb2.OpenDeviceResponse(
            state=state if self.shown is None else self.shown,
            sealed=sealed.sealed,
            signature=sealed.signature,
        )

    async def open(self) -> OpenedDevice:
        return await self.client.open(D, anchor="broker", found=())


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    site = Site()
    async with site.stop:
        identity = await site.identity("target", "s")
        config = EnrolmentConfig(
            broker_address="unused:1",
            attestation_address="unused:1",
            trust_anchor="/unused",
            evidence="software",
            key_file="/unused",
        )
        made = World(site, identity, DeviceClient(config, identity))

        class Stub:
            def __init__(self, channel: grpc.aio.Channel) -> None:
                pass

            async def OpenDevice(  # noqa: N802
                self,
                request: devices_pb2.OpenDeviceRequest,
                **_: float,
            ) -> devices_pb2.OpenDeviceResponse:
                return made.answer(request)

            async def AdvanceAnchor(  # noqa: N802
                self, request: devices_pb2.AdvanceAnchorRequest, **_: float
            ) -> None:
                del request
                raise VerificationError(made.refusal, "refused")

        async def call(
            self: object, call: Callable[[object], Awaitable[devices_pb2.OpenDeviceResponse]]
        ) -> devices_pb2.OpenDeviceResponse:
            return await call(None)

        monkeypatch.setattr("sealane.daemon.device.broker_calls.DevicesStub", Stub)
        monkeypatch.setattr("sealane.daemon.node.brokers.Brokers.call", call)
        yield made


async def _reason(world: World) -> str:
    with pytest.raises(VerificationError) as caught:
        await world.open()
    return caught.value.reason


async def test_what_the_broker_says_is_taken(world: World) -> None:
    world.state.is_initial = True
    world.state.records.add(name="catalogue", number=3, blob=b"x")
    opened = await world.open()
    assert opened.secret == SECRET
    assert (opened.served.device_id, opened.served.fencing_epoch) == (D, 7)
    assert opened.is_initial
    assert opened.records["catalogue"].number == 3


async def test_state_that_is_not_the_signed_one_is_refused(world: World) -> None:
    world.shown = devices_pb2.DeviceState(
        device_id=str(D), fencing_epoch=7, is_initial=True
    ).SerializeToString()
    assert await _reason(world) == "secret.signature"


async def test_answer_of_another_broker_is_refused(world: World) -> None:
    world.signer = Site()
    assert await _reason(world) == "secret.signature"


@pytest.mark.parametrize(
    "context",
    [
        {"purpose": "volume key"},
        {"recipient": "spiffe://sealane/target/o"},
        {"incarnation": bytes(16)},
        {"request_id": bytes(16)},
        {"key_epoch": 6},
        {"beside": b""},
    ],
)
async def test_answer_to_another_question_is_refused(world: World, context: dict[str, Any]) -> None:
    world.context = context
    assert await _reason(world) == "secret.signature"


async def test_answer_for_another_device_is_refused(world: World) -> None:
    world.state.device_id = str(uuid.UUID(int=14))
    assert await _reason(world) == "device.state.mismatch"


@pytest.mark.parametrize("record", [{"number": 0, "blob": b"x"}, {"number": 1, "blob": bytes(129)}])
async def test_state_that_is_none_is_refused(world: World, record: dict[str, Any]) -> None:
    world.state.records.add(name="catalogue", **record)
    assert await _reason(world) == "device.state.malformed"
    world.state.ClearField("records")
    world.shown = b"\xff"
    assert await _reason(world) == "device.state.malformed"


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ("node.revoked", UnavailableError),
        ("token.expired", UnavailableError),
        ("attestation.policy.changed", UnavailableError),
        ("node.superseded", VerificationError),
        ("device.fenced", VerificationError),
    ],
)
async def test_only_a_refusal_of_the_device_or_another_process_ends_the_anchor(
    world: World, refusal: str, expected: type[Error]
) -> None:
    world.refusal = refusal
    served = ServedDevice(device_id=D, fencing_epoch=7)
    with pytest.raises(expected, match="unattested" if expected is UnavailableError else "refused"):
        await world.client.advance(served, [])
