"""When the parity of a message is sent, and when it completes the message (sessions.md).

All data is sent first, then parity in rounds: the first symbol of each block, then the second, and
so on. Blocks already known to be complete are skipped. So in a message longer than a round trip,
only the blocks of the last round trip get parity, and those with units being repeated.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from sealane.planning.model.blocks import BlockLosses, block_losses
from sealane.planning.model.completion import TAIL, Completion, Values
from sealane.planning.model.path import Path

PARITY_BYTES_MAX: Final = 16 << 20
"""Largest parity of the blocks sent in turn, which waits in memory at both ends."""
OLDER_SAMPLES: Final = 8
"""Largest number of samples for the blocks of an age with repeats; neighbours share a sample."""
STEPS_MAX: Final = 256
"""Largest number of rounds followed one by one; beyond it, several at a time."""
BURSTS_FORGOTTEN: Final = 16
"""Number of mean bursts after which a chain's state is independent of a loss."""
LIKELY_MIN: Final = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """Neighbouring blocks of equal depth, sent equally often by the end of the data."""

    transmissions: int
    first: int
    """Number of the first block."""
    count: int
    losses: BlockLosses
    """Losses at the newest transmission of each unit."""
    weight: float
    """Independent events per block: below 1 where the losses of neighbours are correlated."""


@dataclass(frozen=True)
class Tail:
    """The end of a message of `units` data units, coded (k, m), `depth` blocks interleaved.

    A lost unit is retransmitted `step` seconds after its transmission.
    """

    path: Path
    units: int
    k: int
    m: int
    depth: int
    step: float
    gap: float = 0.0
    """Seconds between the last data and the first parity."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return math.ceil(self.units / self.k)

    @property
    def shallow(self) -> int:
        """First block of the last group if that is less deep than the others, else `blocks`."""
        return self.blocks - self.blocks % self.depth

    @property
    def data_end(self) -> float:
        """The time when all data has been sent, in seconds."""
        return self.units * self.path.unit_seconds

    @property
    def breadth(self) -> int:
        """The number of blocks whose parity is sent in turn."""
        return min(self.blocks, max(1, PARITY_BYTES_MAX // (self.m * self.path.unit_bytes)))

    @cached_property
    def ages(self) -> tuple[Age, ...]:
        """The blocks by age, newest first; the last block, which may be short, is separate."""
        end = self.blocks - 1
        found = [self._age(1, self.units - end * self.k, first=end, count=1)]
        transmissions = 1
        group = self.k * self.depth
        while end > 0 and self.lost(transmissions) * self.units > TAIL:
            # Units sent before that time have been sent once more.
            since = self.data_end - transmissions * self.step
            unit = max(0.0, since / self.path.unit_seconds)
            whole = math.ceil(unit / group - 1e-9) * self.depth
            mixed = math.floor(unit / group + 1e-9) * self.depth
            share = unit / group % 1
            for first, older in ((whole, 0.0), (mixed, share)):
                for start in (max(first, self.shallow), first):
                    if start < end:
                        age = self._age(
                            transmissions, self.k, first=start, count=end - start, older=older
                        )
                        found.append(age)
                        end = start
            transmissions += 1
        return tuple(found)

    def lost(self, transmissions: int) -> float:
        """Return the probability that a unit was lost in every one of its transmissions."""
        again = self.path.loss.again_after(round(self.step / self.path.unit_seconds))
        return self.path.loss.rate * again ** (transmissions - 1)

    def schedule(self, resolution: int) -> list[tuple[Age, Values, Values]]:
        """Return each age with the blocks per sample, and the times when their parity is sent.

        Times are [round, sample], in seconds.
        """
        ages, counts, lasts = self._samples(resolution)
        path, k = self.path, self.k
        transmissions = np.array([self.ages[age].transmissions for age in ages])
        ends = np.minimum((lasts // self.depth + 1) * self.depth * k, self.units)
        known = ends * path.unit_seconds + (transmissions - 1) * self.step
        known += path.round_trip_seconds
        # By transmissions: probability that a block is not known to be complete.
        lost = [1.0, *(self.lost(n) for n in range(1, int(transmissions.max()) + 1))]
        lacking = np.array([0.0, *(1 - (1 - rate) ** k for rate in lost)])
        groups = lasts // self.breadth
        numbers = np.unique(groups)
        stride = math.ceil(self.m * len(numbers) / STEPS_MAX)
        times = np.empty((self.m, len(ages)))
        now = self.data_end + self.gap
        for group in numbers:
            mine = np.nonzero(groups == group)[0]
            for start in range(0, self.m, stride):
                rounds = np.arange(min(stride, self.m - start))
                sent = transmissions[mine] + (known[mine] <= now)
                leaves = np.cumsum(counts[mine] * lacking[sent]) * path.unit_seconds
                times[start : start + len(rounds), mine] = (
                    now + leaves + rounds[:, None] * leaves[-1]
                )
                now += float(len(rounds) * leaves[-1])
        return [
            (age, counts[ages == index], times[:, ages == index])
            for index, age in enumerate(self.ages)
        ]

    def _samples(self, resolution: int) -> tuple[Values, Values, Values]:
        """Return samples in the order of blocks: age, number of blocks, last of these blocks."""
        found = []
        for index, age in enumerate(self.ages):
            most = resolution if age.transmissions == 1 else OLDER_SAMPLES
            edges = np.linspace(age.first, age.first + age.count, min(age.count, most) + 1)
            edges = edges.astype(np.int64)
            found.append((np.full(len(edges) - 1, index), np.diff(edges), edges[1:] - 1))
        ages, counts, lasts = (np.concatenate(part[::-1]) for part in zip(*found, strict=True))
        return ages, counts, lasts

    def completion(self, resolution: int) -> tuple[float, Completion, float]:
        """Return the probability that parity suffices, the completion then, and the last parity.

        Times are in seconds, without the acknowledgement.
        """
        log = 0.0
        times, changes = [np.array([self.data_end])], []
        for age, counts, leaves in self.schedule(resolution):
            logs = age.weight * np.log(np.maximum(age.losses.enough, LIKELY_MIN))
            log += age.count * logs[0]
            times.append(leaves.ravel())
            changes.append((np.diff(logs)[:, None] * counts).ravel())
        at = np.concatenate(times)
        order = np.argsort(at[1:], kind="stable")
        logs = np.concatenate(([log], log + np.cumsum(np.concatenate(changes)[order])))
        at = np.concatenate((at[:1], at[1:][order]))
        likely = np.minimum(np.exp(logs - logs[-1]), 1.0)
        return float(np.exp(min(logs[-1], 0.0))), Completion(at, likely), float(at[-1])

    def _age(
        self, transmissions: int, data_units: int, *, first: int, count: int, older: float = 0.0
    ) -> Age:
        """Return the age of some blocks; the share `older` of their units was sent once more."""
        loss = self.path.loss
        depth = self.blocks - self.shallow if first >= self.shallow else self.depth
        is_new = transmissions == 1 and (older == 0 or not loss.is_independent)
        missing = self.lost(transmissions) * (1 - older) + self.lost(transmissions + 1) * older
        # A burst hits neighbours of a group together: each further one is an independent event only
        # as far as the chain forgets in one packet. Repeated units are independent.
        weight = (1 + (depth - 1) * (loss.begin + loss.end)) / depth if is_new else 1.0
        far = math.ceil(BURSTS_FORGOTTEN * loss.burst_packets)
        losses = block_losses(
            loss,
            data_units,
            self.m,
            depth=depth,
            parity_step=1 if loss.is_independent else min(self.breadth, far),
            gap=min(round(self.gap / self.path.unit_seconds), far) if loss.is_timed else 0,
            paths=self.path.count,
            repeated=None if is_new else missing,
        )
        return Age(
            transmissions=transmissions, first=first, count=count, losses=losses, weight=weight
        )
