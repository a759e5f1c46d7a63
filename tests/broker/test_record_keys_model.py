"""Replacements of the record key in simulated worlds: several brokers, kills, an adversary."""

from collections import Counter
from typing import Any

import pytest
import structlog

from broker.simulation import attack_a_record, run
from sealane.daemon.broker import record_key_rotation
from seeds import SEED

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(record_key_rotation, "BATCH_RECORDS", 2)
    with structlog.testing.capture_logs():
        yield


@pytest.mark.parametrize(("brokers", "put_backs"), [(1, 0), (2, 0), (3, 0), (2, 2)])
def test_key_is_replaced_over_and_over_while_brokers_are_killed(
    brokers: int, put_backs: int
) -> None:
    """At each kill every record is under a key in use; brokers refuse nothing but roll-backs."""
    print("SEALANE_SEED =", SEED)
    world = run(SEED + brokers, kills=60, put_backs=put_backs, brokers=brokers, replaces_keys=True)
    print(sorted(world.key_states))
    assert max(number for number, _ in world.key_states) > 3
    # Both halfway and done were seen.
    assert {is_replacing for _, is_replacing in world.key_states} == {False, True}
    assert world.grants > 20


@pytest.mark.parametrize("running", [True, False])
def test_single_record_changed_by_no_broker_ends_every_broker(running: bool) -> None:
    """An adversary restores, adds or removes one record at any moment of a replacement."""
    print("SEALANE_SEED =", SEED)
    seen = Counter(
        attack_a_record(SEED + i, kills=12, running=running, brokers=1 + i % 3, replaces_keys=True)
        for i in range(12)
    )
    assert seen.keys() == {"removal", "addition", "older version"}
