"""Structured logs: one JSON object per line on standard error, with the id of its call.

Events never contain secrets. `correlation_id` comes from a call's metadata or is created at its
start, and is passed on to the next daemon (sealane.daemon.runtime.calls).
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Final, TextIO

import structlog

CORRELATION_KEY: Final = "sealane-correlation-id"


# Priorities of journald for the prefix of a line (sd-daemon(3)).
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


_FIRST: Final = ("event", "reason", "role", "correlation_id", "message")


def priority(level: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a line's prefix for this level; empty unless standard error goes to the journal."""
    return f"<{_PRIORITIES[level]}>" if _is_journal(environment) else ""


def _is_journal(environment: Mapping[str, str]) -> bool:
    """Return True if standard error is the stream that systemd connected to the journal."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class _Renderer:
    """Renders JSON lines, prefixed with priorities if the journal reads them."""

    def __init__(self) -> None:
        self._json = structlog.processors.JSONRenderer()
        self._has_priorities = _is_journal(os.environ)

    def __call__(self, logger: object, name: str, event: structlog.typing.EventDict) -> str:
        line = self._json(logger, name, _in_order(event))
        text = line.decode() if isinstance(line, bytes) else line
        return f"<{_PRIORITIES[event['level']]}>{text}" if self._has_priorities else text


def _in_order(event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Return the fields with those first that a reader of a long line looks for."""
    return {name: event[name] for name in _FIRST if name in event} | dict(event)


class _Lines:
    """Writes lines to a file, and fails no caller: lines that it can't write are lost, and counted.

    A full disk, or a reader that is gone, must not end the work that a line is about.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._writing = threading.Lock()
        self._lost = 0
        self._is_cut = False
        """True after a part of a line."""

    def msg(self, text: str) -> None:
        """Write a line; after lines that were lost, also their number."""
        with self._writing:
            try:
                self._write(text)
                if self._lost:
                    notice = {"event": "log_lines_lost", "lines": self._lost, "level": "warning"}
                    self._write(f"{priority('warning')}{json.dumps(notice)}")
                    self._lost = 0
            except OSError:
                self._lost += 1

    debug = info = warning = error = critical = msg

    def _write(self, text: str) -> None:
        # Not through a buffer, which would fail later, for another line or at the exit.
        left = (f"\n{text}\n" if self._is_cut else f"{text}\n").encode()
        while left:
            left = left[os.write(self._file.fileno(), left) :]
            self._is_cut = bool(left)


def set_up_logs(level: str, *, node: str) -> None:
    """Make every logger of this process write events of at least `level` as JSON lines."""
    lines = _Lines(sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            _Renderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(node=node)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return the logger of this process."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
