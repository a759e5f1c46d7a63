"""Random numbers of a transaction."""

from collections.abc import Callable


def random_sequence(random: Callable[[int], bytes]) -> int:
    """Pick a challenge's sequence number; never 0, which stands for no challenge."""
    return int.from_bytes(random(4)) or 1


def random_transaction(random: Callable[[int], bytes]) -> int:
    """Pick the identifier of a new transaction."""
    return int.from_bytes(random(2))
