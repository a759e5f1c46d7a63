"""Retention of the audit log: which of its oldest segments are retired when it is cut."""

import datetime as dt
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sealane.crypto.audit import Head
from sealane.daemon.broker.audit_segments import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much of the log is kept: None is everything.

    If `is_forwarded`, only what a collector has may be retired.
    """

    age: dt.timedelta | None = None
    bytes_max: int | None = None
    is_forwarded: bool = False


def beginning_after(
    segments: Sequence[Segment],
    retention: Retention,
    *,
    now: dt.datetime,
    forwarded: int | None,
) -> Head:
    """Return where a log of these closed segments begins from now on.

    The last segment always stays, and so do those with a record after number `forwarded`; None if
    records aren't forwarded.
    """
    beginning = segments[0].before
    total = sum(segment.size for segment in segments)
    for segment, successor in itertools.pairwise(segments):
        last = successor.before
        # All its records are older than the next segment's first one.
        is_old = retention.age is not None and now - successor.started > retention.age
        is_too_much = retention.bytes_max is not None and total > retention.bytes_max
        if not (is_old or is_too_much):
            break
        if forwarded is not None and last.sequence > forwarded:
            break
        total -= segment.size
        beginning = last
    return beginning
