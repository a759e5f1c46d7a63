"""Measurement of what limits a session, and its output by `session stat`."""

import asyncio
import contextlib
import time
from typing import Any

import pytest

from relays import emulator
from sealane.cli.session_stat import LIMITS, limits, record, since, table
from sealane.protocol.v1 import sessions_pb2
from session_pairs import connected, taken

WAIT_SECONDS = 0.05
LOSS_PPB = 50_000_000
MESSAGES = 20


def spent(session: Any) -> dict[str, float]:
    statistics = session.statistics()
    return {name: statistics[f"limited_{name}_nanos"] / 1e9 for name in LIMITS}


async def test_waiting_is_told_apart(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        # The acknowledgement of the first message carries the credit for the second.
        small = await right.post_receive(offset=0, length=8)
        large = await right.post_receive(offset=4096, length=1 << 20)
        await asyncio.gather(left.send(offset=0, length=8), small)
        start, before = time.monotonic(), spent(left)
        await asyncio.gather(left.send(offset=0, length=1 << 20), large)
        paced = spent(left)
        sending = await left.post_send(offset=0, length=8)
        await taken(left)
        await asyncio.sleep(WAIT_SECONDS)
        await right.receive(offset=0, length=8)
        await sending
        held = spent(left)
        age = time.monotonic() - start

    assert paced["pacing"] - before["pacing"] > 0.02, "a megabyte at 200 Mbit/s takes 42 ms"
    assert paced["credit"] - before["credit"] < 0.02
    assert held["credit"] - paced["credit"] > WAIT_SECONDS * 0.9
    assert held["completions"] == 0
    assert sum(held.values()) - sum(paced.values()) <= age


async def test_job_that_reads_no_completions_is_told(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        asyncio.get_running_loop().remove_reader(left.ring.fileno())
        room = left.ring.entries - 1
        for number in range(room):
            left.ring.post_receive(offset=8 * number, length=8, user_data=number)
        await asyncio.gather(*(right.send(offset=0, length=0) for _ in range(room)))
        with pytest.raises(BlockingIOError):
            left.ring.post_receive(offset=8 * room, length=8, user_data=room)
        await asyncio.sleep(WAIT_SECONDS)
        assert len(left.ring.completions(2 * room)) == room
        left.ring.post_receive(offset=8 * room, length=8, user_data=room)
        await right.send(offset=0, length=0)
        found = spent(left)

    assert found["completions"] > WAIT_SECONDS * 0.9


async def test_losses_acknowledgements_and_an_idle_job_are_told_apart(
    fabrics: tuple[Any, Any],
) -> None:
    with contextlib.ExitStack() as links:

        def over_a_link(addresses: list[str]) -> list[str]:
            return [links.enter_context(emulator(to, loss_ppb=LOSS_PPB)) for to in addresses]

        async with connected(*fabrics, via=over_a_link) as (left, right):
            for _ in range(MESSAGES):
                # Each message ends with lost packets and the wait for the last acknowledgement.
                await asyncio.gather(
                    left.send(offset=0, length=100_000), right.receive(offset=0, length=100_000)
                )
            busy = spent(left)
            await asyncio.sleep(WAIT_SECONDS)
            await asyncio.gather(left.send(offset=0, length=8), right.receive(offset=0, length=8))
            idle = spent(left)
            statistics = left.statistics()

    assert busy["loss"] > 0.006, "a round trip for some of them"
    assert busy["round_trip"] > 0.006 * MESSAGES / 2
    assert idle["application"] - busy["application"] > WAIT_SECONDS * 0.9
    shown = table(SESSION, statistics)["limited by"]
    assert all(LIMITS[name] in shown for name in ("loss", "round_trip", "application"))


SESSION = sessions_pb2.Session(
    name="sessions/1",
    display_name="gradients",
    state=sessions_pb2.Session.ESTABLISHED,
    peer_node="far",
    rate_bits_per_second=10**9,
    outlook=sessions_pb2.Outlook(
        loss_rate=1e-3,
        loss_rate_low=9e-4,
        loss_rate_high=2e-3,
        burst_packets=1.5,
        burst_packets_low=1,
        burst_packets_high=2,
        packets=1e6,
        plan=[
            sessions_pb2.PlanRow(length_max=1 << 20),
            sessions_pb2.PlanRow(
                length_max=(1 << 64) - 1, k=32, m=4, depth=8, parity_gap_nanos=5_000_000
            ),
        ],
    ),
)
FIGURES = {
    "limited_pacing_nanos": 1_500_000_000,
    "limited_credit_nanos": 300_000_000,
    "limited_shared_rate_nanos": 200_000_000,
    "wire_bytes_sent": 250_000_000,
    "payload_bytes_sent": 125_000_000,
    "srtt_nanos": 25_000_000,
    "rto_nanos": 26_000_000,
    "rate_bytes_per_second": 125_000_000,
    "forged": 3,
}


def test_table_says_it_to_people_and_record_to_programs() -> None:
    shown = table(SESSION, FIGURES)
    assert shown["limited by"] == (
        "the rate 75%, the peer posts no receives 15%, the rate that sessions share 10%"
    )
    assert shown["sent"] == "1,000.0 Mbit/s on the wire, 500.0 Mbit/s of messages"
    assert shown["round trip"] == "25.000 ms, time-out 26.000 ms"
    assert "decrypt failures 3" in shown["dropped here"]
    assert shown["loss estimate"] == "0.001 (0.0009 to 0.002), bursts of 1.5 (1 to 2)"
    assert shown["plan"] == (
        "to 1 MiB selective repeat; longer MDS (32, 4) depth 8, parity 5.0 ms later"
    )
    found = record(SESSION, FIGURES)
    assert found["limits"] == {"pacing": 0.75, "credit": 0.15, "shared_rate": 0.1}
    assert found["seconds"] == 2
    assert found["bits_per_second"]["payload_sent"] == pytest.approx(5e8)
    row = {"length_max": (1 << 64) - 1, "k": 32, "m": 4, "depth": 8}
    assert found["plan"][1] == {**row, "parity_gap_nanos": 5_000_000}


def test_between_two_looks_only_what_was_added_counts() -> None:
    later = {**FIGURES, "limited_credit_nanos": 700_000_000, "srtt_nanos": 30_000_000}
    added = since(later, FIGURES)
    assert limits(added) == {"credit": 1.0}
    assert (added["srtt_nanos"], added["wire_bytes_sent"]) == (30_000_000, 0)
    assert limits(since(FIGURES, FIGURES)) == {}
    assert table(SESSION, since(FIGURES, FIGURES))["limited by"] == "-"
