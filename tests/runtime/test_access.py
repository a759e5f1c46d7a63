"""Who is admitted and as what, and what is written of those who aren't."""

import os
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sealane.daemon.runtime.access import Access, RefusedCallers
from sealane.daemon.runtime.line_limit import LINES_MAX, PERIOD_SECONDS
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.parties import Members, Party
from sealane.daemon.runtime.peer_groups import peer_groups
from sealane.errors import VerificationError

UNMAPPED = (65_534, 65_534)


def caller(user: int, *groups: int) -> Any:
    return SimpleNamespace(user=user, process=1, groups=frozenset(groups))


def reason_of(access: Access, who: Any) -> str:
    try:
        access.admit(who)
    except VerificationError as error:
        return str(error.reason)
    return "admitted"


def jobs(*, uids: Sequence[int] = (), gids: Sequence[int] = ()) -> Access:
    members = Members(uids=frozenset(uids), gids=frozenset(gids))
    return Access({Party.JOB: members}, overflow=lambda: UNMAPPED)


def test_a_user_is_admitted_by_number_or_by_group_and_what_is_not_mapped_never() -> None:
    access = jobs(uids=[1000], gids=[2000, 65_534])
    assert reason_of(access, caller(1000)) == "admitted"
    assert reason_of(access, caller(1001, 5, 2000)) == "admitted"
    assert reason_of(access, caller(1001, 5)) == "door.user.refused"
    assert reason_of(access, caller(0, 0)) == "door.user.refused"
    assert reason_of(access, caller(1001, 65_534)) == "door.user.refused"
    assert reason_of(access, caller(65_534, 2000)) == "door.user.unmapped"
    everybody = jobs(uids=[65_534])
    assert reason_of(everybody, caller(65_534)) == "door.user.unmapped"
    assert everybody.parties_of(caller(65_534))() == frozenset()


def test_a_caller_is_of_each_party_that_lists_it_until_a_reload_takes_it_off() -> None:
    access = Access(
        {
            Party.OPERATOR: Members(uids=frozenset({1})),
            Party.JOB: Members(gids=frozenset({7})),
            Party.READER: Members(uids=frozenset({1, 2})),
        },
        overflow=lambda: UNMAPPED,
    )
    both = access.parties_of(caller(1))
    assert both() == {Party.OPERATOR, Party.READER}
    job = access.parties_of(caller(2, 7))
    assert job() == {Party.JOB, Party.READER}
    access.replace({Party.READER: Members(uids=frozenset({2}))})
    assert (both(), job()) == (frozenset(), {Party.READER})
    assert reason_of(access, caller(1)) == "door.user.refused"


def test_rings_are_for_jobs_and_operators_and_not_for_readers() -> None:
    access = Access(
        {party: Members(uids=frozenset({number})) for number, party in enumerate(Party, 1)},
        overflow=lambda: UNMAPPED,
    )
    operator, job, reader = (caller(number) for number in (1, 2, 3))
    access.admit_job(operator)
    access.admit_job(job)
    access.admit(reader)
    with pytest.raises(VerificationError) as refused:
        access.admit_job(reader)
    assert refused.value.reason == "door.user.refused"


def test_who_is_refused_again_and_again_is_counted_but_fills_no_log() -> None:
    metrics = Metrics(is_broker=False)
    now = [0.0]
    refused = RefusedCallers(metrics, clock=lambda: now[0])
    error = VerificationError("door.user.refused", "not one of them")
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
    assert (sample.labels, sample.value) == ({"reason": "door.user.refused"}, 101)


def test_the_kernel_names_the_supplementary_groups_of_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert sorted(peer_groups(ours)) == sorted(os.getgroups())


def test_groups_that_can_not_be_told_admit_nobody() -> None:
    with socket.socket(socket.AF_INET) as other, pytest.raises(OSError, match=r"."):
        peer_groups(other)
