"""How long a test waits for what must happen, whatever else the machine does meanwhile."""

PATIENCE_SECONDS = 60
"""Only what hangs takes longer; the whole test has five times that."""
