"""Who is admitted as a job, and what is written of those who aren't."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sealane.daemon.fabric.admitted import LINES_MAX, PERIOD_SECONDS, AdmittedUsers, RefusedCallers
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.peer_groups import peer_groups
from sealane.errors import VerificationError

UNMAPPED = (65_534, 65_534)


def caller(user: int, *groups: int) -> Any:
    return SimpleNamespace(user=user, process=1, groups=frozenset(groups))


def reason_of(users: AdmittedUsers, who: Any) -> str:
    try:
        users.admit(who)
    except VerificationError as error:
        return str(error.reason)
    return "admitted"


def test_a_user_is_admitted_by_number_or_by_group_and_what_is_not_mapped_never() -> None:
    users = AdmittedUsers(uids=[1000], groups=[2000, 65_534], overflow=lambda: UNMAPPED)
    assert reason_of(users, caller(1000)) == "admitted"
    assert reason_of(users, caller(1001, 5, 2000)) == "admitted"
    assert reason_of(users, caller(1001, 5)) == "session.user.refused"
    assert reason_of(users, caller(0, 0)) == "session.user.refused"
    assert reason_of(users, caller(1001, 65_534)) == "session.user.refused"
    assert reason_of(users, caller(65_534, 2000)) == "session.user.unmapped"
    everybody = AdmittedUsers(uids=[65_534], groups=[], overflow=lambda: UNMAPPED)
    assert reason_of(everybody, caller(65_534)) == "session.user.unmapped"


def test_who_is_refused_again_and_again_is_counted_but_fills_no_log() -> None:
    metrics = Metrics(is_broker=False)
    now = [0.0]
    refused = RefusedCallers(metrics, clock=lambda: now[0])
    error = VerificationError("session.user.refused", "not one of them")
    with structlog.testing.capture_logs() as lines:
        for _ in range(100):
            refused.note(caller(7), error)
        assert len(lines) == LINES_MAX
        now[0] = PERIOD_SECONDS
        refused.note(caller(7), error)
    assert len(lines) == LINES_MAX + 1
    assert lines[0]["uid"] == 7
    (family,) = metrics.job_callers_refused.collect()
    (sample,) = [each for each in family.samples if each.name.endswith("_total")]
    assert (sample.labels, sample.value) == ({"reason": "session.user.refused"}, 101)


def test_the_kernel_names_the_supplementary_groups_of_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert sorted(peer_groups(ours)) == sorted(os.getgroups())


def test_groups_that_can_not_be_told_admit_nobody() -> None:
    with socket.socket(socket.AF_INET) as other, pytest.raises(OSError, match=r"."):
        peer_groups(other)
