"""The etcd store beyond the contract: lost answers, fencing, failover, rollback, TLS."""

import asyncio
import dataclasses
import datetime as dt
import ipaddress
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from brokers import Count, start_broker
from etcd_server import Cluster, etcd_cluster
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store import etcd as module
from sealane.daemon.broker.store import etcd_cluster as calls
from sealane.daemon.broker.store.contract import Change, Compare
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.etcd import rpc_pb2, rpc_pb2_grpc

Call = Callable[..., Awaitable[Any]]


async def opened(cluster: Cluster, *, prefix: str = "/p/", writer: str = "w") -> EtcdStore:
    return await EtcdStore.open(cluster.endpoints, writer=writer, credentials=None, prefix=prefix)


@pytest.fixture
async def store(etcd: Cluster) -> AsyncIterator[EtcdStore]:
    made = await opened(etcd, prefix=f"/{uuid.uuid4()}/")
    yield made
    await made.close()


def lost() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="lost"
    )


def intercept(store: EtcdStore, wrap: Callable[[Call], Call]) -> None:
    """Wrap the transactions that the store sends."""
    members = store._cluster._members
    members[:] = [dataclasses.replace(m, txn=wrap(m.txn)) for m in members]


class Faults:
    """Loses the first transactions: "request" isn't executed, "answer" is, "late" is, but later.

    "held" is like "late", but the loss isn't noticed until `noticed` is set.
    """

    def __init__(self, *kinds: str) -> None:
        self.kinds = [*kinds]
        self.sent = asyncio.Event()
        self.noticed = asyncio.Event()
        self.late: list[Callable[[], Awaitable[Any]]] = []

    def __call__(self, call: Call) -> Call:
        async def faulty(request: Any, **keywords: Any) -> Any:
            kind = self.kinds.pop(0) if self.kinds else ""
            if kind in {"late", "held"}:
                self.late.append(lambda: call(request, **keywords))
                self.sent.set()
            if kind == "held":
                await self.noticed.wait()
                raise lost()
            if kind in {"request", "late"}:
                raise lost()
            answer = await call(request, **keywords)
            if kind == "answer":
                raise lost()
            return answer

        return faulty


@pytest.mark.parametrize(
    "kinds",
    [
        ["request"],
        ["answer"],
        ["late"],
        ["answer", "request"],
        ["answer", "answer"],
        ["late", "answer"],
        ["late", "late"],
        ["request", "late", "answer"],
        ["late", "", "late", "answer"],
    ],
)
async def test_commit_whose_answer_is_lost_is_executed_exactly_once(
    store: EtcdStore, kinds: list[str]
) -> None:
    await store.commit(puts={"a": b"before"})
    entry = await store.get("a")
    assert entry is not None
    faults = Faults(*kinds)
    intercept(store, faults)
    revision = await store.commit([Compare("a", entry.revision)], {"a": b"after"})
    assert revision is not None
    assert await store.get("a") == dataclasses.replace(entry, value=b"after", revision=revision)
    for late in faults.late:
        # A delayed transaction must fail, whoever changed the key since.
        assert not (await late()).succeeded
    assert await store.commit(puts={"b": b""}) is not None


async def test_lost_answer_of_a_conflict_is_a_conflict(store: EtcdStore) -> None:
    await store.commit(puts={"a": b"1"})
    for kind in ("request", "answer", "late"):
        intercept(store, Faults(kind))
        assert await store.commit([Compare("a", 0)], {"a": b"2"}) is None


async def test_outcome_that_nobody_can_tell_is_said(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALL_SECONDS", 0.2)
    faults = Faults("answer", *["request"] * 1000)
    intercept(store, faults)

    async def dark(request: Any, **keywords: Any) -> Any:
        raise lost()

    members = store._cluster._members
    kept = [*members]
    members[:] = [dataclasses.replace(m, range=dark) for m in members]
    monkeypatch.setattr(calls, "CALL_SECONDS", 0.1)
    with pytest.raises(UnavailableError) as caught:
        await store.commit(puts={"a": b"1"})
    assert caught.value.reason == "broker.store.outcome_unknown"
    members[:] = kept
    faults.kinds.clear()
    entry = await store.get("a")
    assert entry is not None
    assert await store.commit([Compare("a", entry.revision)], {"a": b"2"}) is not None


async def test_cancelled_commit_leaves_its_slot_usable(store: EtcdStore) -> None:
    hanging = asyncio.Event()

    def wrap(call: Call) -> Call:
        async def hang(request: Any, **keywords: Any) -> Any:
            answer = await call(request, **keywords)
            await hanging.wait()
            return answer

        return hang

    kept = [*store._cluster._members]
    intercept(store, wrap)
    for _ in range(3 * module.SLOTS):
        task = asyncio.ensure_future(store.commit(puts={"a": b""}))
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
    store._cluster._members[:] = kept
    async with asyncio.timeout(PATIENCE_SECONDS):
        for i in range(2 * module.SLOTS):
            assert await store.commit(puts={f"k{i}": b""}) is not None


async def test_newer_process_fences_the_older_one(etcd: Cluster) -> None:
    prefix = f"/{uuid.uuid4()}/"
    older = await opened(etcd, prefix=prefix)
    await older.commit(puts={"a": b"1"})
    faults = Faults("held")
    intercept(older, faults)
    pending = asyncio.ensure_future(older.commit(puts={"a": b"late"}))
    await faults.sent.wait()
    newer = await opened(etcd, prefix=prefix)
    await newer.commit(puts={"a": b"2"})
    assert not (await faults.late[0]()).succeeded
    faults.noticed.set()
    with pytest.raises(UnavailableError) as caught:
        await pending
    assert caught.value.reason == "broker.store.fenced"
    for call in (older.commit(puts={"a": b"3"}), older.get("a"), older.revision()):
        with pytest.raises(UnavailableError):
            await call
    other = await opened(etcd, prefix=prefix, writer="another")
    assert await newer.commit(puts={"a": b"4"}) is not None
    assert await other.commit(puts={"a": b"5"}) is not None
    for each in (older, newer, other):
        await each.close()


async def test_watch_of_compacted_history_says_so(store: EtcdStore, etcd: Cluster) -> None:
    first = await store.commit(puts={"a": b"1"})
    last = await store.commit(puts={"a": b"2"})
    assert first is not None
    assert last is not None
    async with grpc.aio.insecure_channel(etcd.endpoints[0]) as channel:
        await rpc_pb2_grpc.KVStub(channel).Compact(rpc_pb2.CompactionRequest(revision=last))
    with pytest.raises(UnavailableError) as caught:
        await anext(store.watch("a", from_revision=first))
    assert caught.value.reason == "broker.store.compacted"
    assert (await anext(store.watch("a", from_revision=last)))[0].value == b"2"


async def test_page_survives_a_compaction_in_its_middle(store: EtcdStore, etcd: Cluster) -> None:
    for start in range(0, 300, 50):
        await store.commit(puts={f"k{i:03}": b"" for i in range(start, start + 50)})
    member = store._cluster._members[0]
    pages = 0

    async def read(request: rpc_pb2.RangeRequest, **keywords: Any) -> Any:
        nonlocal pages
        pages += 1
        if pages == 2:
            await store.commit(puts={"k299": b"new"})
            async with grpc.aio.insecure_channel(etcd.endpoints[0]) as channel:
                stub = rpc_pb2_grpc.KVStub(channel)
                revision = (await stub.Range(rpc_pb2.RangeRequest(key=b"-"))).header.revision
                await stub.Compact(rpc_pb2.CompactionRequest(revision=revision))
        return await member.range(request, **keywords)

    store._cluster._members[0] = dataclasses.replace(member, range=read)
    page = await store.range("k")
    assert [e.key for e in page.entries] == [f"k{i:03}" for i in range(300)]
    assert page.entries[-1].value == b"new"


async def test_unreachable_cluster_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALL_SECONDS", 0.3)
    with pytest.raises(UnavailableError) as caught:
        await EtcdStore.open(["127.0.0.1:1", "127.0.0.1:2"], writer="w", credentials=None)
    assert caught.value.reason == "broker.store.timeout"


async def test_cluster_that_lost_a_member_goes_on_and_watches_miss_nothing() -> None:
    with etcd_cluster(3) as cluster:
        store = await opened(cluster)
        start = await store.revision() + 1
        seen: list[Change] = []

        async def follow() -> None:
            async for commit in store.watch("k", from_revision=start):
                seen.extend(commit)
                if commit[-1].key == "k/end":
                    return

        following = asyncio.ensure_future(follow())
        wanted = []
        async with asyncio.timeout(90):
            for round_ in range(3):
                for i in range(10):
                    wanted.append(f"k/{round_}/{i}")
                    assert await store.commit(puts={wanted[-1]: b""}) is not None
                # Alternately the member that calls go to, and its leader.
                victim = next(
                    m for m in cluster.members if m.client == store._cluster.member.endpoint
                )
                victim.kill()
                for i in range(10, 20):
                    wanted.append(f"k/{round_}/{i}")
                    assert await store.commit(puts={wanted[-1]: b""}) is not None
                victim.start()
                await asyncio.to_thread(victim.wait_listening)
            await store.commit(puts={"k/end": b""})
            await following
        assert [change.key for change in seen] == [*wanted, "k/end"]
        await store.close()


async def test_put_back_cluster_is_refused_by_who_was_connected() -> None:
    with etcd_cluster() as cluster:
        first, second = await opened(cluster, writer="1"), await opened(cluster, writer="2")
        await first.commit(puts={"a": b"1"})
        cluster.stop()
        cluster.save("old")
        cluster.start()
        await first.commit(puts={"a": b"2"})
        await second.commit(puts={"b": b"2"})
        cluster.stop()
        cluster.put_back("old")
        cluster.start()
        for store in (first, second):
            with pytest.raises(VerificationError) as caught:
                await store.get("a")
            assert caught.value.reason == "broker.store.rolled_back"
            # It stays refused even after the cluster has caught up.
            with pytest.raises(VerificationError):
                await store.commit(puts={"a": b"3"})
            await store.close()


async def test_cluster_without_our_slots_is_refused(etcd: Cluster) -> None:
    """As after a restore to before this broker's first start: its slots are missing."""
    prefix = f"/{uuid.uuid4()}/"
    store = await opened(etcd, prefix=prefix)
    other = await opened(etcd, prefix=prefix, writer="another")
    await store.commit(puts={"a": b"1"})
    deletions = [
        rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=slot.key))
        for slot in store._slots
    ]
    await other._cluster.txn(rpc_pb2.TxnRequest(success=deletions))
    with pytest.raises(VerificationError) as caught:
        await store.commit(puts={"a": b"2"})
    assert caught.value.reason == "broker.store.rolled_back"
    await store.close()
    await other.close()


async def test_another_cluster_in_place_of_ours_is_refused(etcd: Cluster) -> None:
    with etcd_cluster() as other:
        store = await opened(other)
        foreign = await opened(etcd)
        while await foreign.revision() <= await store.revision():
            await foreign.commit(puts={"a": b""})
        store._cluster._members[:] = foreign._cluster._members
        with pytest.raises(VerificationError) as caught:
            await store.get("a")
        assert caught.value.reason == "broker.store.rolled_back"
        await foreign.close()


async def test_broker_whose_place_was_taken_ends(etcd: Cluster) -> None:
    starts, heads = Count(), Count()
    stores = [await opened(etcd, prefix=(prefix := f"/{uuid.uuid4()}/"))]
    _, older, older_registry = await start_broker(stores[0], starts=starts, heads=heads)
    stores.append(await opened(etcd, prefix=prefix))
    _, _, registry = await start_broker(stores[1], starts=starts, heads=heads)
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises((UnavailableError, VerificationError)) as caught:
            await older.keep_anchored(seconds=0)
    assert caught.value.reason in {"broker.store.fenced", "broker.store.rolled_back"}
    with pytest.raises(UnavailableError) as fenced:
        await stores[0].commit(puts={"a": b""})
    assert fenced.value.reason == "broker.store.fenced"
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(UnavailableError) as caught_again:
            await older.keep_anchored(seconds=0)
    assert caught_again.value.reason == "broker.store.fenced"
    await older_registry.close()
    await registry.close()


async def test_put_back_cluster_that_others_drove_on_is_refused_at_the_next_commit() -> None:
    with etcd_cluster() as cluster:
        ours = await opened(cluster, writer="1")
        await ours.commit(puts={"a": b"1"})
        cluster.stop()
        cluster.save("old")
        cluster.start()
        await ours.commit(puts={"a": b"2"})
        cluster.stop()
        cluster.put_back("old")
        cluster.start()
        other = await opened(cluster, writer="2")
        for i in range(20):
            await other.commit(puts={"b": b"%d" % i})
        entry = await ours.get("a")
        assert entry is not None
        # A read can't detect it: the revision is newer than the last known one.
        assert entry.value == b"1"
        # Detected at the latest when it uses a slot that it had changed since.
        with pytest.raises((UnavailableError, VerificationError)) as caught:
            await asyncio.gather(*(ours.commit(puts={"a": b"3"}) for _ in range(module.SLOTS)))
        assert caught.value.reason == "broker.store.rolled_back"
        await ours.close()
        await other.close()


async def test_brokers_of_one_cluster_each_notice_that_it_was_put_back() -> None:
    counters = {i: (Count(), Count()) for i in (1, 2)}

    async def start(cluster: Cluster, which: int) -> Registry:
        store = await opened(cluster, writer=f"{which:05}")
        starts, heads = counters[which]
        try:
            _, _, registry = await start_broker(
                store, starts=starts, heads=heads, node=f"b{which}", instance=which
            )
        except BaseException:
            await store.close()
            raise
        return registry

    with etcd_cluster() as cluster:
        await (await start(cluster, 1)).close()
        cluster.stop()
        cluster.save("old")
        cluster.start()
        registries = [await start(cluster, 1), await start(cluster, 2)]
        for registry in registries:
            await registry.close()
        cluster.stop()
        cluster.put_back("old")
        cluster.start()
        served = {i: starts.value for i, (starts, _) in counters.items()}
        for which in (2, 1, 2):
            with pytest.raises(VerificationError) as caught:
                await start(cluster, which)
            assert caught.value.reason == "broker.store.rolled_back"
        assert {i: starts.value for i, (starts, _) in counters.items()} == served
        # A broker that can't detect it goes on, and grants under its own instance.
        counters[3] = (Count(), Count())
        await (await start(cluster, 3)).close()


def _certificates(directory: Path, hosts: Iterable[str]) -> tuple[Path, Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd of a test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    paths = directory / "ca.pem", directory / "cert.pem", directory / "key.pem"
    for path in paths[:2]:
        path.write_bytes(certificate.public_bytes(pem))
    paths[2].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


async def test_mutual_tls_to_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = addresses_of_our_own(2)
    hosts = [address.rpartition(":")[0] for address in addresses]
    ca, certificate, key = _certificates(tmp_path, hosts)
    options = (
        *("--cert-file", str(certificate), "--key-file", str(key)),
        *("--client-cert-auth", "--trusted-ca-file", str(ca)),
    )
    with etcd_cluster(options=options, addresses=addresses) as cluster:
        ours = grpc.ssl_channel_credentials(
            ca.read_bytes(), key.read_bytes(), certificate.read_bytes()
        )
        store = await EtcdStore.open(cluster.endpoints, writer="w", credentials=ours)
        assert await store.commit(puts={"a": b""}) is not None
        await store.close()
        monkeypatch.setattr(calls, "CALL_SECONDS", 0.3)
        for others in (grpc.ssl_channel_credentials(ca.read_bytes()), None):
            with pytest.raises(UnavailableError):
                await EtcdStore.open(cluster.endpoints, writer="w", credentials=others)
