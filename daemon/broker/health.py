"""Honest health: a broker whose store or log can't be used says so, and ends if that won't change.

A process can't recover from some failures: a commit of unknown outcome on SQLite, an audit log of
unknown content, records that no broker wrote, a newer process in its place. It then ends, and
systemd starts another one unless what was found can't be trusted (exit code 3).
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
"""How often a store that didn't answer is asked whether it does again."""


async def end_with(store: CheckedStore) -> None:
    """Wait until no later call to `store` can succeed, and raise its failure."""
    raise await store.failed()


async def keep_health(store: CheckedStore, report: Callable[[bool], Awaitable[None]]) -> None:
    """Report False from the first call that `store` didn't answer until it answers again."""
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
    """Inspect the audit log every so often, and report while it has nothing left but its reserve.

    Leaves by an error after which the broker must end: VerificationError `audit.truncated`,
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
