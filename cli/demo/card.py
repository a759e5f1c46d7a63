"""The demo's emulated accelerator card: certified here, killed under load."""

import asyncio
import contextlib
import datetime as dt
import hashlib
import random
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

import sealane.client
from sealane.cli.demo.cluster import CARD_LABEL, CardFiles, Cluster, die_with_parent, stop
from sealane.cli.demo.results import CardRun
from sealane.cli.demo.storage import attached, host_queue
from sealane.client import translated
from sealane.crypto.evidence.chain import key_sha256
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import offload_pb2
from sealane.transport.nvme.initiator import VolumeQueue

_IN_USE: Final = offload_pb2.Accelerator.IN_USE
PROGRAM: Final = "sealane-dpu"
START_SECONDS: Final = 60.0
CALL_SECONDS: Final = 10.0
WRITE_BYTES: Final = 1 << 20
WRITES: Final = 64
AT_ONCE: Final = 8
"""Writes that are in flight together."""


def make_card(directory: Path) -> CardFiles:
    """Make a card's key, certified by a new maker; UsageError `demo.card` without the program."""
    program = Path(sys.executable).with_name(PROGRAM)
    if not program.exists():
        raise UsageError(
            "demo.card",
            f"--accelerator: {program} does not exist; make build puts it there, the package has "
            "none",
        )
    directory.mkdir()
    maker, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate("Demo card maker", maker, issuer="Demo card maker", signer=maker)
    leaf = _certificate("Demo card", key, issuer="Demo card maker", signer=maker)
    files = CardFiles(
        program=program,
        socket=directory / "socket",
        key=directory / "card.key",
        certificates=directory / "card.pem",
        roots=directory / "maker.pem",
        hardware_id=f"key-sha256:{key_sha256(leaf).hex()}",
    )
    files.key.write_bytes(key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()))
    files.certificates.write_bytes(leaf.public_bytes(Encoding.PEM))
    files.roots.write_bytes(root.public_bytes(Encoding.PEM))
    return files


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    *,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    now, day = dt.datetime.now(dt.UTC), dt.timedelta(days=1)
    is_maker = key is signer
    usage = x509.KeyUsage(
        digital_signature=not is_maker,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_maker,
        crl_sign=is_maker,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=is_maker, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(signer, hashes.SHA384())
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@contextlib.asynccontextmanager
async def running_card(files: CardFiles) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the card until the end of the block, or until it is killed."""
    process = await asyncio.create_subprocess_exec(
        *(files.program, "--socket", files.socket),
        *("--key", files.key, "--certificates", files.certificates),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        await stop(process)


@dataclass
class _Contents:
    """What the volume must hold: the same bytes again for the same seed."""

    seed: int

    def part(self, number: int) -> bytes:
        return random.Random(f"{self.seed}/{number}").randbytes(WRITE_BYTES)  # noqa: S311 - content

    def digest(self) -> str:
        digest = hashlib.sha256()
        for number in range(WRITES):
            digest.update(self.part(number))
        return digest.hexdigest()


async def run_card(
    cluster: Cluster, files: CardFiles, *, seed: int, advance: Callable[[int], None]
) -> CardRun:
    """Let the card seal writes, kill it in the middle of them, and read everything back."""
    contents = _Contents(seed)
    async with (
        sealane.client.connect(str(cluster.gateway.socket)) as client,
        running_card(files) as card,
    ):
        await _wait_used(client)
        volume = await client.volumes.create(
            display_name="demo-card", size_bytes=WRITES * WRITE_BYTES
        )
        async with attached(client, volume) as here, host_queue(here) as queue:
            # A queue begins with the processor, and gets the card a moment later.
            await _write(queue, contents, range(AT_ONCE), advance)
            await _wait_sealing(client, queue, contents)
            await _write(queue, contents, range(AT_ONCE, WRITES // 2), advance)
            by_card = (await _card(client)).sectors_sealed
            rest = asyncio.ensure_future(
                _write(queue, contents, range(WRITES // 2, WRITES), advance)
            )
            while not queue.outstanding:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
            card.kill()
            await rest
            await queue.flush()
            digest = hashlib.sha256()
            buffer = bytearray(WRITE_BYTES)
            for number in range(WRITES):
                await queue.read(number * WRITE_BYTES // SECTOR_BYTES, buffer)
                digest.update(buffer)
            after = await _card(client)
            sealed = await client.volumes.get(volume.name)
        await client.volumes.delete(volume.name)
    if sealed.attachment is None:
        raise UnavailableError("demo.volume.detached", f"{volume.name} was detached meanwhile")
    return CardRun(
        product=after.product,
        written_bytes=WRITES * WRITE_BYTES,
        sectors_by_card=after.sectors_sealed,
        sectors_by_card_before=by_card,
        sectors_by_processor=sealed.attachment.sectors_sealed - after.sectors_sealed,
        losses=after.losses,
        reason=after.reason,
        sha256_written=contents.digest(),
        sha256_read=digest.hexdigest(),
    )


async def _write(
    queue: VolumeQueue, contents: _Contents, numbers: range, advance: Callable[[int], None]
) -> None:
    for first in numbers[::AT_ONCE]:
        group = range(first, min(first + AT_ONCE, numbers.stop))
        await asyncio.gather(
            *(
                queue.write(number * WRITE_BYTES // SECTOR_BYTES, contents.part(number))
                for number in group
            )
        )
        advance(len(group))


async def _wait_sealing(
    client: sealane.client.Client, queue: VolumeQueue, contents: _Contents
) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not (await _card(client)).sectors_sealed:
            await queue.write(0, contents.part(0))


async def _wait_used(client: sealane.client.Client) -> None:
    """Wait until the gateway has attested with the card and uses it."""
    try:
        async with asyncio.timeout(START_SECONDS):
            while (card := await _card(client)).state != _IN_USE:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise UnavailableError(
            "demo.card.unused", f"the card is not in use after {START_SECONDS:g} s: {card.message}"
        ) from error


async def _card(client: sealane.client.Client) -> offload_pb2.Accelerator:
    request = offload_pb2.GetAcceleratorRequest(label=CARD_LABEL)
    with translated():
        return await client.offload.GetAccelerator(request, timeout=CALL_SECONDS)
