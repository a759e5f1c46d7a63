from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from patience import PATIENCE_SECONDS
from sealane._native import Emulator, LinkSettings

if TYPE_CHECKING:
    from sealane._native import LinkCounters

WIRE_OVERHEAD = 28
CLEAN = LinkSettings(rate_bits_per_second=1, delay_nanos=0, buffer_bytes=0)


def _path(emulator: Emulator) -> LinkCounters:
    return emulator.report()["forward"]["paths"][0]


@contextlib.contextmanager
def link(
    *,
    rate: int = 1_000_000_000,
    delay_ms: int = 0,
    loss_ppb: int = 0,
    seed: int = 1,
    buffer_bytes: int = 1 << 24,
) -> Iterator[tuple[socket.socket, Emulator, socket.socket]]:
    """Yield a client connected to the emulator, the emulator and the far end."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end,
    ):
        end.bind(("127.0.0.1", 0))
        settings = LinkSettings(
            rate_bits_per_second=rate,
            delay_nanos=delay_ms * 1_000_000,
            buffer_bytes=buffer_bytes,
            loss_parts_per_billion=loss_ppb,
        )
        forward_to = f"127.0.0.1:{end.getsockname()[1]}"
        emulator = Emulator.relay([settings], [settings], seed=seed, forward_to=forward_to)
        try:
            host, _, port = (emulator.address or "").rpartition(":")
            client.connect((host, int(port)))
            client.settimeout(PATIENCE_SECONDS)
            end.settimeout(PATIENCE_SECONDS)
            yield client, emulator, end
        finally:
            emulator.stop()


def send_numbered(seed: int, count: int) -> list[bool]:
    """Send numbered packets in bursts; return for each whether it was lost."""
    seen: set[int] = set()
    with link(loss_ppb=100_000_000, seed=seed) as (client, emulator, end):
        for start in range(0, count, 50):
            for number in range(start, start + 50):
                client.send(struct.pack("<I", number).ljust(100, b"\0"))
            while (path := _path(emulator))["delivered_packets"] + path[
                "lost_packets"
            ] < start + 50:
                pass
            while len(seen) < path["delivered_packets"]:
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

    # 100 packets of 1250 wire bytes at 20 Mbit/s take at least 50 ms, and not much more.
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
        report = emulator.report()

    assert (payload, answer) == (b"ping", b"pong")
    assert there >= 0.020
    assert back >= 0.040
    assert report["forward"]["paths"][0]["offered_bytes"] == 4 + WIRE_OVERHEAD
    assert report["backward"]["sent_packets"] == 1
    assert [count for _, count in report["forward"]["slip_nanos"]] == [1]


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

        assert _path(emulator)["overflowed_packets"] >= 10


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "host:1"])
def test_address_must_be_numeric(address: str) -> None:
    with pytest.raises(ValueError, match="numeric"):
        Emulator.relay([CLEAN], [CLEAN], seed=0, forward_to=address)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_parts_per_billion": 1_000_000_001}, "more than 1000000000"),
        ({"loss_parts_per_billion": 1, "gilbert_elliott": (1, 1, 1, 1)}, "exclude each other"),
        ({"red": (2, 1, 1)}, "must not exceed"),
        ({"phantom": (1_000_000_001, 1, 0, 1, 1)}, "more than 1000000000"),
    ],
)
def test_impossible_links_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinkSettings(rate_bits_per_second=1, delay_nanos=0, buffer_bytes=0, **change)


def test_paths_and_outages_must_fit() -> None:
    with pytest.raises(ValueError, match="1 paths forward and 2 back"):
        Emulator.relay([CLEAN], [CLEAN, CLEAN], seed=0, forward_to="127.0.0.1:9")
    with pytest.raises(ValueError, match="schedule: path 1 from 0 to 1 ns"):
        Emulator.relay([CLEAN], [CLEAN], seed=0, forward_to="127.0.0.1:9", outages=[(1, 0, 1)])
    with pytest.raises(ValueError, match="schedule: path 0 from 2 to 1 ns"):
        Emulator.relay([CLEAN], [CLEAN], seed=0, forward_to="127.0.0.1:9", detours=[(0, 2, 1, 5)])


async def test_stop_does_not_wait_for_packets_in_transit() -> None:
    with link(delay_ms=60_000) as (client, emulator, _):
        client.send(b"x")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.to_thread(emulator.stop)
