"""Replacement of the brokers' authority with real daemons: hosts notice nothing."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from control_plane import Daemon, Site, daemon, sealanectl
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own
from sealane.client import Client, Volume, connect
from sealane.crypto.anchors import digest
from sealane.crypto.certificates import Subject, server_name
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import UnavailableError
from sealane.protocol.v1 import trust_pb2
from sealane.protocol.v1.trust_pb2_grpc import TrustStub
from trust.test_device_daemons import MIB, World, world
from trust.test_revocation import HOST, Load

__all__ = ["world"]

pytestmark = pytest.mark.slow

USAGE = 2
ANCHOR = "trust-anchor.pem"


def _authority(broker: Daemon, *arguments: str, fails_with: str = "") -> Any:
    ended = sealanectl("--socket", broker.socket, "--output", "json", "authority", *arguments)
    if fails_with:
        assert (ended.returncode, fails_with in ended.stderr) == (USAGE, True), ended.stderr
        return ended.stderr
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


async def _until_nodes(broker: Daemon, wanted: Callable[[list[Any]], bool]) -> Any:
    """Wait until the nodes that lag are as wanted."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        shown = await asyncio.to_thread(_authority, broker, "status")
        if wanted(shown["nodes"]):
            return shown
        assert time.monotonic() < end, shown["nodes"]
        await asyncio.sleep(0.3)


async def _created(client: Client) -> Volume:
    """Create a volume once the gateway's channel has reached the restarted target."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await client.volumes.create(size_bytes=MIB)
        except UnavailableError:
            assert time.monotonic() < end
            await asyncio.sleep(0.3)


def _is_empty(nodes: list[Any]) -> bool:
    return not nodes


async def test_hosts_notice_nothing_and_a_killed_broker_goes_on(world: World) -> None:
    site = world.site
    listen, attestation = addresses_of_our_own(2)
    config = site.broker_config(listen=listen)
    text = config.read_text()
    config.write_text(
        text.replace(
            f'attestation_listen = "{listen.rpartition(":")[0]}:0"',
            f'attestation_listen = "{attestation}"',
        )
    )
    async with contextlib.AsyncExitStack() as stack:
        world.broker = stack.enter_context(daemon(config))
        anchor = site.root / "broker" / ANCHOR
        first = site.root / "first.pem"
        shutil.copy(anchor, first)
        # The nodes keep the file that they were set up with.
        own = site.root / "own.pem"
        shutil.copy(anchor, own)

        def set_up(path: Path) -> Path:
            path.write_text(path.read_text().replace(str(anchor), str(own)))
            return path

        away = set_up(world.target_config("s2", directory=str(site.root / "stores2")))
        with daemon(away):
            pass
        target_path = set_up(world.target_config())
        data, control = addresses_of_our_own(2)
        target_path.write_text(
            target_path.read_text()
            .replace('[target]\nlisten = "127.0.0.1:0"', f'[target]\nlisten = "{data}"')
            .replace('control_listen = "127.0.0.1:0"', f'control_listen = "{control}"')
        )
        target = stack.enter_context(daemon(target_path))
        gateway_config = set_up(
            site.write_config(
                "g",
                site.enrolment("g", world.broker)
                + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                + f'target_address = "{target.addresses["target_control"]}"\n',
            )
        )
        gateway = stack.enter_context(daemon(gateway_config))
        client = await stack.enter_async_context(connect(gateway.socket))
        volume = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        load = Load()
        running = tasks.create_task(load.run(volume))
        await load.goes_on()

        async def restarted() -> None:
            world.broker.kill()
            world.broker = stack.enter_context(daemon(config))
            await load.goes_on()

        before = await asyncio.to_thread(_authority, world.broker, "status")
        assert (before["stage"], before["other"]) == ("", "")
        _authority(world.broker, "switch", "--yes", fails_with="authority.stage")
        _authority(world.broker, "announce", fails_with="confirmation.missing")
        announced = await asyncio.to_thread(_authority, world.broker, "announce", "--yes")
        assert (announced["authority"], announced["stage"]) == (before["authority"], "announced")
        assert {each["node"] for each in announced["nodes"]} == {"s", "s2", "g"}
        refused = _authority(world.broker, "switch", "--yes", fails_with="authority.unready")
        assert "target s" in refused
        # Its certificate is still valid, though nothing of it runs.
        revoked = sealanectl("--socket", world.broker.socket, "node", "revoke", "s2", "--yes")
        assert revoked.returncode == 0, revoked.stderr
        await restarted()
        await _until_nodes(world.broker, _is_empty)
        again = await asyncio.to_thread(_authority, world.broker, "announce", "--yes")
        assert again["other"] == announced["other"]

        switched = await asyncio.to_thread(_authority, world.broker, "switch", "--yes")
        assert (switched["authority"], switched["other"]) == (
            announced["other"],
            before["authority"],
        )
        restored = sealanectl("--socket", world.broker.socket, "node", "restore", "s2")
        assert restored.returncode == 0, restored.stderr
        needed = _authority(world.broker, "retire", "--yes", fails_with="authority.needed")
        assert "target s2 (not trusting)" in needed
        await restarted()
        # It was away, and its file has the first authority only.
        stack.enter_context(daemon(away))
        await _until_nodes(world.broker, _is_empty)
        # What an attacker may have got hold of: the store with the old key, while it was there.
        stolen = site.root / "stolen.sqlite"
        shutil.copy(site.root / "broker" / "broker.sqlite", stolen)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(site.root / "broker" / "broker.sqlite-wal", f"{stolen}-wal")

        retired = await asyncio.to_thread(_authority, world.broker, "retire", "--yes")
        assert (retired["stage"], retired["authority"]) == ("retired", switched["authority"])
        await restarted()
        await _until_nodes(world.broker, _is_empty)
        assert own.read_bytes() == first.read_bytes()
        [present] = x509.load_pem_x509_certificates(anchor.read_bytes())
        assert digest(present).hex() == retired["authority"]
        await _attack(stolen, site, world.broker)

        # The target opens volumes whose descriptors the retired authority signed.
        target.kill()
        target = stack.enter_context(daemon(target_path))
        await load.goes_on()
        # A new volume, and nodes that start again with their old file.
        another = await _created(client)
        await client.volumes.delete(another.name)
        await load.goes_on()
        assert load.failure is None
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    verified = sealanectl(
        "audit",
        "verify",
        site.root / "broker" / "audit.jsonl",
        "--chain-only",
        "--anchor",
        site.root / "broker" / "audit-anchors.pem",
    )
    assert verified.returncode == 0, verified.stderr
    stages = [
        r["detail"]["stage"] for r in world.audited("authority.replace") if r["outcome"] == "done"
    ]
    assert stages == ["announced", "switched", "retired"]


async def _attack(stolen: Path, site: Site, broker: Daemon) -> None:
    """A certificate of the retired authority is worth nothing, to brokers or to nodes."""
    store = SqliteStore(stolen)
    registry = await Registry.open(store, WrappingKey(bytes(range(32))), node="broker")
    old = registry.authorities.attesting
    assert old is not registry.authority
    await registry.close()
    key = ec.generate_private_key(ec.SECP256R1())
    subject = Subject(
        node="g", role="gateway", tenant="t", incarnation=bytes(16), kem_public_key=bytes(32)
    )
    leaf = old.issue(subject, key.public_key(), now=utc_now())
    credentials = grpc.ssl_channel_credentials(
        root_certificates=(site.root / "broker" / ANCHOR).read_bytes(),
        private_key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        certificate_chain=leaf.public_bytes(serialization.Encoding.PEM),
    )
    async with grpc.aio.secure_channel(
        broker.addresses["broker"],
        credentials,
        options=[("grpc.ssl_target_name_override", server_name("broker", "broker"))],
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await TrustStub(channel).GetPeer(
                trust_pb2.GetPeerRequest(spiffe_id="spiffe://sealane/target/s"), timeout=5
            )
