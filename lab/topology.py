"""The model of a topology file (docs/operate/lab.md).

Probabilities are 0 to 1 and per packet; sizes are in bytes of IP packets, including headers.
"""

import itertools
import math
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from sealane._native import LinkSettings
from sealane.errors import UsageError

WANS_MAX: Final = 32
PATHS_MAX: Final = 64
HOSTS_PER_SIDE_MAX: Final = 32
OUTAGES_MAX: Final = 256
# Limit for the packets of one direction in the emulator's memory, queued and in transit.
HELD_BYTES_MAX: Final = 1 << 30
# An interface's name has at most 15 bytes, and hosts name interfaces after links.
_NAME_LENGTH_MAX: Final = 15
_PARTS: Final = 1_000_000_000


def _name(value: str) -> str:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-")
    if not 0 < len(value) <= _NAME_LENGTH_MAX or not set(value) <= allowed or value == "lo":
        raise ValueError(f"1…{_NAME_LENGTH_MAX} of a to z, 0 to 9 and '-', but not 'lo'")
    return value


def _probability(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError("a probability, 0…1")
    return value


def _hosts(names: list[str]) -> list[str]:
    if not 0 < len(names) <= HOSTS_PER_SIDE_MAX or len(set(names)) != len(names):
        raise ValueError(f"1…{HOSTS_PER_SIDE_MAX} hosts, without duplicates")
    return names


Name = Annotated[str, AfterValidator(_name)]
Probability = Annotated[float, AfterValidator(_probability)]
Hosts = Annotated[list[Name], AfterValidator(_hosts)]
Bytes = Annotated[int, Field(ge=0, le=HELD_BYTES_MAX)]
Micros = Annotated[int, Field(ge=0, le=10_000_000)]


class Table(BaseModel):
    """A table of the file: strict types, no unknown keys, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Burst(Table):
    """Loss in bursts: the Gilbert-Elliott model with two states, one step before each packet."""

    p: Probability
    """Probability of the step from the good state to the bad one."""
    r: Probability
    """Probability of the step back to the good state; the mean burst has 1/r packets."""
    loss_bad: Probability = 1.0
    loss_good: Probability = 0.0

    @property
    def loss(self) -> float:
        """The long-term share of packets lost."""
        if self.p + self.r == 0:
            return self.loss_good
        return (self.p * self.loss_bad + self.r * self.loss_good) / (self.p + self.r)


class TimedBursts(Table):
    """Loss of everything for a time; bursts and the times between are exponentially distributed."""

    good_micros: Annotated[int, Field(ge=1, le=10**12)]
    """Mean time between two bursts."""
    bad_micros: Annotated[int, Field(ge=1, le=10**12)]
    """Mean length of a burst, whether it meets many packets or few."""


class Marking(Table):
    """Marking probability: rises linearly from 0 at `low_bytes` to the maximum at `high_bytes`."""

    low_bytes: Bytes
    high_bytes: Bytes
    probability_max: Probability = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_bytes > self.high_bytes:
            raise ValueError("low_bytes up to high_bytes")
        return self

    @property
    def parts(self) -> tuple[int, int, int]:
        """The arguments of the emulator."""
        return self.low_bytes, self.high_bytes, to_parts(self.probability_max)


class Phantom(Marking):
    """A phantom queue: drains at the share `drain` of the rate, and holds up to `cap_bytes`."""

    drain: Probability = 0.952
    cap_bytes: Bytes


class Direction(Table):
    """One direction of a path."""

    rate_bits_per_second: Annotated[int, Field(ge=1000, le=400_000_000_000)]
    delay_micros: Micros
    buffer_bytes: Annotated[int, Field(ge=1500, le=HELD_BYTES_MAX)]
    jitter_micros: Micros = 0
    loss: Probability = 0.0
    burst: Burst | None = None
    timed_bursts: TimedBursts | None = None
    reorder: Probability = 0.0
    reorder_micros_max: Micros = 0
    duplicate: Probability = 0.0
    corrupt: Probability = 0.0
    red: Marking | None = None
    phantom: Phantom | None = None

    @model_validator(mode="after")
    def _check_direction(self) -> Self:
        kinds = (self.loss > 0, self.burst is not None, self.timed_bursts is not None)
        if sum(kinds) > 1:
            raise ValueError("only one of loss, burst and timed_bursts")
        if (self.reorder > 0) != (self.reorder_micros_max > 0):
            raise ValueError("both reorder and reorder_micros_max, or neither")
        self.check_held()
        return self

    def check_held(self, more_micros: int = 0) -> None:
        """Raise ValueError if the buffer and a way that is so much longer hold too much."""
        micros = self.delay_micros + self.jitter_micros + self.reorder_micros_max + more_micros
        held_bytes = self.buffer_bytes + self.rate_bits_per_second * micros // 8_000_000
        if held_bytes > HELD_BYTES_MAX:
            raise ValueError(
                f"up to {HELD_BYTES_MAX} bytes in the buffer and in transit; with this rate, delay "
                f"and buffer it would be {held_bytes}"
            )

    @property
    def settings(self) -> LinkSettings:
        """The settings for the emulator."""
        burst = self.burst
        timed = self.timed_bursts
        phantom = self.phantom
        return LinkSettings(
            rate_bits_per_second=self.rate_bits_per_second,
            delay_nanos=self.delay_micros * 1000,
            buffer_bytes=self.buffer_bytes,
            loss_parts_per_billion=to_parts(self.loss),
            gilbert_elliott=None
            if burst is None
            else (
                to_parts(burst.p),
                to_parts(burst.r),
                to_parts(burst.loss_bad),
                to_parts(burst.loss_good),
            ),
            timed_bursts=None
            if timed is None
            else (timed.good_micros * 1000, timed.bad_micros * 1000),
            jitter_nanos=self.jitter_micros * 1000,
            reorder_parts_per_billion=to_parts(self.reorder),
            reorder_nanos_max=self.reorder_micros_max * 1000,
            duplicate_parts_per_billion=to_parts(self.duplicate),
            corrupt_parts_per_billion=to_parts(self.corrupt),
            red=None if self.red is None else self.red.parts,
            phantom=None
            if phantom is None
            else (to_parts(phantom.drain), phantom.cap_bytes, *phantom.parts),
        )


class Outage(Table):
    """A time in which a path is down in both directions, from the start of the schedule."""

    path: Annotated[int, Field(ge=0, lt=PATHS_MAX)] = 0
    start_seconds: Annotated[float, Field(ge=0, le=1e6)]
    end_seconds: Annotated[float, Field(ge=0, le=1e6)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start_seconds >= self.end_seconds:
            raise ValueError("start_seconds less than end_seconds")
        return self

    @property
    def nanos(self) -> tuple[int, int, int]:
        """Path, start and end for the emulator, in nanoseconds."""
        return self.path, round(self.start_seconds * 1e9), round(self.end_seconds * 1e9)


class Detour(Outage):
    """A time in which packets of a path go a longer way; those behind it overtake them."""

    more_micros: Annotated[Micros, Field(gt=0)]
    """How much later they arrive."""


class Way(Direction):
    """One direction of a long link: its paths are equal."""

    strip_ce: bool = False
    """What crosses arrives with ECT(0) instead of CE, as on a path that erases marks."""


class Wan(Way):
    """A long link between the hosts of two sides; its own keys are those of the way forward."""

    name: Name
    left: Hosts
    right: Hosts
    paths: Annotated[int, Field(ge=1, le=PATHS_MAX)] = 1
    corruption_passes_checksum: bool = False
    outages: Annotated[list[Outage], Field(default_factory=list, max_length=OUTAGES_MAX)]
    detours: Annotated[list[Detour], Field(default_factory=list, max_length=OUTAGES_MAX)]
    backward: Way
    access: Direction | None = None
    """The cable between each host and its site, both ways; None: none, and hosts of a site reach
    each other without a link."""
    forward_to: str | None = None
    """Without namespaces: the UDP address to which this link forwards."""

    @model_validator(mode="before")
    @classmethod
    def _fill_backward(cls, value: Any) -> Any:
        """Take the keys that `backward` lacks from the way forward."""
        if not isinstance(value, dict) or not isinstance(value.get("backward", {}), dict):
            return value
        own = value.get("backward", {})
        shared = {key: value[key] for key in Way.model_fields if key in value}
        kinds = {"loss", "burst", "timed_bursts"}
        if kinds & own.keys():
            # A direction can have only one of these.
            shared = {key: shared[key] for key in shared.keys() - kinds}
        return {**value, "backward": {**shared, **own}}

    @field_validator("forward_to")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
            if not is_port or not host.startswith("127."):
                raise ValueError("a numeric loopback address:port")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if both := set(self.left) & set(self.right):
            raise ValueError(f"each host on one side only, not {', '.join(sorted(both))} on both")
        if missing := [o.path for o in self.outages if o.path >= self.paths]:
            raise ValueError(f"outages of paths 0…{self.paths - 1}, not of path {missing[0]}")
        if missing := [d.path for d in self.detours if d.path >= self.paths]:
            raise ValueError(f"detours of paths 0…{self.paths - 1}, not of path {missing[0]}")
        by_path = sorted(self.detours, key=lambda detour: (detour.path, detour.start_seconds))
        for one, other in itertools.pairwise(by_path):
            if one.path == other.path and other.start_seconds < one.end_seconds:
                raise ValueError(f"detours of path {one.path} one after the other")
        longest = max((detour.more_micros for detour in self.detours), default=0)
        self.check_held(longest)
        self.backward.check_held(longest)
        return self

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of both sides, those on the left first."""
        return (*self.left, *self.right)

    def packets_per_second(self, mtu: int) -> float:
        """Return the full packets per second with all paths, or all hosts, at full rate."""
        rates = self.rate_bits_per_second + self.backward.rate_bits_per_second
        near = 0 if self.access is None else self.access.rate_bits_per_second * len(self.hosts)
        return max(self.paths * rates, near) / (8 * mtu)


class Topology(Table):
    """The whole file."""

    mtu: Annotated[int, Field(ge=1280, le=9000)] = 1500
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    slip_micros_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """A packet that leaves later than this after its due time is late."""
    late_max: Probability = 0.01
    """A run with a larger share of late packets is void."""
    wan: Annotated[list[Wan], Field(min_length=1, max_length=WANS_MAX)]

    @field_validator("wan")
    @classmethod
    def _check_names(cls, wans: list[Wan]) -> list[Wan]:
        if len({wan.name for wan in wans}) != len(wans):
            raise ValueError("names without duplicates")
        return wans

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, in the order of the file."""
        return tuple(dict.fromkeys(host for wan in self.wan for host in wan.hosts))

    @property
    def packets_per_second(self) -> int:
        """Full packets per second over all links when all are busy in both directions."""
        return math.ceil(sum(wan.packets_per_second(self.mtu) for wan in self.wan))


def to_parts(probability: float) -> int:
    """Return a probability in the emulator's parts per billion."""
    return round(probability * _PARTS)


def check_name(name: str) -> str:
    """Return `name` if it is a valid lab name; UsageError `lab.name` otherwise."""
    try:
        return _name(name)
    except ValueError as error:
        raise UsageError("lab.name", f"name: found {name!r}; allowed: {error}") from None
