"""Monte-Carlo simulation of the schemes, unit by unit, which checks the closed forms.

Deterministic for a seeded generator. Handles independent losses and bursts; a burst's chain steps
once per packet, including retransmissions.
"""

import numpy as np
from numpy.typing import NDArray

from sealane.planning.model.completion import Values
from sealane.planning.model.path import Loss, Path
from sealane.planning.model.schemes import Scheme, SelectiveRepeat
from sealane.planning.model.tail import Tail

Flags = NDArray[np.bool_]


def sample(
    path: Path, message_bytes: int, scheme: Scheme, count: int, random: np.random.Generator
) -> Values:
    """Draw `count` completion times, in seconds."""
    step = scheme.timeout_factor * path.round_trip_seconds + path.unit_seconds
    units = path.units(message_bytes)
    last = np.full(count, units * path.unit_seconds)
    if isinstance(scheme, SelectiveRepeat):
        lost = sample_losses(path.loss, units, count, random)
        times = np.broadcast_to(np.arange(1, units + 1) * path.unit_seconds, lost.shape)
    else:
        tail = Tail(path, units, scheme.k, scheme.m, scheme.depth, step, scheme.gap_seconds)
        lost, times = _sample_blocks(tail, last, random)
    _repeat(path, step, (lost, times), last, random)
    return last + path.round_trip_seconds


def sample_losses(loss: Loss, units: int, count: int, random: np.random.Generator) -> Flags:
    """Draw which of `units` consecutive packets are lost, `count` times."""
    if loss.is_independent:
        return random.random((count, units)) < loss.rate
    lost = np.empty((count, units), dtype=np.bool_)
    state = random.random(count) < loss.rate
    lost[:, 0] = state
    for unit in range(1, units):
        state = random.random(count) < np.where(state, 1 - loss.end, loss.begin)
        lost[:, unit] = state
    return lost


def data_blocks(tail: Tail) -> NDArray[np.int64]:
    """Return the block of each data unit, in the order of first transmission."""
    units = np.arange(tail.units)
    group = units // (tail.k * tail.depth)
    # Within a group, the first units of all blocks are sent first; the last block may be short.
    order = np.lexsort((units // tail.k, units % tail.k, group))
    return np.asarray(order // tail.k)


def _sample_blocks(tail: Tail, last: Values, random: np.random.Generator) -> tuple[Flags, Values]:
    """Draw the units that must be retransmitted after the parity, and when each was sent.

    Raises `last` to the time when the last block that needs none of them is complete.
    """
    path, m = tail.path, tail.m
    data = data_blocks(tail)
    rounds = _parity_blocks(tail)
    lost = sample_losses(path.loss, tail.units + len(rounds), len(last), random)
    times = np.empty(lost.shape)
    known = np.zeros((len(last), tail.blocks))
    for unit, block in enumerate(data.tolist()):
        at = np.full(len(last), (unit + 1) * path.unit_seconds)
        while True:
            # Losses known before the end of the data are retransmitted at once.
            again = lost[:, unit] & (at + tail.step < tail.data_end)
            if not again.any():
                break
            at[again] += tail.step
            lost[again, unit] = random.random(int(again.sum())) < path.loss.again
        times[:, unit] = at
        arrived = np.where(lost[:, unit], np.inf, at + path.round_trip_seconds)
        np.maximum(known[:, block], arrived, out=known[:, block])
    now = last.copy()
    for unit, block in enumerate(rounds.tolist(), tail.units):
        now += np.where(known[:, block] > now, path.unit_seconds, 0.0)
        times[:, unit] = now
    owners = np.concatenate((data, rounds))
    for number in range(tail.blocks):
        places = np.nonzero(owners == number)[0]
        needed = len(places) - m
        mine = lost[:, places]
        # Each loss beyond the m-th leaves the block short of a unit.
        lacks = mine & (np.cumsum(mine, axis=1) > m)
        arrived = np.cumsum(~mine, axis=1) >= needed
        done = np.take_along_axis(times, places[np.argmax(arrived, axis=1)][:, None], axis=1)[:, 0]
        np.maximum(last, np.where(arrived[:, -1], done, 0.0), out=last)
        lost[:, places] = lacks
    return lost, times


def _parity_blocks(tail: Tail) -> NDArray[np.int64]:
    """Return the block of each parity unit, in the order of transmission."""
    groups = [
        np.tile(np.arange(first, min(first + tail.breadth, tail.blocks)), tail.m)
        for first in range(0, tail.blocks, tail.breadth)
    ]
    return np.concatenate(groups)


def _repeat(
    path: Path,
    step: float,
    sent: tuple[Flags, Values],
    last: Values,
    random: np.random.Generator,
) -> None:
    """Retransmit losses round by round; raises `last` to when the last of them has arrived."""
    lost, times = sent
    owner, place = np.nonzero(lost)
    repeats = 0
    while owner.size:
        repeats += 1
        np.maximum.at(last, owner, times[owner, place] + repeats * step)
        starts = np.concatenate(([True], owner[1:] != owner[:-1]))
        still = _chain(path.loss, starts, random)
        owner, place = owner[still], place[still]


def _chain(loss: Loss, starts: Flags, random: np.random.Generator) -> Flags:
    """Draw the losses of consecutive packets; the chain restarts wherever `starts` is True."""
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
