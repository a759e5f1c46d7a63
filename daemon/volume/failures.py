"""Reason ids of volumes that fail at their gateway."""

from typing import Final

ROLLED_BACK: Final = "volume.rolled_back"
"""A target's store lacks changes that were flushed by the last milestone it sent to the gateway."""

UNFLUSHED_LOST: Final = "volume.unflushed_lost"
"""Acknowledged, unflushed writes were lost: the gateway's process ended, then the target's."""
