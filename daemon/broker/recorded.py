"""Puts a call into the audit log with how it ended, before its answer leaves the broker."""

import contextlib
from collections.abc import AsyncIterator

from sealane.crypto.audit import Detail
from sealane.daemon.broker.audit import Audit
from sealane.errors import Error, UnavailableError

_TEXT_MAX = 128  # a caller's text, as far as the log keeps it


@contextlib.asynccontextmanager
async def recorded(
    audit: Audit, kind: str, *, subject: str, **detail: Detail
) -> AsyncIterator[dict[str, Detail]]:
    """Record the block as granted, with what it adds to the yielded details, or as refused.

    UnavailableError `audit.unwritable` takes the place of the answer if it can't be recorded.
    """
    asked = {k: v[:_TEXT_MAX] if isinstance(v, str) else v for k, v in detail.items()}
    learned: dict[str, Detail] = {}
    try:
        yield learned
    except Error as error:
        await audit.record(
            kind,
            subject=subject,
            outcome="failed" if isinstance(error, UnavailableError) else "refused",
            reason=error.reason,
            **asked,
        )
        raise
    await audit.record(kind, subject=subject, outcome="granted", reason="", **asked, **learned)
