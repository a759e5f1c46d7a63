"""Completion of an all-reduce around a ring of sites (SDR-RDMA, arXiv:2505.05366, appendix C).

Each array is cut into N segments, one for each of the N sites, and a segment into pieces of one
message each. In each of 2N - 2 steps, every site sends one segment on; a piece can be sent once the
piece that it is computed from has arrived. The paper's rounds, which end with the acknowledgement,
are `depth` 1 with one piece.
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
    """Draw `count` times, in seconds, from the common start until the last site is done.

    All links are the same path, with independent losses. A site has at most `depth` unacknowledged
    messages. As exact as `completion` is for a piece, except that retransmissions share the wire
    with the pieces behind them. UsageError `model.ring.range`.
    """
    if not 2 <= sites <= SITES_MAX or min(pieces, depth) < 1:
        raise UsageError(
            "model.ring.range",
            f"{sites} sites, {pieces} pieces, depth {depth}; allowed: 2 to {SITES_MAX} sites, at "
            "least 1 piece and depth 1",
        )
    piece_bytes = math.ceil(array_bytes / (sites * pieces))
    message = completion(path, piece_bytes, scheme)
    injection = wire_units(path, piece_bytes, scheme) * path.unit_seconds
    shape = (count, sites)
    free, newest = np.zeros(shape), np.zeros(shape)
    # Arrivals of the pieces for which the next ones wait; there are none before the first step.
    arrived = deque([np.zeros(shape)] * pieces, maxlen=pieces)
    acknowledged = deque([np.zeros(shape)] * depth, maxlen=depth)
    for _ in range(2 * (sites - 1) * pieces):
        before = np.roll(arrived[0], 1, axis=1)
        start = np.maximum(np.maximum(before, free), acknowledged[0])
        index = np.searchsorted(message.cumulative, random.random(shape))
        end = start + message.times[np.minimum(index, len(message.times) - 1)]
        # Messages are received in order.
        newest = np.maximum(newest, end - path.round_trip_seconds / 2)
        free = start + injection
        arrived.append(newest)
        acknowledged.append(end)
    slowest: Values = newest.max(axis=1)
    return slowest


def all_reduce_ideal(path: Path, array_bytes: int, sites: int, *, pieces: int = 1) -> float:
    """Return the time without loss and parity, in seconds.

    There are 2N - 2 steps. Each takes a piece's injection and half a round trip, or a segment's
    injection if its first piece arrives before its last has been sent.
    """
    piece = path.units(math.ceil(array_bytes / (sites * pieces))) * path.unit_seconds
    delay = path.round_trip_seconds / 2
    step = max(piece + delay, pieces * piece)
    return (2 * sites - 3) * step + pieces * piece + delay
