"""The plan of a session until the model has made one.

Needs neither numpy nor the model, which take a second to load and to plan.
"""

from typing import Final

from sealane.planning.packet import PACKET_OVERHEAD_BYTES

UNKNOWN_LOSS: Final = 1e-2
"""Loss that messages sent within a round trip must survive on an unknown path. Parity for it is
cheap; without it, one loss costs such a message another round trip."""
_ROWS: Final = ((3, 4, 1), (12, 8, 1), (47, 32, 2), (94, 128, 4), (745, 64, 4))
"""(units of a message, k, m): what the model chooses by p99 for UNKNOWN_LOSS on long paths …"""
_LONGER: Final = (128, 8)
"""… and (k, m) of messages with more units."""
_REPEAT: Final = (64 << 30, 0, 0, 1, 0)
"""The row of messages that are repaired by selective repeat while they are still being sent."""


def first_rows(
    *, rate_bits_per_second: int, round_trip_seconds: float, unit_bytes: int
) -> list[tuple[int, int, int, int, int]]:
    """Return rows of (length_max, k, m, depth, 0): parity for messages sent within a round trip."""
    unit_seconds = (unit_bytes + PACKET_OVERHEAD_BYTES) * 8 / rate_bits_per_second
    units = int(round_trip_seconds / unit_seconds)
    if units == 0:
        return [_REPEAT]
    rows = [(most * unit_bytes, k, m, 1, 0) for most, k, m in _ROWS if most < units]
    k, m = next(((k, m) for most, k, m in _ROWS if most >= units), _LONGER)
    return [*rows, (units * unit_bytes, k, m, 1, 0), _REPEAT]
