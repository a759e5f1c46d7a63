"""Channels: pinned to the peer's leaf, reused, and replaced without failing calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from patience import PATIENCE_SECONDS
from sealane.crypto.attestation.ear import AttestationResult
from sealane.crypto.certificates import LIFETIME, Subject
from sealane.daemon.node import channels
from sealane.daemon.runtime import authorizers, calls
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.v1 import storage_pb2, storage_pb2_grpc
from trust.world import Echo, Site, ask


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    async with made.stop:
        yield made


async def test_calls_share_one_channel(site: Site) -> None:
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    address = await site.serve(target, Echo())
    assert await asyncio.gather(*(ask(gateway, address, str(n)) for n in range(100))) == [
        str(n) for n in range(100)
    ]
    assert gateway.channels.count == 1
    assert site.questions == 1


async def test_another_leaf_of_the_same_broker_is_no_substitute(site: Site) -> None:
    true = await site.identity("target", "s")
    pinned = list(site.leaves["s", "target"])
    # A second process certified as the same node: name, role and issuer match.
    impostor = await site.identity("target", "s")
    site.leaves["s", "target"] = pinned
    gateway = await site.identity("gateway", "g")
    echo = Echo()
    address = await site.serve(impostor, echo)
    with pytest.raises(VerificationError) as caught:
        await ask(gateway, address)
    assert caught.value.reason == "peer.certificate"
    assert echo.calls == 0
    assert await ask(gateway, await site.serve(true, echo)) == "x"


async def test_peer_that_is_not_attested_is_not_called(site: Site) -> None:
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    address = await site.serve(target, Echo())
    assert await ask(gateway, address) == "x"
    site.leaves.clear()
    gateway.channels._now_ns = lambda: 10**18
    with pytest.raises(UnavailableError) as caught:
        await ask(gateway, address)
    assert caught.value.reason == "peer.unattested"
    assert gateway.channels.count == 0


async def test_a_thousand_calls_survive_the_rotation_of_both_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "PIN_SECONDS", 0.05)
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    address = await site.serve(target, Echo())
    rotations = 0

    async def rotate() -> None:
        nonlocal rotations
        while True:
            await target.renew()
            await asyncio.sleep(0.01)
            await gateway.renew()
            await asyncio.sleep(0.01)
            rotations += 1

    rotating = asyncio.ensure_future(rotate())
    leaves = set()
    calls = 0
    while calls < 1000 or rotations <= 10 or len(leaves) <= 10:
        answers = await asyncio.gather(*(ask(gateway, address, str(n)) for n in range(20)))
        assert answers == [str(n) for n in range(20)], calls
        assert not rotating.done(), rotating
        leaves.add(gateway.certificate.serial_number)
        calls += 20
    rotating.cancel()
    assert gateway.channels.count == 1


async def test_server_that_comes_back_with_another_key_is_found_again(site: Site) -> None:
    gateway = await site.identity("gateway", "g")
    first = Site(authority=site.authority, leaves=site.leaves)
    async with first.stop:
        address = await first.serve(await site.identity("target", "s"), Echo())
        assert await ask(gateway, address) == "x"
    again = await site.identity("target", "s")
    site.leaves["s", "target"] = site.leaves["s", "target"][:1]
    await site.serve(again, Echo(), listen=address)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(Error):
                assert await ask(gateway, address) == "x"
                break


async def test_call_and_stream_under_way_end_on_the_channel_they_began_on(site: Site) -> None:
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    echo = Echo(held=asyncio.Event())
    address = await site.serve(target, echo)
    held = asyncio.ensure_future(ask(gateway, address, "held"))
    async with gateway.channel(address, "s", "target") as channel:
        stream = storage_pb2_grpc.StorageStub(channel).WatchEvents(
            storage_pb2.WatchEventsRequest(volume_id="v")
        )
        assert (await anext(aiter(stream))).kind == "first"
        assert echo.held is not None
        await echo.held.wait()
        await gateway.renew()
        assert await ask(gateway, address) == "x"
        assert gateway.channels.count == 2
        echo.released.set()
        assert (await anext(aiter(stream))).kind == "last"
        assert await held == "held"
    assert gateway.channels.count == 1


async def test_stream_that_is_followed_moves_to_the_renewed_certificates_channel(
    site: Site,
) -> None:
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    address = await site.serve(target, Echo(held=asyncio.Event()))
    for _ in range(2):
        async with gateway.stream_channel(address, "s", "target") as (channel, renewed):
            leaf = gateway.certificate
            stream = storage_pb2_grpc.StorageStub(channel).WatchEvents(
                storage_pb2.WatchEventsRequest(volume_id="v")
            )
            messages = channels.until(stream, renewed)
            assert (await anext(messages)).kind == "first"
            await gateway.renew()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(anext(messages), PATIENCE_SECONDS)
            assert renewed.done()
            assert stream.cancelled()
            assert gateway.certificate != leaf
    # No channel of an old leaf is left, or the target would report its end.
    assert await ask(gateway, address) == "x"
    assert gateway.channels.count == 1


async def test_broker_that_is_away_keeps_no_pinned_peer_from_being_called(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    address = await site.serve(target, Echo())
    assert await ask(gateway, address) == "x"

    async def away(node: str, role: str) -> list[x509.Certificate]:
        raise UnavailableError("peer.unreachable", f"no broker to ask for {role} {node}")

    gateway.find_peer = away
    monkeypatch.setattr(channels, "PIN_SECONDS", 0.0)
    assert await ask(gateway, address) == "x"
    with pytest.raises(UnavailableError) as caught:
        await ask(gateway, address, node="other")
    assert caught.value.reason == "peer.unreachable"


async def test_call_on_a_live_connection_ends_with_the_callers_leaf(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    address = await site.serve(target, Echo())
    assert await ask(gateway, address) == "x"
    monkeypatch.setattr(authorizers, "utc_now", lambda: utc_now() + LIFETIME)
    with pytest.raises(VerificationError) as caught:
        await ask(gateway, address)
    assert caught.value.reason == "certificate.expired"


async def test_stream_ends_when_its_caller_may_not_act_any_more(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "STREAM_CHECK_SECONDS", 0.1)
    revoked = False

    async def admit(caller: Subject, leaf: x509.Certificate, result: AttestationResult) -> bool:
        assert result.certificate_sha256 == leaf.fingerprint(SHA256())
        if revoked:
            raise VerificationError("node.revoked", f"{caller.node} {leaf.serial_number}")
        return False

    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    address = await site.serve(target, Echo(), admit=admit)

    async def watch() -> None:
        nonlocal revoked
        async with gateway.channel(address, "s", "target") as channel:
            stream = storage_pb2_grpc.StorageStub(channel).WatchEvents(
                storage_pb2.WatchEventsRequest(volume_id="v")
            )
            assert (await anext(aiter(stream))).kind == "first"
            revoked = True
            await anext(aiter(stream))

    with pytest.raises(VerificationError) as caught:
        await asyncio.wait_for(watch(), PATIENCE_SECONDS)
    assert caught.value.reason == "node.revoked"


async def test_refused_renewal_bars_the_role(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealane.daemon.node.identity._SPACING_SECONDS", 0.0)
    target, gateway = await site.identity("target", "s"), await site.identity("gateway", "g")
    echo = Echo(held=asyncio.Event())
    address = await site.serve(target, echo)
    told: asyncio.Queue[str] = asyncio.Queue()
    gateway.on_barred.append(told.put_nowait)
    renewing = asyncio.ensure_future(gateway.keep_renewed())
    held = asyncio.ensure_future(ask(gateway, address, "held"))
    assert echo.held is not None
    await echo.held.wait()
    site.refusal = VerificationError("attestation.measurement.unknown", "not what it should be")
    gateway.note(VerificationError("attestation.policy.changed", "attest again"))
    assert await asyncio.wait_for(told.get(), PATIENCE_SECONDS) == "attestation.measurement.unknown"
    with pytest.raises(Error):
        await held
    with pytest.raises(UnavailableError) as caught:
        await ask(gateway, address)
    assert caught.value.reason == "certificate.missing"
    assert gateway.channels.count == 0
    renewing.cancel()
    await asyncio.wait({renewing})


async def test_unreachable_verifier_bars_nobody_until_the_certificate_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.node.identity._SPACING_SECONDS", 0.0)
    monkeypatch.setattr("sealane.daemon.node.identity.RETRY_SECONDS", 0.02)
    gateway = await site.identity("gateway", "g")
    gateway.on_barred.append(pytest.fail)
    site.refusal = UnavailableError("peer.unreachable", "no broker")
    gateway.note(VerificationError("node.revoked", "says a peer"))
    renewing = asyncio.ensure_future(gateway.keep_renewed())
    for _ in range(3):
        await asyncio.wait_for(site.refused.wait(), PATIENCE_SECONDS)
        site.refused.clear()
        assert gateway.certificate
    monkeypatch.setattr("sealane.daemon.node.identity.utc_now", lambda: utc_now() + LIFETIME)
    for _ in range(3):
        await asyncio.wait_for(site.refused.wait(), PATIENCE_SECONDS)
        site.refused.clear()
    with pytest.raises(UnavailableError):
        gateway.certificate  # noqa: B018 - a property that raises
    renewing.cancel()
    await asyncio.wait({renewing})
