"""Completion of an all-reduce around a ring of sites (SDR-RDMA, arXiv:2505.05366, appendix C).

The array of every site is cut into a segment a site, and a segment into pieces of one message each.
In 2N - 2 steps each site sends one segment on; a piece may go when the one that it is made of has
arrived. The paper's rounds, which end with the acknowledgement, are `depth` 1 with one piece.
"""

import math
from collections import deque
from typing import Final

import numpy as np

from sealane.errors import UsageError
from sealane.planning.model.completion import Values
from sealane.planning.model.path import Path
from sealane.planning.model.schemes import Scheme, completion, wire_units

SITES_MAX: Final = 64


def all_reduce(
    path: Path,
    array_bytes: int,
    sites: int,
    scheme: Scheme,
    *,
    count: int,
    random: np.random.Generator,
    pieces: int = 1,
    depth: int = 16,
) -> Values:
    """Draw `count` times, in seconds, from the common begin until the last site has all.

    All links are the same path, and lose independently of each other. At most `depth` messages of a
    site are unacknowledged. Exact as `completion` is for a piece, but for repetitions that share
    the wire with the pieces behind them. Raises UsageError `model.ring.range`.
    """
    if not 2 <= sites <= SITES_MAX or min(pieces, depth) < 1:
        raise UsageError(
            "model.ring.range",
            f"{sites} sites, {pieces} pieces, {depth} at once: 2 to {SITES_MAX} sites, 1 at least",
        )
    piece_bytes = math.ceil(array_bytes / (sites * pieces))
    message = completion(path, piece_bytes, scheme)
    injection = wire_units(path, piece_bytes, scheme) * path.unit_seconds
    shape = (count, sites)
    free, newest = np.zeros(shape), np.zeros(shape)
    # Of the pieces that the next ones wait for; before the first step nothing is waited for.
    arrived = deque([np.zeros(shape)] * pieces, maxlen=pieces)
    acknowledged = deque([np.zeros(shape)] * depth, maxlen=depth)
    for _ in range(2 * (sites - 1) * pieces):
        before = np.roll(arrived[0], 1, axis=1)
        start = np.maximum(np.maximum(before, free), acknowledged[0])
        index = np.searchsorted(message.cumulative, random.random(shape))
        end = start + message.times[np.minimum(index, len(message.times) - 1)]
        # Messages are taken in order.
        newest = np.maximum(newest, end - path.round_trip_seconds / 2)
        free = start + injection
        arrived.append(newest)
        acknowledged.append(end)
    slowest: Values = newest.max(axis=1)
    return slowest


def all_reduce_ideal(path: Path, array_bytes: int, sites: int, *, pieces: int = 1) -> float:
    """Seconds without loss and parity: 2N - 2 steps of a piece's injection and half a round trip.

    Or as long as the injection of a segment, if its first piece is back before its last has left.
    """
    piece = path.units(math.ceil(array_bytes / (sites * pieces))) * path.unit_seconds
    delay = path.round_trip_seconds / 2
    step = max(piece + delay, pieces * piece)
    return (2 * sites - 3) * step + pieces * piece + delay
