"""The fabric role end to end: gRPC, establishment, ring hand-over, transfer, limits, closing."""

import asyncio
import contextlib
import hashlib
import os
import random
import secrets
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import structlog

import fabrics as fabrics_module
from patience import PATIENCE_SECONDS
from sealane import _native
from sealane._native import Emulator, LinkSettings
from sealane.client.grants import fetch_ring
from sealane.client.messages import ErasureCoded, Reliability, SelectiveRepeat
from sealane.client.session import Session
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.fabric import establishment, known_paths
from sealane.daemon.fabric import service as service_module
from sealane.daemon.fabric.establishment import Answer, Offer, respond
from sealane.daemon.fabric.known_paths import PathKey, PathLoss, PathWindow
from sealane.daemon.fabric.session import Session as FabricSession
from sealane.daemon.fabric.session import State
from sealane.daemon.fabric.statistics import rate_cuts
from sealane.daemon.fabric.steering import Steering
from sealane.daemon.runtime import door
from sealane.errors import Error, SessionError, UnavailableError, UsageError, VerificationError
from sealane.planning.model import Loss
from sealane.protocol.v1 import sessions_pb2
from sealane.transport.establish import VERSION, VERSIONS
from session_pairs import RATE, REGION, connected, wait_listening

# The burst of a paced sender: BURST_PACKETS of native/proto/src/session/pacing.rs.
BURST_BYTES = 64 * 1500
MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]


async def transfer(
    sender: Session, receiver: Session, reliability: Reliability | None = None
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
    assert sent.duration_seconds > (len(content) - BURST_BYTES) * 8 / RATE


@pytest.mark.parametrize("reliability", [SelectiveRepeat(), ErasureCoded(k=32, m=8)])
async def test_job_sends_to_job(fabrics: tuple[Any, Any], reliability: Reliability) -> None:
    async with connected(*fabrics) as (sender, receiver):
        await transfer(sender, receiver, reliability)

        assert sender.session.side == "initiator"
        assert receiver.session.side == "responder"
        assert receiver.session.peer_node == "fabric-a"


@pytest.mark.parametrize("reliability", [SelectiveRepeat(), ErasureCoded(k=16, m=8)])
async def test_session_runs_through_an_emulated_link(
    fabrics: tuple[Any, Any], reliability: Reliability
) -> None:
    left, right = fabrics
    links: list[Emulator] = []

    def lay_link(data_addresses: list[str]) -> list[str]:
        settings = LinkSettings(
            rate_bits_per_second=RATE,
            delay_nanos=5_000_000,
            buffer_bytes=1 << 24,
            loss_parts_per_billion=10_000_000,
        )
        links.append(Emulator.relay([settings], [settings], seed=3, forward_to=data_addresses[0]))
        return [links[0].address or ""]

    try:
        async with connected(left, right, via=lay_link) as (sender, receiver):
            await transfer(sender, receiver, reliability)
    finally:
        for link in links:
            link.stop()

    report = links[0].report()
    assert report["forward"]["paths"][0]["lost_packets"] > 0
    assert report["backward"]["sent_packets"] > 0


async def test_statistics_are_of_the_moment_though_the_loop_is_busy(
    fabrics: tuple[Any, Any],
) -> None:
    async with connected(*fabrics) as (sender, receiver):
        name = sender.session.name
        near = fabrics[0].service.statistics
        assert near.sessions()[name]["payload_bytes_sent"] == 0

        await transfer(sender, receiver, SelectiveRepeat())

        deadline = time.monotonic() + PATIENCE_SECONDS
        while not near.sessions()[name]["payload_bytes_sent"]:
            # Never to the event loop: a scrape doesn't wait for it.
            assert time.monotonic() < deadline
            time.sleep(0.001)  # noqa: ASYNC251


async def test_many_messages_are_matched_in_order(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (sender, receiver), asyncio.TaskGroup() as tasks:
        for number in range(300):
            sender.region[number * 8 : number * 8 + 8] = number.to_bytes(8, "little")
        receiving = [
            tasks.create_task(receiver.receive(offset=number * 8, length=8))
            for number in range(300)
        ]
        for number in range(300):
            tasks.create_task(sender.send(offset=number * 8, length=8, immediate=number))
        for number, task in enumerate(receiving):
            received = await task
            landed = receiver.region[received.offset : received.offset + 8]
            assert int.from_bytes(landed, "little") == number == received.immediate


async def test_sessions_side_by_side_do_not_mix(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    async with (
        connected(left, right, name="one") as one,
        connected(left, right, name="two") as two,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(transfer(*one))
        tasks.create_task(transfer(*two, ErasureCoded(k=16, m=4)))


async def test_too_long_message_is_an_error_at_both_ends(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (sender, receiver):
        receiving = asyncio.ensure_future(receiver.receive(offset=0, length=10))
        with pytest.raises(SessionError) as send_refused:
            await sender.send(offset=0, length=11)
        with pytest.raises(SessionError) as receive_refused:
            await receiving

        assert send_refused.value.reason == "session.message.too_long"
        assert receive_refused.value.reason == "session.message.too_long"
        await transfer(sender, receiver)


@pytest.mark.parametrize(
    ("offset", "length"), [(REGION, 1), (0, REGION + 1), (-1, 1), (2**64 - 1, 2)]
)
async def test_range_outside_the_region_is_refused_at_the_job(
    fabrics: tuple[Any, Any], offset: int, length: int
) -> None:
    async with connected(*fabrics) as (sender, receiver):
        with pytest.raises(UsageError):
            await sender.send(offset=offset, length=length)
        await transfer(sender, receiver)


async def test_closing_by_the_job_reaches_the_peer_and_the_list(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    async with connected(left, right) as (sender, receiver):
        receiving = asyncio.ensure_future(receiver.receive(offset=0, length=10))
        sender.close()
        with pytest.raises(SessionError):
            await receiving
        with pytest.raises(SessionError):
            await sender.send(offset=0, length=1)
        name = sender.session.name
        async with asyncio.timeout(PATIENCE_SECONDS):
            await left.service.get(name).wait_closed()
        found = await get(left, name)

    assert found.state == sessions_pb2.Session.CLOSED
    assert found.close_reason == "session.job.gone"
    listed = await right.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
    assert [one.close_reason for one in listed.sessions] == ["session.peer_closed.requested"]


async def test_operator_closes_a_session(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    async with connected(left, right) as (sender, receiver):
        sending = asyncio.ensure_future(sender.send(offset=0, length=10))
        await left.sessions.CloseSession(sessions_pb2.CloseSessionRequest(name=sender.session.name))
        with pytest.raises(SessionError):
            await sending
        with pytest.raises(SessionError):
            await receiver.receive(offset=0, length=10)
    found = await get(left, sender.session.name)
    assert found.state == sessions_pb2.Session.CLOSED
    assert found.statistics["packets_sent"] > 0


async def test_operator_reads_of_every_end_in_the_log(make_fabric: MakeFabric) -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            make_fabric("fabric-a", grant_timeout_seconds=0.05) as left,
            make_fabric("fabric-b") as right,
            listening(right),
        ):
            grant = await open_directly(left, right)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await grant.session.wait_closed()

    name = grant.session.identity.name
    ours = [line for line in logs if line.get("session") == name]
    assert [(line["event"], line["log_level"]) for line in ours] == [
        ("session_established", "info"),
        ("session_closed", "warning"),
    ]
    assert (ours[1]["peer"], ours[1]["reason"]) == ("fabric-b", "session.grant.expired")


async def get(fabric: Any, name: str) -> sessions_pb2.Session:
    found: sessions_pb2.Session = await fabric.sessions.GetSession(
        sessions_pb2.GetSessionRequest(name=name)
    )
    return found


async def refused(action: Any) -> Error:
    with pytest.raises(Error) as caught:
        await action
    return caught.value


async def open_directly(left: Any, right: Any, **changes: Any) -> Any:
    arguments = {
        "job_token": left.job_token,
        "display_name": "data",
        "region_bytes": REGION,
        "peer_node": right.name,
        "peer_address": right.address,
        "rate_bits_per_second": RATE,
    }
    return await left.service.open(**{**arguments, **changes})


async def test_without_a_listener_nothing_opens(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics

    error = await refused(open_directly(left, right))

    assert (type(error), error.reason) == (UnavailableError, "session.listener.absent")
    assert [session.close_reason for session in left.service.sessions()] == [
        "session.establish.failed"
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rate_bits_per_second": 400_000_001}, "session.rate.range"),
        ({"rate_bits_per_second": 0}, "session.rate.range"),
        ({"region_bytes": (8 << 20) + 1}, "session.region.range"),
        ({"region_bytes": 0}, "session.region.range"),
        ({"display_name": ""}, "session.display_name.length"),
        ({"via_addresses": ["far.away:1"]}, "session.via_address.malformed"),
    ],
)
async def test_values_out_of_range_are_refused(
    fabrics: tuple[Any, Any], changes: dict[str, Any], reason: str
) -> None:
    error = await refused(open_directly(*fabrics, **changes))

    assert (type(error), error.reason) == (UsageError, reason)


async def test_responder_holds_the_peer_to_its_own_rate(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b", rate_max_bits_per_second=RATE - 1) as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

    assert error.reason == "session.rate.range"


@contextlib.asynccontextmanager
async def listening(fabric: Any) -> AsyncIterator["asyncio.Task[Any]"]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            fabric.service.listen(
                job_token=fabric.job_token, display_name="data", region_bytes=REGION
            )
        )
        await wait_listening(fabric)
        try:
            yield task
        finally:
            task.cancel()


CHANGES: list[Any] = [
    pytest.param({"connection_id": bytes(8)}, id="connection id"),
    pytest.param({"nonce": bytes(32)}, id="nonce"),
    pytest.param({"rate_bits_per_second": RATE - 8}, id="rate"),
    pytest.param({"data_addresses": ("127.0.0.1:9",)}, id="address"),
    pytest.param({"public_key": (9).to_bytes(32, "little")}, id="public key"),
]


@pytest.mark.parametrize("change", CHANGES)
async def test_changed_offer_is_noticed(
    make_fabric: MakeFabric, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed = []

    def watched(*arguments: Any, **more: Any) -> Any:
        try:
            return respond(*arguments, **more)
        except VerificationError as error:
            noticed.append(error.reason)
            raise

    monkeypatch.setattr("sealane.daemon.fabric.responder.respond", watched)
    async with (
        make_fabric("fabric-a", change_offer=lambda offer: replace(offer, **change)) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

        assert (type(error), error.reason) == (VerificationError, "secret.sealed")
        assert noticed == ["secret.sealed"], "by the responder, not by the initiator later"
        # The listener is still available after that.
        await wait_listening(right)


async def test_an_unknown_version_is_refused_before_a_listener_is_looked_for(
    make_fabric: MakeFabric,
) -> None:
    offered = []

    def later(offer: Offer) -> Offer:
        offered.append(offer.version)
        return replace(offer, version=VERSION + 1)

    async with (
        make_fabric("fabric-a", change_offer=later) as left,
        make_fabric("fabric-b") as right,
    ):
        error = await refused(open_directly(left, right))
        assert (type(error), error.reason) == (UsageError, "session.establish.version")
        assert offered == list(VERSIONS)


async def test_a_session_with_a_fabric_of_the_release_before_has_its_version_at_both_ends(
    fabrics: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_version(version: int) -> None:
        if version != VERSIONS[1]:
            raise UsageError("session.establish.version", f"session version {version}")

    # What a responder of the release before knows, and what it doesn't say.
    monkeypatch.setattr(service_module, "check_version", check_version)
    monkeypatch.setattr(establishment, "responder_nonce", lambda _: secrets.token_bytes(32))
    with structlog.testing.capture_logs() as logs:
        async with connected(*fabrics) as (sender, receiver):
            await transfer(sender, receiver)
    established = [log["version"] for log in logs if log["event"] == "session_established"]
    assert established == [VERSIONS[1]] * 2


@pytest.mark.parametrize("change", [change for change in CHANGES if "rate" not in change.id])
async def test_changed_answer_is_noticed(make_fabric: MakeFabric, change: dict[str, Any]) -> None:
    async with (
        make_fabric("fabric-a", change_answer=lambda answer: replace(answer, **change)) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

    assert error.reason == "secret.sealed"


async def test_wrong_confirmation_is_noticed(make_fabric: MakeFabric) -> None:
    def change(answer: Answer) -> Answer:
        return replace(answer, confirmation=bytes(32))

    async with (
        make_fabric("fabric-a", change_answer=change) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

    assert error.reason == "session.establish.confirmation"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"node": "fabric-c"}, "secret.sealed", id="node"),
        pytest.param({"incarnation": b"i" * 16}, "secret.sealed", id="incarnation"),
        pytest.param({"tenant": "other"}, "session.peer.tenant", id="tenant"),
        pytest.param(
            {"kem_public_key": X25519KemKey.create().public_key}, "secret.sealed", id="KEM key"
        ),
    ],
)
async def test_peer_that_is_somebody_else_shares_no_secret(
    make_fabric: MakeFabric, change: dict[str, Any], reason: str
) -> None:
    async with (
        make_fabric("fabric-a", change_subject=lambda peer: replace(peer, **change)) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

    assert error.reason == reason


@pytest.mark.parametrize("name", ["certificate", "token"])
async def test_certificate_or_result_of_another_call_is_noticed(
    make_fabric: MakeFabric, name: str
) -> None:
    async with (
        make_fabric(
            "fabric-a", change_shown=lambda shown: replace(shown, **{name: bytes(32)})
        ) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

    assert error.reason == "secret.sealed"


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        pytest.param("result of fabric-c", "token.subject", id="of another node"),
        pytest.param("older result of fabric-b", "secret.sealed", id="another of its own"),
    ],
)
async def test_result_of_the_responder_can_not_be_swapped(
    make_fabric: MakeFabric, token: str, reason: str
) -> None:
    def swap(answer: Answer) -> Answer:
        return replace(answer, result=replace(answer.result, token=token))

    async with (
        make_fabric("fabric-a", change_answer=swap) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

    assert error.reason == reason


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8_0", "127.0.0.1: 80", "::1:80", "[127.0.0.1]:80", "[fe80::1%0]:80", "x"]
)
async def test_address_that_the_engine_can_not_parse_is_malformed(
    make_fabric: MakeFabric, address: str
) -> None:
    async with (
        make_fabric(
            "fabric-a", change_offer=lambda offer: replace(offer, data_addresses=(address,))
        ) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        error = await refused(open_directly(left, right))

    assert error.reason == "session.establish.malformed"


async def test_listener_survives_an_initiator_that_gives_up(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("fabric-m", change_answer=lambda found: replace(found, nonce=bytes(32))) as bad,
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b", establish_timeout_seconds=1) as right,
        listening(right) as task,
    ):
        await refused(open_directly(bad, right))
        await wait_listening(right)
        right.service.settings = replace(
            right.service.settings, establish_timeout_seconds=PATIENCE_SECONDS
        )
        grant = await open_directly(left, right)
        answer = await task

        assert grant.session.identity.peer_node == "fabric-b"
        assert answer.session.identity.peer_node == "fabric-a"


async def test_a_jobs_listeners_for_a_name_take_one_peer_each(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    async with listening(right), listening(right) as waiting:
        grants = [await open_directly(left, right) for _ in range(2)]
        answered = await waiting
    assert len({grant.session.identity.name for grant in grants}) == 2
    assert answered.session.identity.peer_node == "fabric-a"


async def test_number_of_sessions_is_bounded(make_fabric: MakeFabric) -> None:
    async with make_fabric("fabric-b", sessions_max=1) as right, listening(right):
        error = await refused(
            right.service.listen(
                job_token=right.job_token, display_name="more", region_bytes=REGION
            )
        )

    assert error.reason == "session.count.limit"


async def test_ring_token_works_once(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    async with listening(right):
        grant = await open_directly(left, right)
        wire = sessions_pb2.SessionGrant(ring_socket=grant.ring_socket, ring_token=grant.ring_token)
        ring = await fetch_ring(wire)
        second = await refused(fetch_ring(wire))
        wire.ring_token = bytes(15) + b"\x01"
        guessed = await refused(fetch_ring(wire))
        ring.close()

    assert second.reason == guessed.reason == "session.ring.refused"


async def test_grant_that_nobody_fetches_expires(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("fabric-a", grant_timeout_seconds=0.05) as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        grant = await open_directly(left, right)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await grant.session.wait_closed()

    assert grant.session.close_reason == "session.grant.expired"


async def test_ring_socket_is_private_and_survives_rude_jobs(fabrics: tuple[Any, Any]) -> None:
    left, right = fabrics
    path = left.service.settings.ring_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    for hello in (b"", b"short"):
        with socket.socket(socket.AF_UNIX) as rude:
            rude.connect(str(path))
            rude.sendall(hello)
    async with connected(left, right) as (sender, receiver):
        await transfer(sender, receiver)


async def test_job_of_another_user_gets_nothing(
    fabrics: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = fabrics
    monkeypatch.setattr(door, "geteuid", lambda: os.geteuid() + 1)
    async with listening(right):
        grant = await open_directly(left, right)
        wire = sessions_pb2.SessionGrant(ring_socket=grant.ring_socket, ring_token=grant.ring_token)
        error = await refused(fetch_ring(wire))

    assert error.reason in ("session.ring.refused", "session.ring.unreachable")


async def test_stopping_the_fabric_ends_its_sessions(make_fabric: MakeFabric) -> None:
    async with make_fabric("fabric-b") as right:
        async with make_fabric("fabric-a") as left, listening(right) as task:
            grant = await open_directly(left, right)
            answer = await task
        assert grant.session.close_reason == "session.closed.shutdown"
        async with asyncio.timeout(PATIENCE_SECONDS):
            await answer.session.wait_closed()

    assert answer.session.close_reason == "session.peer_closed.requested"


async def test_both_ends_have_a_plan_soon_after_they_have_sent(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (near, far), asyncio.timeout(PATIENCE_SECONDS):
        await transfer(near, far)
        await transfer(far, near)
        for fabric in fabrics:
            (session,) = fabric.service.sessions()
            while session.outlook is None:  # noqa: ASYNC110 - the plan has no event
                await asyncio.sleep(0.01)
            assert session.outlook.plan.path.rate_bits_per_second == RATE


async def test_a_session_begins_with_what_another_one_measured(
    fabrics: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_paths, "PACKETS_MIN", 0)
    service, name = fabrics[0].service, fabrics[1].service._own().spiffe_id
    path = PathKey.of(name, ["127.0.0.1:1"])
    async with asyncio.timeout(PATIENCE_SECONDS):
        async with connected(*fabrics) as (near, far):
            await transfer(near, far)
            while service.plans.losses.get(path) is None:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        (first,) = service.sessions()
        await first.wait_closed()
        service.plans.losses.note(path, PathLoss(rate=1e-4), 1)
        async with connected(*fabrics, name="second") as (near, far):
            await transfer(near, far)
            (second,) = (each for each in service.sessions() if each is not first)
            while second.outlook is None:  # noqa: ASYNC110 - the plan has no event
                await asyncio.sleep(0.01)
    assert second.outlook.plan.path.loss == Loss(rate=1e-4)


async def test_a_session_starts_with_the_window_of_the_last_one(
    fabrics: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, name = fabrics[0].service, fabrics[1].service._own().spiffe_id
    path = PathKey.of(name, ["127.0.0.1:1"])
    given: list[PathWindow | None] = []
    for_engine = Steering.for_engine

    def recorded(self: Steering, known: PathWindow | None = None) -> _native.Steering:
        given.append(known)
        return for_engine(self, known)

    def last(_: FabricSession) -> dict[str, int]:
        return {"srtt_nanos": 1, "window_bytes": 1000, "wire_bytes_sent": 1000}

    monkeypatch.setattr(Steering, "for_engine", recorded)
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(2):
            async with connected(*fabrics):
                (session,) = (
                    each for each in service.sessions() if each.state is State.ESTABLISHED
                )
                with monkeypatch.context() as patch:
                    patch.setattr(FabricSession, "statistics", last)
                    session.close("session.closed.requested")
    # Of both ends each time; the other end has closed with its own figures.
    assert [known.window_bytes for known in given if known is not None] == [1000]
    assert service._windows.take(path, "uno") is None, "it was the rate's"
    assert service._windows.take(path, None) is not None


def test_rates_that_were_cut_are_told_once() -> None:
    before = {"s/1": {"breaker_trips": 1}, "s/2": {}, "s/3": {"breaker_trips": 2}}
    after = {"s/1": {"breaker_trips": 1}, "s/2": {"breaker_trips": 1}, "s/4": {"breaker_trips": 1}}

    assert rate_cuts(before, after) == ["s/2", "s/4"]
    assert rate_cuts(after, after) == []


async def test_a_renewed_certificate_changes_nothing_for_a_living_session(
    make_fabric: MakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b") as right,
        connected(left, right, name="old") as (ours, theirs),
    ):

        def renewed(name: str) -> bytes:
            return hashlib.sha256(f"{name} renewed".encode()).digest()

        monkeypatch.setattr(fabrics_module, "certificate_digest", renewed)
        async with connected(left, right, name="new"):
            sent, received = ours.empty((1000,), "uint8"), theirs.empty((1000,), "uint8")
            memoryview(sent)[:] = bytes(1000)
            await asyncio.gather(theirs.receive(received), ours.send(sent))
            states = [session.state.value for session in left.service.sessions()]
            assert states == ["established", "established"]
