"""Timeouts for expected events, long enough for a loaded machine."""

PATIENCE_SECONDS = 60
"""Only what hangs takes longer; the whole test has five times that."""
