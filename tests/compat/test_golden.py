"""This release reads what an earlier one wrote: the files of `golden`, which stay as they are."""

import asyncio
import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from compat.golden_cluster import ANCHORS, SECTORS, WIRES, WRITTEN, content, running, unpack
from compat.golden_wires import wires
from control_plane import short_directory
from patience import PATIENCE_SECONDS
from sealane.client import Client, Volume, connect
from sealane.crypto.audit import verify_log
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.device.anchors.counter import FileCounter
from sealane.daemon.device.anchors.file_anchor import FileAnchor
from sealane.daemon.device.catalogue import Catalogue
from sealane.daemon.device.directory import parse_device
from sealane.daemon.gateway.attachments import AttachmentFiles
from sealane.daemon.runtime.state_format import check_format
from sealane.protocol.v1 import broker_pb2
from trust.test_revocation import HOST, host_of


@pytest.fixture(params=ANCHORS)
def store(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def root(store: str) -> Iterator[Path]:
    with short_directory() as made:
        unpack(store, made)
        yield made


def test_what_is_agreed_on_the_wire_is_what_earlier_releases_agree_on() -> None:
    assert wires() == json.loads(WIRES.read_text())


async def test_the_broker_s_files_are_read(root: Path) -> None:
    broker = root / "broker"
    check_format(broker)
    database = SqliteStore(broker / "broker.sqlite")
    try:
        assert len((await database.range("volumes/")).entries) == 1
    finally:
        await database.close()
    assert FileCounter(broker / "starts.counter").read() == 1
    assert FileCounter(broker / "heads.counter").read() > 0
    anchor = x509.load_pem_x509_certificate((broker / "trust-anchor.pem").read_bytes())
    signer = anchor.public_key()
    assert isinstance(signer, ec.EllipticCurvePublicKey)
    lines = (broker / "audit.jsonl").read_bytes().splitlines()
    assert verify_log(lines, signer=signer).head.sequence == len(lines) > 0


async def test_the_target_s_files_are_read(root: Path, store: str) -> None:
    volumes = root / "s" / "volumes"
    device_id, openings = parse_device((volumes / "device").read_bytes(), source="device")
    assert openings == 1
    found = Catalogue(volumes).scan()
    assert found.strays == []
    [(volume_id, encoded)] = found.volumes
    signed = broker_pb2.SignedVolumeDescriptor.FromString(encoded)
    descriptor = broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
    assert (UUID(descriptor.volume_id), descriptor.sector_count) == (volume_id, SECTORS)
    if ANCHORS[store] == "file":
        anchor = FileAnchor.open(root / "s" / "anchors" / str(device_id), device_id=device_id)
        assert len(anchor.records) == 2
        anchor.release()


async def test_the_gateway_s_attachment_is_read(root: Path) -> None:
    files = AttachmentFiles(root / "g", root)
    [kept] = await files.load()
    assert kept.volume_id in json.loads((root / "volume.json").read_text())["name"]
    assert files.refused == {}


@pytest.mark.slow
async def test_daemons_start_on_it_and_the_host_reads_what_it_wrote(store: str) -> None:
    with short_directory() as root:
        site = unpack(store, root)
        archived = json.loads((root / "volume.json").read_text())
        written = dt.datetime.fromtimestamp((root / "volume.json").stat().st_mtime, dt.UTC)
        if dt.datetime.now(dt.UTC) < written:
            pytest.skip("this machine's clock is behind the certificates of the archive")
        async with running(site, store=store) as socket, connect(socket) as client:
            volume = await attached_again(client, archived["name"])
            assert volume.attachment is not None
            assert (volume.display_name, volume.attachment.host_nqn) == ("golden", HOST)
            # Only the host knows its secret, apart from the sealed attachment.
            attachment = replace(volume.attachment, dhchap_secret=archived["secret"])
            async with host_of(replace(volume, attachment=attachment)) as host:
                queue = await host.open_queue(1)
                for lba in range(SECTORS):
                    found = bytearray(4096)
                    await queue.read(lba, found)
                    assert found == (content(lba) if lba in WRITTEN else bytes(4096))
                await queue.write(7, content(7), is_forced=True)
                await queue.close()


async def attached_again(client: Client, name: str) -> Volume:
    """Return the volume once its gateway serves it as before."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            volume = await client.volumes.get(name)
            if volume.state == "attached":
                return volume
            await asyncio.sleep(0.05)
