"""Reasons for which brokers end an opening of a device."""

from typing import Final

FENCED: Final = "device.fenced"
FORGOTTEN: Final = "device.forgotten"
MOVED: Final = "device.moved"
OWNER_REFUSED: Final = "device.owner.refused"
MISMATCH: Final = "device.anchor.mismatch"

LOST: Final = frozenset({FENCED, FORGOTTEN, MOVED, OWNER_REFUSED})
"""Refusals of an opening that is no longer valid."""
GIVEN_AWAY: Final = frozenset({MOVED, OWNER_REFUSED})
"""Those caused by an operator's move; another move may give the device back."""
