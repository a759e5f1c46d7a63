"""W3C Trace Context in the metadata of calls (https://www.w3.org/TR/trace-context/, version 00)."""

import re
from typing import Final

TRACEPARENT_KEY: Final = "traceparent"
"""Of the call's metadata."""
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def parse_traceparent(text: object) -> tuple[int, int, int] | None:
    """Return the trace's id, the parent span's id and the flags; None if `text` is none (§3.2.2).

    Whoever calls may have made it up.
    """
    found = _TRACEPARENT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    trace, span, flags = (int(part, 16) for part in found.groups())
    return (trace, span, flags) if trace and span else None


def format_traceparent(trace: int, span: int, flags: int) -> str:
    """Return the value for the ids of a trace and a span, and the flags (§3.2.2)."""
    return f"00-{trace:032x}-{span:016x}-{flags & 0xFF:02x}"
