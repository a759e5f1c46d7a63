"""A stolen leaf is useless: every method of every server requires a proof by the attested process.

Broker, target and fabric are daemons. The victims attest at the real broker from inside the test,
so that the thief gets exactly the stolen secrets.
"""

import asyncio
import contextlib
import json
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import pytest
from google.protobuf.message import Message

import fabric_daemons
from control_plane import Daemon, Site, daemon, short_directory
from patience import PATIENCE_SECONDS
from sealane.client import Volume, connect
from sealane.crypto.call_proof import CallEnds, CallProver
from sealane.crypto.certificates import Subject
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.device.anchors.anchor import CATALOGUE, Anchored, Change
from sealane.daemon.node import call_proofs
from sealane.daemon.runtime import call_keys
from sealane.daemon.runtime.authorizers import ALLOWED_ROLES, PROOF_KEY, UNPROVED
from sealane.daemon.runtime.call_keys import CallKeys, CallKeysServicer
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import (
    broker_pb2,
    calls_pb2,
    devices_pb2,
    storage_pb2,
)
from sealane.protocol.v1.calls_pb2_grpc import CallKeysStub
from sealane.protocol.v1.storage_pb2_grpc import StorageStub
from trust.insider import Insider, insider
from trust.thieves import LeafThief, outcome
from trust.world import Echo, ask
from trust.world import Site as World

HOST: Final = "nqn.2014-08.org.nvmexpress:uuid:66666666-2222-4333-8444-555555555555"
_SERVICES: Final = {
    "broker": ("Broker", "Devices", "Trust"),
    "target": ("Storage",),
    "fabric": ("SessionPeer",),
}


@dataclass
class Cluster:
    site: Site
    broker: Daemon
    target: Daemon
    gateway: Daemon
    fabric: Daemon

    def address(self, role: str) -> tuple[str, str, str]:
        """Return a server's address, node and role."""
        return {
            "broker": (self.broker.addresses["broker"], "broker", "broker"),
            "target": (self.target.addresses["target_control"], "s", "target"),
            "fabric": (self.fabric.addresses["fabric_control"], "f", "fabric"),
        }[role]

    def audited(self, subject: str, reason: str) -> list[dict[str, Any]]:
        """Return the refusals in the broker's audit log."""
        text = (self.site.root / "broker" / "audit.jsonl").read_text()
        records = [json.loads(line) for line in text.splitlines()]
        return [r for r in records if (r["subject"], r["reason"]) == (subject, reason)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        # w, x and z are gateways of the volume's tenant, y is an accomplice's. Refusals are
        # recorded individually only up to a limit per caller, so a test that reads them has its own
        # caller.
        site = Site(root, tenants={"y": "accomplice"})
        site.write_policy(
            {
                "s": ["target"],
                "s2": ["target"],
                "g": ["gateway"],
                "x": ["gateway"],
                "y": ["gateway"],
                "z": ["gateway"],
                "w": ["gateway"],
                "f": ["fabric"],
                "f2": ["fabric"],
            }
        )
        broker = stack.enter_context(daemon(site.broker_config()))
        listen = 'listen = "127.0.0.1:0"\n'

        def started(name: str, section: str) -> Daemon:
            return stack.enter_context(
                daemon(site.write_config(name, site.enrolment(name, broker) + section))
            )

        target = started("s", f'[target]\n{listen}control_{listen}store = "memory"\n')
        address = target.addresses["target_control"]
        gateway = started(
            "g", f'[gateway]\n{listen}target_node = "s"\ntarget_address = "{address}"\n'
        )
        yield Cluster(site, broker, target, gateway, started("f", fabric_daemons.SECTION))


@pytest.fixture
async def volume(cluster: Cluster) -> AsyncIterator[Volume]:
    async with connect(cluster.gateway.socket) as client:
        made = await client.volumes.create(size_bytes=1 << 20)
        yield made
        await client.volumes.delete(made.name)


def _id(volume: Volume) -> str:
    return volume.name.removeprefix("volumes/")


def _methods(server: str) -> list[str]:
    return [m for m in ALLOWED_ROLES if m.split("/")[1].split(".")[-1] in _SERVICES[server]]


def test_every_method_belongs_to_one_of_the_servers() -> None:
    known = {method for server in _SERVICES for method in _methods(server)}
    assert known | UNPROVED == set(ALLOWED_ROLES)


@pytest.mark.parametrize("server", ["broker", "target", "fabric"])
async def test_a_stolen_leaf_calls_no_method_of_any_server(cluster: Cluster, server: str) -> None:
    async with (
        insider(cluster.site, cluster.broker, node="x") as gateway,
        insider(cluster.site, cluster.broker, node="s2", role="target") as target,
        insider(cluster.site, cluster.broker, node="f2", role="fabric") as fabric,
        contextlib.AsyncExitStack() as stack,
    ):
        victims = {"gateway": gateway, "target": target, "fabric": fabric}
        thieves: dict[str, grpc.aio.Channel] = {}
        for role, victim in victims.items():
            # Callers learn leaves of the peers of their role only; the broker's they trust as such.
            if server == "broker" or (role, server) in {
                ("gateway", "target"),
                ("fabric", "fabric"),
            }:
                thieves[role] = await stack.enter_async_context(
                    LeafThief(victim).channel(*cluster.address(server))
                )
        tried = 0
        for method in _methods(server):
            for role in ALLOWED_ROLES[method] & thieves.keys():
                is_streamed = method.endswith("/WatchEvents")
                refusal = await outcome(thieves[role], method, b"", is_streamed=is_streamed)
                assert refusal == "call.proof.missing", method
                tried += 1
        assert tried >= len(_methods(server))
        if server == "broker":
            for victim in victims.values():
                assert cluster.audited(victim.identity.spiffe_id, "call.proof.missing")
        else:
            lines = getattr(cluster, server).log_lines()
            assert any(line.get("reason") == "call.proof.missing" for line in lines)


async def test_what_a_stolen_leaf_asks_for_does_not_happen(
    cluster: Cluster, volume: Volume
) -> None:
    share = broker_pb2.SetVolumeShareRequest(
        volume_id=_id(volume), share=broker_pb2.VolumeShare(tenant="accomplice")
    )
    at_broker = [
        ("Broker/SetVolumeShare", share),
        ("Broker/UnregisterVolume", broker_pb2.UnregisterVolumeRequest(volume_id=_id(volume))),
        (
            "Broker/BeginResize",
            broker_pb2.BeginResizeRequest(volume_id=_id(volume), size_bytes=2 << 20),
        ),
        (
            "Broker/GetVolumeKey",
            broker_pb2.GetVolumeKeyRequest(
                volume_id=_id(volume), key_epoch=1, request_id=secrets.token_bytes(16)
            ),
        ),
        (
            "Broker/GrantLease",
            broker_pb2.GrantLeaseRequest(
                volume_id=_id(volume), key_epoch=1, request_id=secrets.token_bytes(16)
            ),
        ),
    ]
    async with (
        insider(cluster.site, cluster.broker, node="x") as victim,
        insider(cluster.site, cluster.broker, node="y") as accomplice,
    ):
        thief = LeafThief(victim)
        await _refused(thief, cluster.address("broker"), at_broker)
        delete = storage_pb2.DeleteNamespaceRequest(volume_id=_id(volume))
        await _refused(thief, cluster.address("target"), [("Storage/DeleteNamespace", delete)])
        # Nothing has changed for the owner or the accomplice.
        descriptor = await victim.broker.descriptor(_id(volume))
        assert (len(descriptor.shares), descriptor.sector_count) == (0, 256)
        address = cluster.address("target")
        async with victim.identity.channel(*address) as channel:
            request = storage_pb2.GetNamespaceRequest(volume_id=_id(volume))
            assert (await StorageStub(channel).GetNamespace(request)).volume_id == _id(volume)
        with pytest.raises(UsageError) as caught:
            await accomplice.broker.descriptor(_id(volume))
        assert caught.value.reason == "volume.not_found"
        # The same calls succeed with a proof: nothing else stopped the thief.
        await victim.broker.share(_id(volume), tenant="accomplice", read_only=False)
        await accomplice.broker.descriptor(_id(volume))
        await victim.broker.unshare(_id(volume), tenant="accomplice")


async def test_a_stolen_leaf_of_a_target_takes_no_device_and_moves_no_anchor(
    cluster: Cluster,
) -> None:
    async with insider(cluster.site, cluster.broker, node="s2", role="target") as victim:
        device = uuid.uuid4()
        opened = await victim.devices.open(device, anchor="broker", found=[])
        served = opened.served
        names = {"device_id": str(device), "fencing_epoch": served.fencing_epoch}
        await _refused(
            LeafThief(victim),
            cluster.address("broker"),
            [
                (
                    "Devices/OpenDevice",
                    devices_pb2.OpenDeviceRequest(
                        device_id=str(device), anchor="broker", request_id=bytes(16)
                    ),
                ),
                (
                    "Devices/AdvanceAnchor",
                    devices_pb2.AdvanceAnchorRequest(
                        changes=[devices_pb2.AnchorChange(name=CATALOGUE, number=9, blob=b"old")],
                        **names,
                    ),
                ),
                ("Devices/ConfirmDevice", devices_pb2.ConfirmDeviceRequest(**names)),
                ("Devices/CloseDevice", devices_pb2.CloseDeviceRequest(**names)),
            ],
        )
        # The opening is still valid, and only the victim's changes are anchored.
        first = Change(name=CATALOGUE, expected=0, record=Anchored(number=1, blob=b"first"))
        await victim.devices.advance(served, [first])
        await victim.devices.confirm(served)
        await victim.devices.close(served)
        again = await victim.devices.open(device, anchor="broker", found=[b"first"])
        assert again.served.fencing_epoch == served.fencing_epoch + 1
        assert again.records == {CATALOGUE: Anchored(number=1, blob=b"first")}


async def _refused(
    thief: LeafThief, address: tuple[str, str, str], calls: list[tuple[str, Message]]
) -> None:
    async with thief.channel(*address) as channel:
        for method, request in calls:
            refusal = await outcome(channel, f"/sealane.v1.{method}", request.SerializeToString())
            assert refusal == "call.proof.missing", method


async def test_a_thief_that_asks_for_the_call_key_gets_what_only_the_victim_opens(
    cluster: Cluster,
) -> None:
    async with insider(cluster.site, cluster.broker, node="x") as victim:
        address = cluster.address("broker")
        async with LeafThief(victim).channel(*address) as channel:
            stub = CallKeysStub(channel)
            answers = [await stub.GetCallKey(calls_pb2.GetCallKeyRequest()) for _ in "123"]
        assert answers[0] == answers[1] == answers[2]
        ends = CallEnds(
            server="spiffe://sealane/broker/broker",
            caller=victim.identity.spiffe_id,
            incarnation=victim.identity.keys.incarnation,
        )
        key_id, sealed = answers[0].key_id, answers[0].sealed
        with pytest.raises(VerificationError) as caught:
            CallProver.open(key_id, sealed, ends=ends, kem=X25519KemKey.create())
        assert caught.value.reason == "secret.sealed"
        # The victim's calls go on, under the same key.
        await victim.broker.descriptors(page_size=1, page_token="")
        async with victim.identity.channel(*address) as own:
            answer = await CallKeysStub(own).GetCallKey(calls_pb2.GetCallKeyRequest())
        assert answer.key_id == key_id


async def test_a_proof_is_good_for_one_call_of_one_request_at_one_server(
    cluster: Cluster, volume: Volume
) -> None:
    """Here the thief has also captured proofs, which TLS would prevent."""
    get = "/sealane.v1.Broker/GetVolumeDescriptor"
    request = broker_pb2.GetVolumeDescriptorRequest(volume_id=_id(volume)).SerializeToString()
    async with insider(cluster.site, cluster.broker, node="z") as victim:
        prover = await _prover(cluster, victim, "broker")
        proof: Any = ((PROOF_KEY, prover.prove(get, request)),)
        async with LeafThief(victim).channel(*cluster.address("broker")) as channel:
            unregister = "/sealane.v1.Broker/UnregisterVolume"
            # Both requests have the same bytes; only the method differs.
            assert await outcome(channel, unregister, request, metadata=proof) == (
                "call.proof.mismatch"
            )
            other = broker_pb2.GetVolumeDescriptorRequest(volume_id=str(uuid.uuid4()))
            assert await outcome(channel, get, other.SerializeToString(), metadata=proof) == (
                "call.proof.mismatch"
            )
            assert await outcome(channel, get, request, metadata=proof) == ""
            assert await outcome(channel, get, request, metadata=proof) == "call.proof.replayed"
        async with LeafThief(victim).channel(*cluster.address("target")) as channel:
            await _prover(cluster, victim, "target")
            fresh: Any = ((PROOF_KEY, prover.prove(get, request)),)
            method = "/sealane.v1.Storage/GetNamespace"
            assert await outcome(channel, method, request, metadata=fresh) == (
                "call.proof.unknown_key"
            )
        for reason in ("call.proof.mismatch", "call.proof.replayed"):
            assert cluster.audited(victim.identity.spiffe_id, reason)
        kept: Any = ((PROOF_KEY, prover.prove(get, request)),)
    # The same node after a restart.
    async with (
        insider(cluster.site, cluster.broker, node="z") as victim,
        LeafThief(victim).channel(*cluster.address("broker")) as channel,
    ):
        await _prover(cluster, victim, "broker")
        assert await outcome(channel, get, request, metadata=kept) == "call.proof.unknown_key"


async def _prover(cluster: Cluster, victim: Insider, server: str) -> CallProver:
    """Return the victim's call key for a server, from its memory."""
    address, node, role = cluster.address(server)
    identity = victim.identity
    async with identity.channel(address, node, role) as channel:
        return await identity.proofs.prover(
            f"spiffe://sealane/{role}/{node}", channel, is_confirmed=True
        )


async def test_a_superseded_process_is_refused_at_its_next_call(
    cluster: Cluster, volume: Volume
) -> None:
    async with insider(cluster.site, cluster.broker, node="w") as before:
        descriptor = await before.broker.descriptor(_id(volume))
        await before.broker.lease(descriptor)
        async with insider(cluster.site, cluster.broker, node="w") as after:
            for call in (
                lambda: before.broker.lease(descriptor),
                lambda: before.broker.key(descriptor, key_epoch=1),
                lambda: before.broker.descriptor(_id(volume)),
            ):
                with pytest.raises(VerificationError) as caught:
                    await call()
                assert caught.value.reason == "node.superseded"
            await after.broker.lease(descriptor)
        assert cluster.audited(before.identity.spiffe_id, "node.superseded")


async def test_a_server_that_restarts_or_forgets_is_asked_for_a_key_within_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call succeeds although the server lost its key; without daemons, to edit its table."""
    monkeypatch.setattr(call_keys, "CALLERS_MAX", 1)
    world = World()
    async with world.stop:
        target = await world.identity("target", "s")
        first = await world.identity("gateway", "g")
        second = await world.identity("gateway", "h")
        echo = Echo()
        address = await world.serve(target, echo)
        for identity in (first, first, second, first, second):
            async with identity.channel(address, "s", "target") as channel:
                request = storage_pb2.GetNamespaceRequest(volume_id="v")
                answer = await StorageStub(channel).GetNamespace(request, timeout=30)
            assert answer.volume_id == "v"
        # Each call ran once: a refused one didn't reach the handler.
        assert echo.calls == 5


def test_a_server_keeps_keys_of_so_many_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_keys, "CALLERS_MAX", 2)
    keys = CallKeys("spiffe://sealane/target/s")
    kem = X25519KemKey.create()
    callers = [
        Subject(
            node=f"n{i}",
            role="gateway",
            tenant="t",
            incarnation=bytes([i]) * 16,
            kem_public_key=kem.public_key,
        )
        for i in range(3)
    ]
    made = [keys.key_for(callers[i]) for i in (0, 1)]
    assert keys.key_for(callers[0]) is made[0]
    keys.key_for(callers[2])
    # The least recently used key was evicted and wiped.
    assert made[1]._key == bytes(32)
    assert keys.key_for(callers[0]) is made[0]
    assert made[0]._key != bytes(32)
    keys.close()
    assert made[0]._key == bytes(32)


async def test_a_role_keeps_keys_of_so_many_servers_and_counts_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_proofs, "SERVERS_MAX", 1)
    world = World()
    async with world.stop:
        gateway = await world.identity("gateway", "g")
        addresses = {
            node: await world.serve(await world.identity("target", node), Echo())
            for node in ("s", "t")
        }
        # Keys are dropped and opened again in between: no counter may repeat.
        for node in ("s", "s", "t", "s", "t", "t"):
            async with gateway.channel(addresses[node], node, "target") as channel:
                request = storage_pb2.GetNamespaceRequest(volume_id=node)
                answer = await StorageStub(channel).GetNamespace(request, timeout=30)
            assert answer.volume_id == node


class Held(CallKeysServicer):
    """Answers key requests when released, and counts them."""

    def __init__(self, keys: CallKeys, caller: Any) -> None:
        super().__init__(keys, caller)
        self.asked = 0
        self.arrived = asyncio.Event()
        self.released = asyncio.Event()

    async def GetCallKey(self, request: Any, context: Any) -> calls_pb2.SealedCallKey:  # noqa: N802
        """Wait for the release, then answer."""
        self.asked += 1
        self.arrived.set()
        await self.released.wait()
        return await super().GetCallKey(request, context)


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Held, Any, str, Echo]]:
    """Yield a server that delays keys, the calling gateway, the address and the handler."""
    made: list[Held] = []

    def hold(keys: CallKeys, caller: Any) -> Held:
        made.append(Held(keys, caller))
        return made[-1]

    monkeypatch.setattr("sealane.daemon.runtime.servers.CallKeysServicer", hold)
    world, echo = World(), Echo()
    async with world.stop:
        address = await world.serve(await world.identity("target", "s"), echo)
        yield made[0], await world.identity("gateway", "g"), address, echo


async def test_calls_that_wait_for_a_key_share_the_question(
    held: tuple[Held, Any, str, Echo],
) -> None:
    keys, gateway, address, echo = held
    asked = [asyncio.ensure_future(ask(gateway, address)) for _ in range(50)]
    await asyncio.wait_for(keys.arrived.wait(), PATIENCE_SECONDS)
    keys.released.set()
    assert await asyncio.gather(*asked) == ["x"] * 50
    assert echo.calls == 50
    assert keys.asked <= 2


async def test_a_call_that_gets_no_key_ends_in_its_time_and_does_nothing(
    held: tuple[Held, Any, str, Echo],
) -> None:
    _, gateway, address, echo = held
    request = storage_pb2.GetNamespaceRequest(volume_id="v")
    with pytest.raises(UnavailableError) as caught:
        async with gateway.channel(address, "s", "target") as channel:
            await StorageStub(channel).GetNamespace(request, timeout=0.2)
    assert caught.value.reason == "peer.deadline_exceeded"
    assert echo.calls == 0


async def test_a_call_that_is_cancelled_while_it_waits_leaves_the_others(
    held: tuple[Held, Any, str, Echo],
) -> None:
    keys, gateway, address, echo = held
    first, second = (asyncio.ensure_future(ask(gateway, address)) for _ in "12")
    await asyncio.wait_for(keys.arrived.wait(), PATIENCE_SECONDS)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    keys.released.set()
    assert await asyncio.wait_for(second, PATIENCE_SECONDS) == "x"
    assert echo.calls == 1


async def test_a_call_that_is_cancelled_is_cancelled_at_the_server() -> None:
    world = World()
    echo = Echo(held=asyncio.Event())
    async with world.stop:
        address = await world.serve(await world.identity("target", "s"), echo)
        gateway = await world.identity("gateway", "g")

        async def wait_for_ever() -> None:
            async with gateway.channel(address, "s", "target") as channel:
                request = storage_pb2.GetNamespaceRequest(volume_id="held")
                await StorageStub(channel).GetNamespace(request)

        call = asyncio.ensure_future(wait_for_ever())
        assert echo.held is not None
        await asyncio.wait_for(echo.held.wait(), PATIENCE_SECONDS)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(echo.cancelled.wait(), PATIENCE_SECONDS)
