"""Workloads: who sends how much to whom, and when."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

HOSTS: Final = 128
"""Hosts of one data centre; those of the second follow."""
MATRICES: Final = "SEALANE_UNO_TRAFFIC"
"""Environment variable: directory of the traffic matrices of Uno's released code, for replays."""

SHARES: Final = (
    0,
    0.05,
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    0.98,
    0.99,
    0.995,
    1,
)
NEAR_SIZES: Final = (
    9,
    890,
    1_720,
    3_400,
    4_560,
    5_410,
    6_290,
    7_170,
    8_260,
    15_500,
    31_000,
    98_000,
    730_000,
    1_370_000,
    1_700_000,
    2_000_000,
)
"""Quantiles of message sizes within a data centre: web search, in bytes."""
FAR_SIZES: Final = (
    70,
    3_380,
    6_900,
    21_800,
    33_700,
    54_300,
    81_500,
    322_000,
    1_070_000,
    2_090_000,
    5_500_000,
    8_500_000,
    16_200_000,
    24_000_000,
    25_700_000,
    30_000_000,
)
"""Quantiles between data centres: Alibaba's WAN, in bytes."""
FAR_SHARE: Final = 0.2
FLOWS: Final = 5_000
FLOWS_PER_SECOND: Final = FLOWS / 1.46e-3 / 40
"""For each per cent of load on the hosts' links."""

Flow = tuple[int, int, int, int]
"""Sending host, receiving host, start in nanoseconds, bytes."""


Chain = tuple[int, int]
"""A flow's dependency: the flow that it follows, bytes of a chunk."""
PACKET_BYTES: Final = 4096
"""Payload of a packet; chunks are whole packets."""


def is_far(flow: Flow) -> bool:
    """Return True if a flow is between the data centres."""
    return (flow[0] < HOSTS) != (flow[1] < HOSTS)


def incast(*, far: int, near: int, size: int) -> list[Flow]:
    """Return flows of `size` bytes that start at once to one host."""
    to = HOSTS + 112
    senders = [3 + 15 * i for i in range(far)] + [HOSTS + 2 + 13 * i for i in range(near)]
    return [(sender, to, 0, size) for sender in senders]


def behind_incast(*, size: int, messages: int, every_nanos: int) -> list[Flow]:
    """Return a far incast, and short near messages to the same host behind it."""
    random = np.random.default_rng(4)
    flows = incast(far=8, near=0, size=size)
    to = flows[0][1]
    for index in range(messages):
        sender = HOSTS + int(random.integers(0, 100))
        start = 20_000_000 + index * every_nanos
        flows.append((sender, to, start, int(random.integers(4_000, 16_001))))
    return flows


def permutation(seed: int, *, size: int) -> list[Flow]:
    """Return a flow from each host to another one, each host receiving one."""
    random = np.random.default_rng(seed)
    while True:
        receivers = random.permutation(2 * HOSTS)
        if not np.any(receivers == np.arange(2 * HOSTS)):
            return [(sender, int(to), 0, size) for sender, to in enumerate(receivers)]


def mixed(seed: int, *, load: int) -> list[Flow]:
    """Return Poisson flows with the sizes of web search near and of Alibaba's WAN far."""
    random = np.random.default_rng(seed)
    starts = np.cumsum(random.exponential(1e9 / (FLOWS_PER_SECOND * load), FLOWS))
    flows: list[Flow] = []
    for start in starts:
        goes_far = random.random() < FAR_SHARE
        sizes = FAR_SIZES if goes_far else NEAR_SIZES
        size = float(np.exp(np.interp(random.random(), SHARES, np.log(sizes))))
        site, sender = random.integers(0, 2), random.integers(0, HOSTS)
        receiver = random.integers(0, HOSTS)
        while not goes_far and receiver == sender:
            receiver = random.integers(0, HOSTS)
        to = (1 - site if goes_far else site) * HOSTS + receiver
        flows.append((int(site * HOSTS + sender), int(to), int(start), max(1, round(size))))
    return flows


def between_sites(seed: int, *, size: int) -> list[Flow]:
    """Return eight flows from the first data centre to the second."""
    random = np.random.default_rng(seed)
    senders, receivers = (random.choice(HOSTS, 8, replace=False) for _ in range(2))
    pairs = zip(senders, receivers, strict=True)
    return [(int(sender), HOSTS + int(to), 0, size) for sender, to in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """Ring all-reduces beside each other, each over as many workers in either data centre."""

    rings: int
    workers: int
    """Workers of a ring."""
    size: int
    """Bytes that each worker has."""
    rounds: int
    """All-reduces of a ring, one after the other."""

    @property
    def steps(self) -> int:
        """Return the chunks that each worker sends for an all-reduce."""
        return 2 * (self.workers - 1)

    @property
    def chunk_bytes(self) -> int:
        """Return the length of a chunk: a worker's share, in whole packets."""
        return -(-self.size // self.workers // PACKET_BYTES) * PACKET_BYTES


def all_reduce(seed: int, rings: Rings) -> tuple[list[Flow], list[Chain]]:
    """Return the flow of each worker to the next one, ring by ring, and its dependency."""
    random = np.random.default_rng(seed)
    half = rings.workers // 2
    near, far = (random.permutation(HOSTS)[: rings.rings * half] for _ in range(2))
    flows: list[Flow] = []
    chains: list[Chain] = []
    length = rings.rounds * rings.steps * rings.chunk_bytes
    for ring in range(rings.rings):
        part = slice(ring * half, (ring + 1) * half)
        hosts = [*map(int, near[part]), *(HOSTS + int(host) for host in far[part])]
        first = len(flows)
        for index, host in enumerate(hosts):
            flows.append((host, hosts[(index + 1) % len(hosts)], 0, length))
            chains.append((first + (index - 1) % len(hosts), rings.chunk_bytes))
    return flows, chains


def matrix(name: str) -> Sequence[Flow] | None:
    """Return a matrix of Uno's released code; None if MATRICES does not name their directory."""
    directory = os.environ.get(MATRICES)
    if not directory:
        return None
    flows: list[Flow] = []
    for line in (Path(directory) / f"{name}.cm").read_text().splitlines():
        words = line.split()
        if "->" in line:
            sender, to = words[0].split("->")
            flows.append((int(sender), int(to), round(float(words[4]) * 1000), int(words[6])))
    return flows
