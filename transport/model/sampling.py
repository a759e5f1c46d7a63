"""Monte-Carlo of the same schemes, unit by unit: what checks the closed forms.

Deterministic for a seeded generator. Independent losses and bursts alike; the chain of a burst
steps once for each packet, repeated ones included.
"""

import numpy as np
from numpy.typing import NDArray

from sealane.transport.model.completion import Values
from sealane.transport.model.path import Loss, Path
from sealane.transport.model.schemes import ErasureCoded, Scheme, SelectiveRepeat

Flags = NDArray[np.bool_]


def sample(
    path: Path, message_bytes: int, scheme: Scheme, count: int, random: np.random.Generator
) -> Values:
    """Draw `count` completion times, in seconds."""
    step = scheme.timeout_factor * path.round_trip_seconds + path.unit_seconds
    units = path.units(message_bytes)
    if isinstance(scheme, SelectiveRepeat):
        lost = sample_losses(path.loss, units, count, random)
        last = np.full(count, units * path.unit_seconds)
    else:
        lost, last = _sample_blocks(path, units, scheme, count, random)
    _repeat(path, step, lost, last, random)
    return last + path.round_trip_seconds


def sample_losses(loss: Loss, units: int, count: int, random: np.random.Generator) -> Flags:
    """Draw what is lost of `units` packets in a row, `count` times."""
    if loss.is_independent:
        return random.random((count, units)) < loss.rate
    lost = np.empty((count, units), dtype=np.bool_)
    state = random.random(count) < loss.rate
    lost[:, 0] = state
    for unit in range(1, units):
        state = random.random(count) < np.where(state, 1 - loss.end, loss.begin)
        lost[:, unit] = state
    return lost


def transmission_order(units: int, scheme: ErasureCoded) -> tuple[NDArray[np.int64], ...]:
    """Block and place in the block of each unit, in the order of first transmission."""
    blocks = -(-units // scheme.k)
    sizes = [min(scheme.k, units - block * scheme.k) + scheme.m for block in range(blocks)]
    order = [
        (block, place)
        for start in range(0, blocks, scheme.depth)
        for place in range(max(sizes[start : start + scheme.depth]))
        for block in range(start, min(start + scheme.depth, blocks))
        if place < sizes[block]
    ]
    block, place = np.array(order, dtype=np.int64).T
    return block, place


def _sample_blocks(
    path: Path, units: int, scheme: ErasureCoded, count: int, random: np.random.Generator
) -> tuple[Flags, Values]:
    """Draw the units that must be sent again, and when the last block is whole without any."""
    block, _ = transmission_order(units, scheme)
    lost = sample_losses(path.loss, len(block), count, random)
    last = np.zeros(count)
    for number in range(int(block.max()) + 1):
        places = np.nonzero(block == number)[0]
        needed = len(places) - scheme.m
        mine = lost[:, places]
        # Losses beyond the m-th make the block lack a unit each.
        lacks = mine & (np.cumsum(mine, axis=1) > scheme.m)
        arrived = np.cumsum(~mine, axis=1)
        is_whole = arrived[:, -1] >= needed
        done = places[np.argmax(arrived >= needed, axis=1)] + 1
        np.maximum(last, np.where(is_whole, done * path.unit_seconds, 0.0), out=last)
        lost[:, places] = lacks
    return lost, last


def _repeat(
    path: Path, step: float, lost: Flags, last: Values, random: np.random.Generator
) -> None:
    """Send what is lost again, round by round; raises `last` to when the last of it is in."""
    owner, place = np.nonzero(lost)
    repeats = 0
    while owner.size:
        repeats += 1
        np.maximum.at(last, owner, (place + 1) * path.unit_seconds + repeats * step)
        starts = np.concatenate(([True], owner[1:] != owner[:-1]))
        still = _chain(path.loss, starts, random)
        owner, place = owner[still], place[still]


def _chain(loss: Loss, starts: Flags, random: np.random.Generator) -> Flags:
    """Lose packets in a row, each row beginning anew where `starts` says so."""
    draws = random.random(len(starts))
    if loss.is_independent:
        return draws < loss.rate
    lost = np.empty(len(starts), dtype=np.bool_)
    state = False
    for index, (is_first, draw) in enumerate(zip(starts.tolist(), draws.tolist(), strict=True)):
        threshold = loss.rate if is_first else (1 - loss.end if state else loss.begin)
        state = draw < threshold
        lost[index] = state
    return lost
