"""A volume shared by gateways of two tenants: real daemons, and a gateway that breaks the rules."""

import asyncio
import contextlib
import json
import struct
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from attached_hosts import host_at, host_of, new_secret
from attacks.disk import read_slot
from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from permits import own_authorized
from sealane.client import Volume, connect
from sealane.crypto.lease import CounterRange
from sealane.daemon.gateway.back_ends import Via, VolumeBackEnds
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.gateway.filling import volume_key
from sealane.daemon.gateway.supply import released_keys
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.third_party import ThirdPartyStores
from sealane.errors import Error, UsageError, VerificationError
from sealane.protocol.nvme.constants import Status
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import broker_pb2
from sealane.transport.nvme.initiator import HostController, NvmeStatusError
from sealane.transport.nvme.volume_queue import VolumeQueue
from trust.insider import Insider, insider

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:44444444-2222-4333-8444-555555555555"
MIB = 1 << 20
AUTHORIZATION_SECONDS = 3
# Tolerated delay on a loaded machine, for the bound and for polling for a new key epoch.
ENDS_WITHIN_SECONDS = 40.0
WRITE_PROTECTED = 0x20
PATTERNS = [bytes([n]) * 4096 for n in range(256)]


@dataclass
class Cluster:
    """Broker, target, and a gateway of each of the tenants `t` and `u`."""

    site: Site
    broker: Daemon
    target: Daemon
    owner: Daemon
    guest: Daemon

    @contextlib.asynccontextmanager
    async def volume(self) -> AsyncIterator[Volume]:
        """Yield a volume of the owner, written once and detached."""
        async with connect(self.owner.socket) as client:
            volume = await client.volumes.create(size_bytes=MIB)
            attached = await client.volumes.attach(volume.name, host_nqn=HOST)
            async with client.open(attached) as disk:
                await disk.write(0, PATTERNS[1])
                await disk.flush()
            await client.volumes.detach(volume.name)
            yield volume
            with contextlib.suppress(Error):
                await client.volumes.detach(volume.name)
            await client.volumes.delete(volume.name)

    def stored(self, volume: Volume, lba: int) -> bytes:
        """Return a stored block of the target's drive."""
        path = self.site.root / "s" / "volumes" / f"{volume.name.removeprefix('volumes/')}.sectors"
        return read_slot(path, lba).block

    def audit(self) -> list[dict[str, object]]:
        """Return the broker's audit log."""
        log = (self.site.root / "broker" / "audit.jsonl").read_text()
        return [json.loads(line) for line in log.splitlines()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root, tenants={"h": "u", "x": "u", "y": "v"})
        site.write_policy(
            {
                "s": ["target"],
                "g": ["gateway"],
                "h": ["gateway"],
                "x": ["gateway"],
                "y": ["gateway"],
            }
        )
        broker = stack.enter_context(daemon(site.broker_config()))
        target = stack.enter_context(
            daemon(
                site.write_config(
                    "s",
                    site.enrolment("s", broker)
                    + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
                    + f'store = "inline"\nauthorization_seconds = {AUTHORIZATION_SECONDS}\n',
                )
            )
        )

        def gateway(name: str) -> Daemon:
            return stack.enter_context(
                daemon(
                    site.write_config(
                        name,
                        site.enrolment(name, broker)
                        + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                        + f'target_address = "{target.addresses["target_control"]}"\n',
                    )
                )
            )

        yield Cluster(site, broker, target, gateway("g"), gateway("h"))


def _id(volume: Volume) -> str:
    return volume.name.removeprefix("volumes/")


def _ctl(node: Daemon, *arguments: str) -> dict[str, object]:
    ended = sealanectl("--socket", node.socket, "--output", "json", "volume", *arguments)
    assert ended.returncode == 0, ended.stderr
    shown: dict[str, object] = json.loads(ended.stdout)
    return shown


@contextlib.asynccontextmanager
async def _host(volume: Volume) -> AsyncIterator[HostController]:
    async with host_at(volume, HOST) as host:
        await host.request_queues(1)
        yield host


async def _queue(host: HostController) -> VolumeQueue:
    """Open an I/O queue as hosts do: retry while the gateway is still connecting to the target."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await host.open_queue(1)
            except NvmeStatusError as error:
                if error.status != Status.CONNECT_BUSY:
                    raise


async def _write_on(queue: VolumeQueue) -> None:
    while True:
        await queue.write(1, PATTERNS[5])


async def _read(queue: VolumeQueue, lba: int) -> bytes:
    into = bytearray(4096)
    await queue.read(lba, into)
    return bytes(into)


async def test_another_tenant_reads_what_is_shared_and_nothing_else(cluster: Cluster) -> None:
    async with cluster.volume() as volume, connect(cluster.guest.socket) as guest:
        for _ in range(2):
            # Before and after the share, the volume doesn't exist for the guest.
            with pytest.raises(UsageError) as caught:
                await guest.volumes.get(volume.name)
            assert caught.value.reason == "volume.not_found"
            assert not await guest.volumes.list()
            with pytest.raises(UsageError):
                await guest.volumes.attach(volume.name, host_nqn=HOST)
            shown = await asyncio.to_thread(
                _ctl, cluster.owner, "share", volume.name, "--tenant", "u", "--read-only"
            )
            assert shown["shares"] == [{"tenant": "u", "is_read_only": True}]
            # A tenant doesn't learn which others the volume is shared with.
            await asyncio.to_thread(_ctl, cluster.owner, "share", volume.name, "--tenant", "v")
            (seen,) = await guest.volumes.list()
            assert (seen.name, seen.tenant, seen.is_read_only) == (volume.name, "t", True)
            assert [share.tenant for share in seen.shares] == ["u"]
            attached = await guest.volumes.attach(volume.name, host_nqn=HOST)
            async with _host(attached) as host:
                queue = await _queue(host)
                assert await _read(queue, 0) == PATTERNS[1]
                with pytest.raises(NvmeStatusError) as refused:
                    await queue.write(0, PATTERNS[2])
                assert refused.value.status == WRITE_PROTECTED
                await queue.close()
            assert (await guest.volumes.get(volume.name)).attachment is not None
            await guest.volumes.detach(volume.name)
            with pytest.raises(VerificationError):
                await guest.volumes.delete(volume.name)
            for tenant in ("u", "v"):
                await asyncio.to_thread(
                    _ctl, cluster.owner, "unshare", volume.name, "--tenant", tenant
                )
    kinds = [(r["kind"], r["outcome"]) for r in cluster.audit() if _id(volume) in str(r)]
    assert kinds.count(("volume.share", "done")) == kinds.count(("volume.unshare", "done")) == 4
    assert ("key.release", "refused") not in kinds, "the descriptor was refused already"


@contextlib.asynccontextmanager
async def _attached_by(
    member: Insider, cluster: Cluster, volume: Volume, *, asks_read_only: bool
) -> AsyncIterator[HostController]:
    """Yield a guest's gateway that lets its host write, with invented IVs."""
    descriptor = await member.broker.descriptor(_id(volume))
    back_ends = VolumeBackEnds(
        Targets({"s": cluster.target.addresses["target_control"]}, identity=member.identity),
        identity=member.identity,
        broker=member.broker,
        devices=member.devices,
        third_parties=ThirdPartyStores(
            [], host_nqn=gateway_nqn("x"), directory=Path("/unused"), authorized=own_authorized
        ),
    )
    back_end = await back_ends.open(descriptor, via=Via(), read_only=asks_read_only)
    gateway = Gateway(traddr="127.0.0.1", trsvcid=0)
    await gateway.start()
    invented = CounterRange(
        broker_instance=9, start_epoch=9, counter_start=1 << 40, counter_end=1 << 41
    )
    try:
        async with released_keys(member.broker, descriptor) as keys:
            attached = await gateway.attach(
                volume_key(descriptor, keys),
                counters=[invented],
                secret=new_secret(),
                host_nqn=HOST,
                open_queue=back_end.open_queue,
                epoch_floor=back_end.epoch_floor,
            )
        async with host_of(attached, HOST) as host:
            await host.request_queues(1)
            yield host
    finally:
        await gateway.stop()


async def test_the_target_keeps_a_reader_from_writing_whatever_its_gateway_does(
    cluster: Cluster,
) -> None:
    async with cluster.volume() as volume, connect(cluster.owner.socket) as owner:
        await owner.volumes.share(volume.name, tenant="u", read_only=True)
        before = cluster.stored(volume, 0)
        async with insider(cluster.site, cluster.broker, node="x") as member:
            with pytest.raises(VerificationError) as caught:
                await member.broker.lease(await member.broker.descriptor(_id(volume)))
            assert caught.value.reason == "volume.read_only"
            async with _attached_by(member, cluster, volume, asks_read_only=True) as host:
                queue = await _queue(host)
                assert await _read(queue, 0) == PATTERNS[1]
                with pytest.raises(NvmeStatusError) as refused:
                    await queue.write(0, PATTERNS[2])
                assert refused.value.status == WRITE_PROTECTED
                assert await _read(queue, 0) == PATTERNS[1]
                await queue.close()
            # It gets no queue that would permit writes, either.
            with pytest.raises(Error):
                async with _attached_by(member, cluster, volume, asks_read_only=False) as host:
                    await host.open_queue(1)
        assert cluster.stored(volume, 0) == before
    refusals = [r for r in cluster.audit() if r["reason"] == "volume.read_only"]
    assert [(r["kind"], r["outcome"]) for r in refusals] == [("lease.grant", "refused")]


async def test_unsharing_ends_access_and_the_old_key_opens_nothing_written_since(
    cluster: Cluster,
) -> None:
    async with (
        cluster.volume() as volume,
        connect(cluster.owner.socket) as owner,
        connect(cluster.guest.socket) as guest,
        insider(cluster.site, cluster.broker, node="x") as member,
    ):
        await owner.volumes.share(volume.name, tenant="u")
        mine = await owner.volumes.attach(volume.name, host_nqn=HOST)
        theirs = await guest.volumes.attach(volume.name, host_nqn=HOST)
        descriptor = await member.broker.descriptor(_id(volume))
        old_key = bytes(await member.broker.key(descriptor, key_epoch=1))
        async with _host(mine) as own_host, _host(theirs) as guest_host:
            own_queue, guest_queue = await _queue(own_host), await _queue(guest_host)
            await guest_queue.write(1, PATTERNS[3])
            assert await _read(own_queue, 1) == PATTERNS[3]
            await owner.volumes.unshare(volume.name, tenant="u")
            await own_queue.write(2, PATTERNS[4])
            await own_queue.flush()
            with pytest.raises(Error):
                await asyncio.wait_for(_write_on(guest_queue), ENDS_WITHIN_SECONDS)
            # The owner's host wasn't affected.
            assert await _read(own_queue, 2) == PATTERNS[4]
            await own_queue.close()
            with contextlib.suppress(Error, OSError):
                await guest_queue.close()
        for call in (
            member.broker.key(descriptor, key_epoch=1),
            member.broker.key(descriptor, key_epoch=2),
            member.broker.lease(descriptor),
        ):
            with pytest.raises(UsageError) as caught:
                await call
            assert caught.value.reason == "volume.not_found"
        assert _opens(cluster.stored(volume, 0), old_key, descriptor, 0) == PATTERNS[1]
        with pytest.raises(InvalidTag):
            _opens(cluster.stored(volume, 2), old_key, descriptor, 2)
        await guest.volumes.detach(volume.name)


def _opens(block: bytes, key: bytes, descriptor: broker_pb2.VolumeDescriptor, lba: int) -> bytes:
    """Try to open a stored sector (secure-queue.md §1) with the key of any epoch."""
    data, tag, iv = block[:4096], block[4096:4112], block[4112:4124]
    (key_epoch,) = struct.unpack_from("<I", block, 4096 + 44)
    volume_id = uuid.UUID(descriptor.volume_id).bytes
    aad = bytes([1]) + volume_id + struct.pack("<IQI", descriptor.generation, lba, key_epoch)
    return AESGCM(key).decrypt(iv, data + tag, aad)


async def test_a_stranger_hears_the_same_of_every_volume(cluster: Cluster) -> None:
    async with cluster.volume() as volume, connect(cluster.owner.socket) as owner:
        await owner.volumes.share(volume.name, tenant="u")
        async with insider(cluster.site, cluster.broker, node="y") as stranger:
            heard = []
            for volume_id in (_id(volume), str(uuid.uuid4())):
                descriptor = broker_pb2.VolumeDescriptor(volume_id=volume_id, key_epoch=1)
                for call in (
                    stranger.broker.descriptor(volume_id),
                    stranger.broker.key(descriptor, key_epoch=1),
                    stranger.broker.lease(descriptor),
                    stranger.broker.share(volume_id, tenant="v", read_only=False),
                    stranger.broker.unshare(volume_id, tenant="u"),
                    stranger.broker.unregister(volume_id),
                ):
                    with pytest.raises(UsageError) as caught:
                        await call
                    heard.append(str(caught.value).replace(volume_id, "ID"))
            assert len(set(heard)) == 1


async def test_what_a_guest_may_not_do_is_refused_and_recorded(cluster: Cluster) -> None:
    async with cluster.volume() as volume, connect(cluster.owner.socket) as owner:
        await owner.volumes.share(volume.name, tenant="u")
        async with insider(cluster.site, cluster.broker, node="x") as member:
            for call in (
                member.broker.share(_id(volume), tenant="v", read_only=False),
                member.broker.unshare(_id(volume), tenant="u"),
                member.broker.unregister(_id(volume)),
                member.broker.finish_filling(_id(volume)),
            ):
                with pytest.raises(VerificationError) as caught:
                    await call
                assert caught.value.reason == "volume.tenant.refused"
        kinds = {r["kind"] for r in cluster.audit() if r["reason"] == "volume.tenant.refused"}
        assert kinds >= {"volume.share", "volume.unshare", "volume.unregister"}
        assert (await owner.volumes.get(volume.name)).shares
