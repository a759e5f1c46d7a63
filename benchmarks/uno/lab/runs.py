"""A run: who sends what, what was seen, and what is kept of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from benchmarks.uno.cells import jain, times
from benchmarks.uno.lab.arrivals import mixed
from benchmarks.uno.lab.cells import (
    FAR,
    FAR_MICROS,
    LINE,
    NEAR,
    NEAR_MICROS,
    PROBE_BYTES,
    Scheme,
    Traffic,
)
from benchmarks.uno.lab.fairness import Span, fair_after, in_steps, indices, under_way
from numpy.typing import NDArray

FAR_WAY_SECONDS: Final = FAR_MICROS / 2e6
NEAR_WAY_SECONDS: Final = NEAR_MICROS / 2e6
"""Time from a sender to the receiver without queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """A host's connections to the receiver, and the messages that they carry."""

    kind: str
    """`far`, `near`, or `probe`: a near one with short messages."""
    host: str
    connections: int
    messages: tuple[tuple[float, int], ...]
    """Seconds from the start, and bytes, in order of time."""

    @property
    def longest(self) -> int:
        """Length of the longest message, in bytes."""
        return max((length for _, length in self.messages), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the emulator said while messages were under way."""

    at: float
    """Seconds from the start."""
    queued: int
    """Bytes before the receiver."""
    arrived: tuple[int, ...]
    """Bytes that have arrived at the receiver, by sending host."""
    sent: int
    """Bytes that all senders have put on their wires."""
    emulator_seconds: float
    """Processor time of the emulator."""


Spans = list[tuple[int, float, float]]
"""Number of a message, and when it was sent and acknowledged, in seconds from the start."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What was seen of a run."""

    spans: list[tuple[Sender, Spans]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    idle: float = 1.0
    """Share of idle processor time."""
    processor_seconds: float = 0.0
    """Of all sending and receiving processes: jobs and, for sessions, fabrics."""
    void: list[str] = field(default_factory=list)
    """Reasons for which the run says nothing."""

    @property
    def payload(self) -> int:
        """Bytes of all messages that were acknowledged."""
        return sum(sender.messages[span[0]][1] for sender, mine in self.spans for span in mine)

    @property
    def unfinished(self) -> int:
        """Messages that were not acknowledged."""
        return sum(len(sender.messages) - len(mine) for sender, mine in self.spans)

    def times(self, *kinds: str) -> list[float]:
        """Return the completion times of messages of some kinds, in seconds.

        They count from a message's arrival, also if it waits for a connection; those of probes,
        which are sent one after the other, from when they are sent.
        """
        return [
            ended - (sent if sender.kind == "probe" else sender.messages[number][0])
            for sender, mine in self.spans
            if sender.kind in kinds
            for number, sent, ended in mine
        ]


def senders(traffic: Traffic, seed: int) -> list[Sender]:
    """Return who sends what; `seed` chooses the arrivals of mixed load."""
    arrivals = mixed(seed, load=traffic.load, seconds=traffic.seconds) if traffic.load else []
    found = []
    for kind, hosts, count in (("far", FAR, traffic.far), ("near", NEAR, traffic.near)):
        for number, host in enumerate(hosts):
            connections = len(range(number, count, len(hosts)))
            messages = [(each.at, each.bytes) for each in arrivals if each.host == host]
            if not traffic.load:
                messages = [(0.0, traffic.bytes)] * connections
            if connections and messages:
                found.append(
                    Sender(kind=kind, host=host, connections=connections, messages=tuple(messages))
                )
    if traffic.probes:
        messages = [(0.0, PROBE_BYTES)] * traffic.probes
        found.append(Sender(kind="probe", host=NEAR[0], connections=1, messages=tuple(messages)))
    return found


def shares(found: Found, hosts: Sequence[str]) -> list[tuple[float, float]]:
    """Return (start, Jain's index) of intervals, over the hosts that have something to send.

    `hosts` are those of the samples' counts. Probes want no share.
    """
    taken = in_steps([each.at for each in found.samples], [each.arrived for each in found.samples])
    spans: list[list[Span]] = [[] for _ in hosts]
    for sender, mine in found.spans:
        if sender.kind == "probe":
            continue
        way = FAR_WAY_SECONDS if sender.kind == "far" else NEAR_WAY_SECONDS
        done = {number: ended for number, _, ended in mine}
        last = found.samples[-1].at + way
        # The first byte arrives a way later, and the last one a way before the answer.
        spans[hosts.index(sender.host)] += [
            (at + way, done.get(number, last) - way)
            for number, (at, _) in enumerate(sender.messages)
        ]
    return indices(taken, under_way(spans, len(taken)))


def record(
    scheme: Scheme,
    traffic: Traffic,
    number: int,
    found: Found,
    shares: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """Return what was found as JSON values, in the form of a cell in virtual time."""

    def of(*kinds: str) -> dict[str, float] | None:
        known = times(1000 * np.array(found.times(*kinds)))
        return None if known is None else asdict(known)

    far, near = of("far"), of("near")
    # The rates of messages of mixed lengths say nothing of fairness.
    is_mixed = traffic.load > 0
    first, last = found.samples[0], found.samples[-1]
    gigabytes = found.payload / 1e9
    queue = float(np.quantile([sample.queued for sample in found.samples], 0.99))
    return {
        "key": json.dumps([scheme.name, traffic.name, number]),
        "figure": "lab",
        "workload": traffic.name,
        "scheme": scheme.name,
        "seed": number,
        "all": of("far", "near"),
        "far": far,
        "near": of("probe") if traffic.probes else near,
        "unfinished": found.unfinished,
        "jain": None if is_mixed else jain(rates(traffic, found)),
        "near_per_far": far["mean"] / near["mean"] if far and near and not is_mixed else None,
        "queue_p99": queue,
        "queue_p99_millis": queue * 8000 / LINE,
        "wire_per_payload": (last.sent - first.sent) / found.payload if found.payload else 0.0,
        "shares": [[round(start, 3), round(index, 4)] for start, index in shares],
        "jain_steps": float(np.mean([index for _, index in shares])) if shares else None,
        "fair_after": fair_after(shares),
        "payload": found.payload,
        "processor_per_gb": found.processor_seconds / gigabytes if gigabytes else None,
        "emulator_per_gb": (last.emulator_seconds - first.emulator_seconds) / gigabytes
        if gigabytes
        else None,
    }


def rates(traffic: Traffic, found: Found) -> NDArray[np.float64]:
    """Return what each long message had of the line, in messages a second."""
    given_up = sum(
        len(sender.messages) - len(mine) for sender, mine in found.spans if sender.kind != "probe"
    )
    # One that was given up had next to nothing.
    least = [1 / (10 * traffic.seconds_max)] * given_up
    return np.array([1 / taken for taken in found.times("far", "near")] + least)
