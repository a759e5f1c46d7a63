"""Requests that can't even be written down."""

import contextlib
from collections.abc import Iterator

from sealane.errors import UsageError


@contextlib.contextmanager
def sayable(reason: str) -> Iterator[None]:
    """Raise UsageError `reason` for values that no request can have."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(reason, str(error)) from error
