"""Structured logs: one JSON object a line on standard error, with the id of the call it is about.

No secret is ever a value of an event; `correlation_id` comes from a call's metadata or is made at
its start, and follows the call to the next daemon (sealane.daemon.calls).
"""

import logging
import sys
from typing import Final

import structlog

CORRELATION_KEY: Final = "sealane-correlation-id"


def set_up_logs(level: str, *, node: str) -> None:
    """Make every logger of this process write JSON lines of at least `level`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(node=node)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return the logger of this process."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
