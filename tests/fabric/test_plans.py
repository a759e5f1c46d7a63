"""A session's plan follows what its counters say of the path."""

import asyncio

from sealane.daemon.fabric.plans import Outlook, keep_planned

RATE = 1_000_000_000
INTERVAL = 0.001


class FakeSession:
    """A path of 25 ms whose counters the test moves on at every look."""

    def __init__(self, looks: int, **added: int) -> None:
        self.outlook: Outlook | None = None
        self.installed: list[list[tuple[int, int, int, int]]] = []
        self._looks = looks
        self._added = added
        self._counters = dict.fromkeys(
            ("packets_sent", "lost_packets", "lost_runs", "ce_echoed", "send_drops"), 0
        )

    def statistics(self) -> dict[str, int]:
        self._looks -= 1
        for name, value in self._added.items():
            self._counters[name] += value
        return {**self._counters, "srtt_nanos": 25_000_000}

    def install_plan(self, rows: list[tuple[int, int, int, int]]) -> None:
        self.installed.append(rows)

    async def wait_closed(self) -> None:
        if self._looks > 0:
            await asyncio.sleep(60)


async def planned(
    assumed_loss: float, looks: int = 6, *, objective: str = "mean", **added: int
) -> FakeSession:
    session = FakeSession(looks, **added)
    await keep_planned(
        session,
        rate_bits_per_second=RATE,
        unit_bytes=1408,
        assumed_loss=assumed_loss,
        objective=objective,
        interval_seconds=INTERVAL,
    )
    return session


def is_coded(rows: list[tuple[int, int, int, int]], size: int) -> bool:
    return next(k for length, k, _, _ in rows if size <= length) > 0


async def test_the_assumption_is_planned_for_at_once() -> None:
    clean, lossy = await planned(0.0, looks=1), await planned(1e-2, looks=1)

    assert not is_coded(clean.installed[0], 1 << 20)
    assert is_coded(lossy.installed[0], 1 << 20)
    assert lossy.outlook is not None
    assert lossy.outlook.plan.path.round_trip_seconds == 0.025


async def test_the_operator_says_what_is_to_be_small() -> None:
    # Three units of which one is lost in every thirtieth message.
    mean = await planned(1e-2, looks=1)
    tail = await planned(1e-2, looks=1, objective="p99")

    assert not is_coded(mean.installed[0], 4096)
    assert is_coded(tail.installed[0], 4096)


async def test_losses_that_nothing_explains_make_another_plan() -> None:
    session = await planned(1e-6, packets_sent=10_000, lost_packets=200, lost_runs=100)

    assert len(session.installed) == 2
    assert not is_coded(session.installed[0], 1 << 20)
    assert is_coded(session.installed[1], 1 << 20)
    assert session.outlook is not None
    assert session.outlook.estimate.rate_low < 0.02 < session.outlook.estimate.rate_high
    assert session.outlook.estimate.loss.burst_packets == 2.0


async def test_losses_with_congestion_marks_and_local_drops_make_none() -> None:
    losses = {"packets_sent": 10_000, "lost_packets": 200, "lost_runs": 100}

    assert len((await planned(1e-6, **losses, ce_echoed=1)).installed) == 1
    assert len((await planned(1e-6, **losses, send_drops=200)).installed) == 1
