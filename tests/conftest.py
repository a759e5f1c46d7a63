"""Settings and fixtures for all tests."""

import os

from hypothesis import settings

# No time limit per example: it would depend on the machine.
settings.register_profile("gate", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "hunt", deadline=None, max_examples=int(os.environ.get("CASES", "5000")), print_blob=True
)
settings.load_profile("gate")
