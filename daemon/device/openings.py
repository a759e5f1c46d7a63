"""Reasons for which brokers end an opening of a device."""

from typing import Final

FENCED: Final = "device.fenced"
FORGOTTEN: Final = "device.forgotten"
MOVED: Final = "device.moved"
OWNER_REFUSED: Final = "device.owner.refused"
MISMATCH: Final = "device.anchor.mismatch"

LOST: Final = frozenset({FENCED, FORGOTTEN, MOVED, OWNER_REFUSED})
"""What an opening that doesn't count any more is refused with."""
GIVEN_AWAY: Final = frozenset({MOVED, OWNER_REFUSED})
"""Those of them that an operator's move is the reason of, who may give the device back."""
