"""Health of the broker: reports an unusable store or audit log, and ends if that is permanent.

A process can't recover from some failures: a commit of unknown outcome on SQLite, an audit log of
unknown content, records that no broker wrote, a newer process in its place. It then ends, and
systemd starts another process, unless what was found can't be trusted (exit code 3).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.store.checked import CheckedStore
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UnavailableError

RETRY_SECONDS: Final = 1.0
"""Interval at which a store that didn't answer is tried again."""


async def end_with(store: CheckedStore) -> None:
    """Wait until no later call to `store` can succeed, and raise the failure."""
    raise await store.failed()


async def keep_health(store: CheckedStore, report: Callable[[bool], Awaitable[None]]) -> None:
    """Report False from the first unanswered call to `store` until it answers again."""
    while True:
        await store.troubled()
        await report(False)
        get_logger().error("store_unavailable")
        while store.is_troubled:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                await store.revision()
            except UnavailableError as error:
                get_logger().warning(
                    "store_still_unavailable", reason=error.reason, message=error.args[0]
                )
        await report(True)
        get_logger().info("store_available")


async def keep_audit(
    log: AuditLog,
    report: Callable[[bool], Awaitable[None]],
    *,
    metrics: Metrics,
    seconds: float,
) -> None:
    """Inspect the audit log periodically, and report while it has only its reserve left.

    Ends only with an error that must end the broker: VerificationError `audit.truncated`,
    UnavailableError `audit.unwritable`.
    """
    while True:
        was_low = log.is_low
        metrics.broker.audit_log_low.set(was_low)
        await report(not was_low)
        try:
            async with asyncio.timeout(RETRY_SECONDS if was_low else seconds):
                if was_low:
                    await asyncio.Event().wait()
                await log.troubled()
        except TimeoutError:
            pass
        await log.inspect()
