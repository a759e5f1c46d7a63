"""Reasons for which a volume fails at its gateway."""

from typing import Final

ROLLED_BACK: Final = "volume.rolled_back"
"""A target's store lacks what it had flushed when it last told the gateway how far it had come."""

UNFLUSHED_LOST: Final = "volume.unflushed_lost"
"""The gateway's process and then the target's ended, with acknowledged, unflushed writes."""
