"""The report of a run over a lab: counts, the delay error of this machine, and a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sealane.lab.topology import Topology

_WAYS = (("forward", "→"), ("backward", "←"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction of one link in one run; `slip` is how late packets left, in microseconds."""

    wan: str
    direction: str
    packets: int
    """Packets offered to the link."""
    bytes: int
    delivered: int
    lost: int
    overflowed: int
    down: int
    dropped_early: int
    marked: int
    reordered: int
    duplicated: int
    corrupted: int
    late: int
    slip_p50_micros: float
    slip_p99_micros: float
    slip_max_micros: float
    packets_by_path: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run; it is void if `void` has any reasons."""

    ways: list[Way]
    foreign: int
    void: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return asdict(self)


def run_report(
    topology: Topology,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
) -> RunReport:
    """Return the report of the run between two reports of a lab's emulators."""
    ways: list[Way] = []
    void: list[str] = []
    foreign = 0
    for name, last in after.items():
        first = before[name]
        foreign += last["foreign_packets"] - first["foreign_packets"]
        for way, arrow in _WAYS:
            counted = _way(topology, name, way, first[way], last[way])
            ways.append(counted)
            # With access links, packets between hosts of the side where they enter, too.
            sent = last[way]["sent_packets"] - first[way]["sent_packets"]
            if counted.late > topology.late_max * max(sent, 1):
                void.append(
                    f"{name} {arrow}: {counted.late} of {sent} packets left more than "
                    f"{topology.slip_micros_max} µs late (p99 {counted.slip_p99_micros:.0f} µs)"
                )
            unsent = last[way]["unsent_packets"] - first[way]["unsent_packets"]
            crowded = _total(last[way], "crowded_packets") - _total(first[way], "crowded_packets")
            for count, what in (
                (unsent, "were refused by the kernel"),
                (crowded, "did not fit the emulator's memory"),
            ):
                if count:
                    void.append(f"{name} {arrow}: {count} packets {what}")
        for key, what in (
            ("missed_packets", "were dropped before they reached the link"),
            ("oversized_packets", "were longer than the MTU"),
        ):
            if count := last[key] - first[key]:
                void.append(f"{name}: {count} packets {what}")
    return RunReport(ways=ways, foreign=foreign, void=void)


def nothing(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of idle emulators, in the shape of `report`."""

    def empty(value: Any) -> Any:
        if isinstance(value, Mapping):
            return nothing(value)
        # Keeps the list of paths, empties the lists of histogram steps.
        return (
            [nothing(v) for v in value if isinstance(v, Mapping)] if value.__class__ is list else 0
        )

    return {key: empty(value) for key, value in report.items()}


def _total(way: Mapping[str, Any], key: str) -> int:
    return sum(path[key] for path in way["paths"])


def _way(
    topology: Topology,
    wan: str,
    direction: str,
    first: Mapping[str, Any],
    last: Mapping[str, Any],
) -> Way:
    def grown(key: str) -> int:
        return _total(last, key) - _total(first, key)

    earlier = dict(map(tuple, first["slip_nanos"]))
    slips = [(nanos, count - earlier.get(nanos, 0)) for nanos, count in last["slip_nanos"]]
    paths = zip(first["paths"], last["paths"], strict=True)
    return Way(
        wan=wan,
        direction=direction,
        packets=grown("offered_packets"),
        bytes=grown("offered_bytes"),
        delivered=grown("delivered_packets"),
        lost=grown("lost_packets"),
        overflowed=grown("overflowed_packets"),
        down=grown("down_packets"),
        dropped_early=grown("dropped_early_packets"),
        marked=grown("marked_packets"),
        reordered=grown("reordered_packets"),
        duplicated=grown("duplicated_packets"),
        corrupted=grown("corrupted_packets"),
        late=sum(count for nanos, count in slips if nanos > 1000 * topology.slip_micros_max),
        slip_p50_micros=quantile(slips, 0.5) / 1000,
        slip_p99_micros=quantile(slips, 0.99) / 1000,
        slip_max_micros=quantile(slips, 1.0) / 1000,
        packets_by_path=[b["offered_packets"] - a["offered_packets"] for a, b in paths],
    )


def quantile(steps: Sequence[tuple[int, int]], share: float) -> int:
    """Return a quantile of a histogram, 0 if it is empty.

    `steps` are ascending values and their counts.
    """
    left = share * sum(count for _, count in steps)
    found = 0
    for value, count in steps:
        if count:
            found = value
            left -= count
            if left <= 0:
                break
    return found
