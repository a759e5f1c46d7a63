"""Puts calls that were refused into the audit log; what was granted the service records itself."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from sealane.crypto.audit import Detail
from sealane.daemon.broker.audit import Audit
from sealane.errors import Error, UnavailableError

TEXT_MAX: Final = 128  # characters of a caller's text that the log keeps


@contextlib.asynccontextmanager
async def refusals_recorded(
    audit: Audit, kind: str, *, subject: str, **detail: Detail
) -> AsyncIterator[None]:
    """Record that the block was refused, or failed, if it was; before the answer leaves.

    UnavailableError `audit.unwritable` takes the place of the answer if it can't be recorded.
    """
    try:
        yield
    except Error as error:
        asked = {k: v[:TEXT_MAX] if isinstance(v, str) else v for k, v in detail.items()}
        await audit.record(
            kind,
            subject=subject,
            outcome="failed" if isinstance(error, UnavailableError) else "refused",
            reason=error.reason,
            **asked,
        )
        raise
