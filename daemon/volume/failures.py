"""Reason ids of a target after which a gateway does something else with the volume."""

from typing import Final

ROLLED_BACK: Final = "volume.rolled_back"
"""A target's store lacks changes that were flushed by the last milestone it sent to the gateway.

Or the target doesn't know the term in which the gateway serves its fail-over group.
"""

UNFLUSHED_LOST: Final = "volume.unflushed_lost"
"""Acknowledged, unflushed writes were lost: the gateway's process ended, then the target's."""

STANDBY: Final = "queue.standby"
"""Another gateway serves the volume's fail-over group, or nobody does."""

MOVED: Final = "queue.take_over.term"
"""The fail-over group is in a newer term than a take-over ends."""
