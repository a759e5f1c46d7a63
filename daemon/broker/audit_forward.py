"""Forwards the audit log to a collector, in order and at least once.

Nothing waits for the collector. Records are read back from the log's files, a batch at a time.

The position moves by whole batches. A batch that the collector didn't take, because it is slow or
refuses one of the records, is followed by smaller ones, down to a single record: so all records
before the one that it doesn't take arrive, and only that one is repeated.
"""

import asyncio
import time
from pathlib import Path
from typing import Final

from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.audit_collector import AuditCollector, SendRecords
from sealane.daemon.broker.audit_source import AuditSource
from sealane.daemon.broker.audit_syslog import SyslogTcp, SyslogUnix
from sealane.daemon.config import AuditForwardConfig
from sealane.daemon.runtime.logs import get_logger

BATCH_BYTES: Final = 256 << 10
"""The largest batch, plus a record."""
BATCH_STEP: Final = 4
"""How much smaller the batch after one that wasn't taken is, and how much larger after others."""
BRISK_SECONDS: Final = 1.0
"""A batch that was taken within that is followed by a larger one."""
PAUSE_SECONDS: Final = 1.0
"""Pause after a batch that had all records, and before the first new attempt."""
BACK_OFF_SECONDS: Final = 60.0
"""Longest pause between attempts."""


def collector_of(config: AuditForwardConfig, *, node: str) -> AuditCollector:
    """Return the collector of a configuration.

    UsageError `config.unreadable`, `config.size` or `config.value`.
    """
    match config.kind:
        case "otlp":
            from sealane.daemon.broker.audit_otlp import Otlp  # noqa: PLC0415

            return Otlp(config.address, config.ca_file, node=node)
        case "unix":
            return SyslogUnix(config.address)
        case "tcp":
            return SyslogTcp(config.address, config.ca_file, node=node)


class AuditForwarder:
    """Forwards the records of `log`; `run` ends only if the log was tampered with."""

    def __init__(
        self, log: AuditLog, config: AuditForwardConfig, *, node: str, position: Path
    ) -> None:
        """Keep the position in the file `position`. Raises what `collector_of` does."""
        self._log = log
        self._address = config.address
        self._collector = collector_of(config, node=node)
        self._source = AuditSource(log, position)
        self._pause = PAUSE_SECONDS
        self._batch_bytes = BATCH_BYTES
        self._is_away = False

    async def run(self) -> None:
        """Forward until cancelled; VerificationError `audit.…`."""
        try:
            while True:
                try:
                    await self._forward()
                except (OSError, UnicodeError) as error:
                    # UnicodeError: a host that the resolver can't encode.
                    self._lost(error)
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, BACK_OFF_SECONDS)
        finally:
            self._source.close()

    async def _forward(self) -> None:
        """Forward over one connection until it ends: OSError."""
        position = await asyncio.to_thread(self._source.rewind)
        self._log.forwarded = position.sequence
        async with self._collector.connect() as send:
            while True:
                await self._log.advanced(self._source.head.sequence)
                lines = await asyncio.to_thread(self._source.read, self._batch_bytes)
                await self._send(send, lines)
                await asyncio.to_thread(self._source.keep)
                self._log.forwarded = self._source.head.sequence
                self._found()
                if self._source.head == self._log.head:
                    await asyncio.sleep(PAUSE_SECONDS)

    async def _send(self, send: SendRecords, lines: list[bytes]) -> None:
        """Send a batch, and choose the size of the next one: OSError."""
        begun = time.monotonic()
        try:
            await send(lines)
        except OSError:
            self._batch_bytes = max(1, self._batch_bytes // BATCH_STEP)
            raise
        if time.monotonic() - begun < BRISK_SECONDS:
            self._batch_bytes = min(BATCH_STEP * self._batch_bytes, BATCH_BYTES)

    def _lost(self, error: Exception) -> None:
        if not self._is_away:
            get_logger().warning(
                "audit_forward_lost",
                address=self._address,
                forwarded=self._log.forwarded,
                message=f"audit records wait in the log: {str(error) or type(error).__name__}",
            )
        self._is_away = True

    def _found(self) -> None:
        self._pause = PAUSE_SECONDS
        if self._is_away:
            get_logger().info("audit_forward_resumed", address=self._address)
        self._is_away = False
