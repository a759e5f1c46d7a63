import asyncio
import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from sealane._native import Emulator

WIRE_OVERHEAD = 28


@contextlib.contextmanager
def link(
    *,
    rate: int = 1_000_000_000,
    delay_ms: int = 0,
    loss_ppb: int = 0,
    seed: int = 1,
    buffer_bytes: int = 1 << 24,
) -> Iterator[tuple[socket.socket, Emulator, socket.socket]]:
    """Give a client that is connected to the emulator, the emulator, and the far end."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end,
    ):
        end.bind(("127.0.0.1", 0))
        emulator = Emulator(
            rate_bits_per_second=rate,
            delay_ns=delay_ms * 1_000_000,
            buffer_bytes=buffer_bytes,
            loss_ppb=loss_ppb,
            seed=seed,
            forward_to=f"127.0.0.1:{end.getsockname()[1]}",
        )
        try:
            client.connect(("127.0.0.1", emulator.port))
            client.settimeout(10)
            end.settimeout(10)
            yield client, emulator, end
        finally:
            emulator.stop()


def send_numbered(seed: int, count: int) -> list[bool]:
    """Send numbered packets in bursts; say of each whether it was lost."""
    seen: set[int] = set()
    with link(loss_ppb=100_000_000, seed=seed) as (client, emulator, end):
        for start in range(0, count, 50):
            for number in range(start, start + 50):
                client.send(struct.pack("<I", number).ljust(100, b"\0"))
            while (counters := emulator.counters())["forward_offered_packets"] < start + 50:
                pass
            while len(seen) < counters["forward_delivered_packets"]:
                seen.add(struct.unpack_from("<I", end.recv(200))[0])
    return [number not in seen for number in range(count)]


def test_rate_is_kept_in_wire_bytes() -> None:
    with link(rate=20_000_000) as (client, _, end):
        start = time.perf_counter()
        for _ in range(100):
            client.send(bytes(1222))
        for _ in range(100):
            end.recv(2000)
        elapsed = time.perf_counter() - start

    # 100 packets of 1250 wire bytes at 20 Mbit/s take 50 ms: never less, and of that order.
    assert 0.0499 < elapsed < 2


def test_delay_is_one_way_each_way() -> None:
    with link(delay_ms=20) as (client, emulator, end):
        start = time.perf_counter()
        client.send(b"ping")
        payload, sender = end.recvfrom(100)
        there = time.perf_counter() - start
        end.sendto(b"pong", sender)
        answer = client.recv(100)
        back = time.perf_counter() - start
        emulator.stop()
        counters = emulator.counters()

    assert (payload, answer) == (b"ping", b"pong")
    assert there >= 0.020
    assert back >= 0.040
    assert counters["forward_offered_bytes"] == 4 + WIRE_OVERHEAD
    assert counters["backward_sent_packets"] == 1
    assert counters["forward_slip_max_ns"] > 0


def test_loss_is_seeded_and_has_its_rate_and_run_lengths() -> None:
    lost = send_numbered(42, 3000)

    assert lost == send_numbered(42, 3000), "same seed, same losses"
    assert lost != send_numbered(43, 3000)
    # Binomial: 300 ± 4·16.4. Independent losses: a tenth of the lost follow a lost one.
    assert 234 <= sum(lost) <= 366
    pairs = sum(before and after for before, after in itertools.pairwise(lost))
    assert 8 <= pairs <= 60


def test_full_buffer_drops() -> None:
    with link(rate=1_000_000, buffer_bytes=3000) as (client, emulator, end):
        for _ in range(20):
            client.send(bytes(972))
        end.recv(2000)
        end.recv(2000)
        emulator.stop()

        assert emulator.counters()["forward_overflowed_packets"] >= 10


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "host:1"])
def test_address_must_be_numeric(address: str) -> None:
    with pytest.raises(ValueError, match="numeric"):
        Emulator(
            rate_bits_per_second=1,
            delay_ns=0,
            buffer_bytes=0,
            loss_ppb=0,
            seed=0,
            forward_to=address,
        )


async def test_stop_does_not_wait_for_packets_in_transit() -> None:
    with link(delay_ms=60_000) as (client, emulator, _):
        client.send(b"x")
        async with asyncio.timeout(5):
            await asyncio.to_thread(emulator.stop)
