"""What a session's plan begins with: measurements, or parity where nothing is known."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fabrics import settings
from sealane.daemon.fabric import plans
from sealane.daemon.fabric.known_paths import PACKETS_MIN, PathKey, PathLoss
from sealane.daemon.fabric.session_plans import SessionPlans

RATE = 1_000_000_000
UNIT = 1408
REGION = 1 << 20
ADDRESS = "192.0.2.1:4420"


class FakeSession:
    """A session that was established on a path with this round trip."""

    def __init__(self, round_trip_seconds: float) -> None:
        self.identity = SimpleNamespace(
            name="sessions/1", peer=None, rate_bits_per_second=RATE, unit_bytes=UNIT
        )
        self.job = SimpleNamespace(regions={"sessions/1": SimpleNamespace(size_bytes=REGION)})
        self.rows: list[tuple[int, int, int, int, int]] | None = None
        self._srtt_nanos = round(round_trip_seconds * 1e9)

    def path_key(self) -> PathKey:
        return PathKey.of("", [ADDRESS])

    def statistics(self) -> dict[str, int]:
        return {"srtt_nanos": self._srtt_nanos}

    def install_plan(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        self.rows = rows


@dataclass
class Begun:
    """What the plan of a session began with."""

    rows: list[tuple[int, int, int, int, int]] | None
    assumed: PathLoss
    caution: float
    message_bytes_max: int


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def begin(
        round_trip_seconds: float, objective: str = "auto", measured: PathLoss | None = None
    ) -> Begun:
        given: dict[str, Any] = {}

        async def keep_planned(_: object, **options: Any) -> None:
            given.update(options)

        monkeypatch.setattr(plans, "keep_planned", keep_planned)
        mine = SessionPlans(replace(settings(tmp_path, "a"), plan_objective=objective))
        if measured is not None:
            mine.losses.note(PathKey.of("", [ADDRESS]), measured, PACKETS_MIN)
        session: Any = FakeSession(round_trip_seconds)
        await mine.keep(session)
        return Begun(session.rows, given["assumed"], given["caution"], given["message_bytes_max"])

    return begin


async def test_an_unknown_long_path_gets_parity_at_once_for_what_a_round_trip_holds(
    begin: Any,
) -> None:
    found = await begin(0.025)
    assert found.caution == 1e-2
    lengths = [length for length, k, *_ in found.rows if k]
    assert lengths == sorted(lengths)
    # 2,095 packets fit in 25 ms at 1 Gbit/s.
    assert lengths[-1] == 2095 * UNIT
    assert found.rows[-1][1:] == (0, 0, 1, 0)


async def test_nothing_is_planned_for_messages_that_the_region_does_not_hold(begin: Any) -> None:
    assert (await begin(0.025)).message_bytes_max == REGION


async def test_a_known_path_gets_parity_until_there_is_a_plan_for_what_was_measured(
    begin: Any,
) -> None:
    measured = PathLoss(rate=1e-3, burst_packets=2.0)
    found = await begin(0.025, measured=measured)
    assert found.rows == (await begin(0.025)).rows
    assert (found.assumed, found.caution) == (measured, 0.0)


async def test_a_short_path_and_another_objective_get_no_parity_at_first(begin: Any) -> None:
    for found in (await begin(0.0005), await begin(0.025, objective="mean")):
        assert (found.rows, found.caution) == (None, 0.0)
