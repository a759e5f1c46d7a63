"""Forwarding of the audit log: in order, at least once, verifiable, and never in anyone's way."""

import asyncio
import contextlib
import datetime as dt
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from broker.audit_logs import KEY, SMALL, files, opened
from patience import PATIENCE_SECONDS
from sealane.crypto.audit import GENESIS, Record, verify_log
from sealane.daemon.broker import audit_forward, audit_syslog
from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.audit_collector import SendRecords
from sealane.daemon.broker.audit_forward import AuditForwarder
from sealane.daemon.broker.audit_retention import Retention
from sealane.daemon.broker.audit_source import AuditSource
from sealane.daemon.broker.audit_syslog import SyslogTcp, collector_tls, syslog_message
from sealane.daemon.config import AuditForwardConfig
from sealane.daemon.runtime.config_types import peer_address
from sealane.errors import UsageError, VerificationError

FORWARDED = Retention(is_forwarded=True)
LINE = (
    b'{"detail":{},"kind":"k","outcome":"done","previous":"","reason":"","sequence":1,'
    b'"subject":"s","time":"2026-11-01T00:00:00.000000+00:00"}'
)


@pytest.fixture(autouse=True)
def _brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_forward, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(audit_forward, "BACK_OFF_SECONDS", 0.05)


class Collector:
    """A syslog server that keeps the texts of messages."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.headers: list[str] = []
        self.lines: list[bytes] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def listen(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self._tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int((await reader.readuntil(b" "))[:-1])
                header, line = re.split(b" (?={)", await reader.readexactly(length), maxsplit=1)
                self.headers.append(header.decode())
                self.lines.append(line)
        writer.transport.abort()


@contextlib.asynccontextmanager
async def forwarding(
    log: AuditLog, directory: Path, port: int, *, ca_file: Path | None = None, host: str = ""
) -> AsyncIterator[asyncio.Task[None]]:
    config = AuditForwardConfig(
        address=f"{host or '127.0.0.1'}:{port}", ca_file=str(ca_file) if ca_file else None
    )
    forwarder = AuditForwarder(log, config, node="b1", position=directory / "audit.forwarded")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(forwarder.run())
        yield task
        task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - conditions of several objects
            await asyncio.sleep(0.01)


async def forwarded(log: AuditLog, collector: Collector) -> None:
    """Wait until the forwarder and the collector agree that all records have arrived."""
    await until(lambda: log.forwarded == log.head.sequence == len(set(collector.lines)))


async def fill(log: AuditLog, count: int) -> None:
    for number in range(count):
        await log.record("k", subject="s", outcome="done", number=number)


async def test_collector_gets_a_log_that_verifies(tmp_path: Path) -> None:
    collector = Collector()
    port = await collector.listen()
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 10)
    async with forwarding(log, tmp_path, port):
        await fill(log, 10)
        await log.record("call", subject="x", outcome="refused", reason="r")
        # An inspection signs what has no signature yet.
        await log.inspect()
        await forwarded(log, collector)
    reader = verify_log(collector.lines, signer=KEY.public_key())
    assert reader.head == log.head
    assert reader.signed_sequence == log.head.sequence - 1
    assert len(files(tmp_path)) > 2
    time = Record.decode(collector.lines[-2]).time.isoformat(timespec="microseconds")
    assert collector.headers[-2] == f"<108>1 {time} b1 sealaned - call -"
    assert collector.headers[0].startswith("<110>1 ")
    await log.close()
    await collector.close()


def test_length_counts_octets() -> None:
    length, _, message = syslog_message(LINE, node="n").partition(b" ")
    assert int(length) == len(message)
    assert message == b"<110>1 2026-11-01T00:00:00.000000+00:00 n sealaned - k - " + LINE


async def test_nothing_waits_for_a_collector_and_nothing_is_lost(tmp_path: Path) -> None:
    collector = Collector()
    port = await collector.listen()
    await collector.close()
    log = await opened(tmp_path, SMALL, FORWARDED)
    async with forwarding(log, tmp_path, port):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await fill(log, 10)
        assert log.forwarded == 0
        await collector.listen(port)
        await forwarded(log, collector)
        # What is sent to a collector that has gone comes once more.
        for _ in range(3):
            collector.drop()
            await fill(log, 5)
            await forwarded(log, collector)
    found = {Record.decode(line).sequence for line in collector.lines}
    assert found == {*range(1, log.head.sequence + 1)}
    distinct = list(dict.fromkeys(collector.lines))
    assert verify_log(distinct, signer=KEY.public_key()).head == log.head
    await log.close()
    await collector.close()


async def test_forwarding_goes_on_at_the_kept_position(tmp_path: Path) -> None:
    collector = Collector()
    port = await collector.listen()
    for _ in range(2):
        log = await opened(tmp_path, SMALL, FORWARDED)
        async with forwarding(log, tmp_path, port):
            await fill(log, 10)
            await forwarded(log, collector)
        await log.close()
    assert len(set(collector.lines)) == len(collector.lines)
    verify_log(collector.lines, signer=KEY.public_key())
    await collector.close()


@pytest.mark.parametrize("is_of_this_log", [True, False])
async def test_attempts_without_a_collector_read_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_this_log: bool
) -> None:
    log = await opened(tmp_path, None, FORWARDED)
    await fill(log, 20)
    digest = log.head.digest if is_of_this_log else bytes(32)
    (tmp_path / "audit.forwarded").write_text(f"{log.head.sequence}:{digest.hex()}")
    source = AuditSource(log, tmp_path / "audit.forwarded")
    read = 0
    next_line = source._next_line

    def counted() -> bytes:
        nonlocal read
        read += 1
        return next_line()

    monkeypatch.setattr(source, "_next_line", counted)
    position = source.rewind()
    assert position == (log.head if is_of_this_log else GENESIS)
    assert read == 20
    assert source.rewind() == position
    assert read == 20
    # What was read but didn't arrive is read again.
    await fill(log, 1)
    source.read(1 << 20)
    assert source.rewind() == position
    assert source.read(1 << 20) != []
    source.close()
    await log.close()


@pytest.mark.parametrize("position", ["", "x", "7:00", f"7:{'00' * 32}", f"999:{'00' * 32}", "é"])
async def test_position_of_no_record_starts_at_the_beginning(tmp_path: Path, position: str) -> None:
    collector = Collector()
    port = await collector.listen()
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 10)
    (tmp_path / "audit.forwarded").write_text(position)
    async with forwarding(log, tmp_path, port):
        await forwarded(log, collector)
    assert verify_log(collector.lines, signer=KEY.public_key()).head == log.head
    await log.close()
    await collector.close()


async def test_what_waits_below_tls_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, ca_file = _certificate(tmp_path, "collector")
    ended = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await ended.wait()
        writer.transport.abort()

    server = await asyncio.start_server(stuck, "127.0.0.1", 0, ssl=context)
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    port = server.sockets[0].getsockname()[1]
    log = await opened(tmp_path)
    to = SyslogTcp(f"127.0.0.1:{port}", str(ca_file), node="b1")
    async with asyncio.timeout(PATIENCE_SECONDS), to.connection() as connection:
        end = connection.tcp.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # Below the mark from which the lower transport makes TLS wait.
        connection.writer.write(bytes(60_000))
        await connection.writer.drain()
        assert connection.writer.transport.get_write_buffer_size() == 0
        # Even if the kernel has nothing left.
        nothing = SimpleNamespace(ioctl=lambda *_: bytes(4))
        monkeypatch.setattr(audit_syslog, "fcntl", nothing)
        assert connection.unacknowledged_bytes() > 0
        ended.set()
    server.close()
    await log.close()


async def test_record_counts_once_the_collector_has_acknowledged_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        # Takes connections, and little of what they carry.
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        log = await opened(tmp_path, None, FORWARDED)
        await asyncio.gather(
            *(
                log.record("k", subject="s", outcome="done", text=["x" * 500] * 12)
                for _ in range(30)
            )
        )
        async with forwarding(log, tmp_path, stuck.getsockname()[1]) as task:
            peer, _ = await asyncio.to_thread(stuck.accept)
            await asyncio.sleep(0.5)
            assert log.forwarded == 0
            async with asyncio.timeout(PATIENCE_SECONDS):
                await fill(log, 10)
            assert not task.done()
            peer.close()
        await log.close()


async def test_collector_slower_than_a_batch_gets_all_in_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(tmp_path, None, FORWARDED)
    await fill(log, 100)
    config = AuditForwardConfig(address="127.0.0.1:6514")
    forwarder = AuditForwarder(log, config, node="b1", position=tmp_path / "audit.forwarded")
    sizes: list[int] = []

    async def send(lines: list[bytes]) -> None:
        sizes.append(len(lines))
        if len(lines) > 10:
            raise TimeoutError

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[SendRecords]:
        yield send

    monkeypatch.setattr(forwarder, "_collector", SimpleNamespace(connect=connect))
    # What it takes at all it takes slowly: no larger batch follows.
    monkeypatch.setattr(audit_forward, "BRISK_SECONDS", 0)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(forwarder.run())
        await until(lambda: log.forwarded == log.head.sequence)
        task.cancel()
    late = [size for size in sizes if size > 10]
    assert sizes[: len(late)] == late == sorted(late, reverse=True)
    assert sum(sizes) - sum(late) == log.head.sequence
    await log.close()


async def test_batches_grow_again(tmp_path: Path) -> None:
    collector = Collector()
    port = await collector.listen()
    log = await opened(tmp_path, None, FORWARDED)
    await fill(log, 50)
    config = AuditForwardConfig(address=f"127.0.0.1:{port}")
    forwarder = AuditForwarder(log, config, node="b1", position=tmp_path / "audit.forwarded")
    forwarder._batch_bytes = 1
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(forwarder.run())
        await forwarded(log, collector)
        task.cancel()
    assert forwarder._batch_bytes > 1 << 10
    await log.close()
    await collector.close()


async def test_tcp_collector_that_takes_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit_syslog, "SEND_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        collector = SyslogTcp(f"127.0.0.1:{server.getsockname()[1]}", None, node="n")
        async with collector.connect() as send, asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(TimeoutError, match=r"^$"):
                await send([LINE] * 100_000)


async def test_log_that_was_changed_is_not_forwarded(tmp_path: Path) -> None:
    collector = Collector()
    port = await collector.listen()
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 20)
    path = files(tmp_path)[1]
    path.write_bytes(path.read_bytes().replace(b'"subject":"s"', b'"subject":"x"', 1))
    with pytest.raises(ExceptionGroup) as caught:
        async with forwarding(log, tmp_path, port) as task:
            await asyncio.wait([task], timeout=PATIENCE_SECONDS)
    (error,) = caught.value.exceptions
    assert isinstance(error, VerificationError)
    assert error.reason == "audit.chain.broken"
    assert not [line for line in collector.lines if b'"subject":"x"' in line]
    await log.close()
    await collector.close()


def _certificate(
    directory: Path, name: str, *, host: str = "127.0.0.1"
) -> tuple[ssl.SSLContext, Path]:
    """Return a server's context and the file of its own certificate, for clients to trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    ca_file, both = directory / f"{name}.pem", directory / f"{name}.key"
    ca_file.write_bytes(pem)
    both.write_bytes(secret + pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(both)
    return context, ca_file


async def test_collector_over_tls(tmp_path: Path) -> None:
    context, ca_file = _certificate(tmp_path, "collector")
    collector = Collector(context)
    port = await collector.listen()
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 10)
    async with forwarding(log, tmp_path, port, ca_file=ca_file):
        await forwarded(log, collector)
    assert verify_log(collector.lines, signer=KEY.public_key()).head == log.head
    await log.close()
    await collector.close()


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["another authority", "another host", "plain", "old"])
async def test_collector_of_an_attacker_gets_nothing(
    tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some of them don't answer the handshake.
    monkeypatch.setattr(audit_syslog, "CONNECT_SECONDS", 1.0)
    host = "127.0.0.2" if attack == "another host" else "127.0.0.1"
    context, ca_file = _certificate(tmp_path, "collector", host=host)
    served: ssl.SSLContext | None = context
    if attack == "another authority":
        served, _ = _certificate(tmp_path, "other")
    elif attack == "plain":
        served = None
    elif attack == "old":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    collector = Collector(served)
    attempts = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        inner_reader, inner = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            while content := await reader.read(1 << 16):
                inner.write(content)
                writer.write(await inner_reader.read(1 << 16))
        inner.transport.abort()
        writer.transport.abort()

    port = await collector.listen()
    front = await asyncio.start_server(count, "127.0.0.1", 0)
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 10)
    address = front.sockets[0].getsockname()[1]
    async with forwarding(log, tmp_path, address, ca_file=ca_file) as task:
        await until(lambda: attempts > 3 or collector.lines != [])
        assert not task.done()
    assert collector.lines == []
    assert log.forwarded == 0
    front.close()
    await log.close()
    await collector.close()


@pytest.mark.parametrize("host", ["collector..example", "a" * 64 + ".example", ".example", "a.."])
def test_host_that_can_not_be_encoded_is_no_address(host: str) -> None:
    with pytest.raises(ValueError, match="host:port, "):
        peer_address(f"{host}:6514")


@pytest.mark.parametrize("host", ["a" * 63 + ".example", "collector.example.", "[fe80::1%a]"])
def test_host_of_parts_that_fit_is_an_address(host: str) -> None:
    assert peer_address(f"{host}:6514") == f"{host}:6514"


async def test_host_that_can_not_be_encoded_is_a_collector_that_is_away(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL, FORWARDED)
    _, ca_file = _certificate(tmp_path, "collector")
    config = AuditForwardConfig.model_construct(
        address="collector..example:6514", ca_file=str(ca_file)
    )
    forwarder = AuditForwarder(log, config, node="b1", position=tmp_path / "audit.forwarded")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(forwarder.run())
        await until(lambda: forwarder._is_away)
        assert not task.done()
        task.cancel()
    await log.close()


@pytest.mark.parametrize("content", [None, b"", b"x", b"\xff"])
def test_file_without_certificates_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        collector_tls(str(tmp_path / "ca"))
    assert caught.value.reason == "config.unreadable"
