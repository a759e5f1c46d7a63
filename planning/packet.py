"""The size of a session's packet beside its payload.

In a file of its own, for modules that don't load the model and numpy.
"""

from typing import Final

PACKET_OVERHEAD_BYTES: Final = 32 + 7 + 16 + 28
"""Header, message descriptor and tag of a unit's packet (session-wire.md), IPv4 and UDP."""
