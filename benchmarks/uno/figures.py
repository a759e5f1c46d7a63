"""The figures of Uno's paper that its released code has, each as a set of cells.

Beside the paper's schemes stand ours and Gemini with our start and load balancing, so that what is
due to each part can be seen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.uno import traffic
from benchmarks.uno.cells import Cell
from benchmarks.uno.networks import (
    CUBIC,
    DCTCP,
    GEMINI,
    GEMINI_FAIR,
    MPRDMA_BBR,
    RELEASED,
    RELEASED_ECMP,
    UNO,
    Network,
    Scheme,
    scheme,
)

MIXED: Final = (UNO, RELEASED, RELEASED_ECMP, GEMINI, GEMINI_FAIR, MPRDMA_BBR, CUBIC)
"""Schemes of figures 10 to 12, and of all-reduces."""
SPRAYED: Final = tuple(
    replace(one, balance="spray")
    for one in (
        UNO,
        RELEASED,
        replace(GEMINI, congestion="gemini-released"),
        replace(MPRDMA_BBR, name="MPRDMA and BBR", congestion="mprdma-bbr"),
        replace(DCTCP, name="DCTCP"),
    )
)
"""Schemes where the last port is the only bottleneck: packets are sprayed."""
PERMUTED: Final = (
    UNO,
    RELEASED,
    RELEASED_ECMP,
    replace(GEMINI, congestion="gemini-released"),
    GEMINI_FAIR,
    replace(MPRDMA_BBR, congestion="mprdma-bbr"),
)
CODE: Final = (8, 2)
RECOVERIES: Final = tuple(
    scheme(f"{label}{', (8, 2)' if code else ''}", "uno-released", balance, "phantom", code=code)
    for label, balance in (("spraying", "spray"), ("UnoLB", "subflows"), ("PLB", "plb"))
    for code in (None, CODE)
)
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Size of a run."""

    seeds: int
    incast_bytes: int
    failure_seeds: int
    loads: tuple[int, ...]
    rings: traffic.Rings


BUCKET_BYTES: Final = 25 * MEGABYTE
"""A bucket of gradients, as PyTorch sends them by default."""
FULL: Final = Effort(
    seeds=5,
    incast_bytes=1_000 * MEGABYTE,
    failure_seeds=40,
    loads=(40, 60, 80),
    rings=traffic.Rings(rings=8, workers=16, size=BUCKET_BYTES, rounds=3),
)
QUICK: Final = Effort(
    seeds=1,
    incast_bytes=100 * MEGABYTE,
    failure_seeds=6,
    loads=(40,),
    rings=traffic.Rings(rings=2, workers=8, size=BUCKET_BYTES // 5, rounds=2),
)


def _incasts(effort: Effort) -> Iterator[Cell]:
    """Yield figures 3 and 8: eight flows to one host."""
    for far, near in ((0, 8), (4, 4), (8, 0)):
        flows = traffic.incast(far=far, near=near, size=effort.incast_bytes)
        for one in SPRAYED:
            yield Cell(
                figure="8",
                workload=f"{far} far + {near} near",
                scheme=one,
                seed=1,
                network=Network(),
                flows=tuple(flows),
                sample_millis=5,
            )


def _behind(effort: Effort) -> Iterator[Cell]:
    """Yield figure 4: short near messages behind a far incast."""
    flows = traffic.behind_incast(size=effort.incast_bytes, messages=1_000, every_nanos=25_000)
    schemes = (
        replace(UNO, balance="spray"),
        replace(RELEASED, balance="spray"),
        scheme("Uno as released, real queues", "uno-released", "spray", "red"),
        replace(GEMINI, congestion="gemini-released", balance="spray"),
    )
    for one in schemes:
        yield Cell(
            figure="4",
            workload="behind 8 far",
            scheme=one,
            seed=1,
            network=Network(),
            flows=tuple(flows),
        )


def _permutations(effort: Effort) -> Iterator[Cell]:
    """Yield figure 9: a permutation of all hosts, with 8 and with 128 links."""
    for links in (8, 128):
        for seed in range(1, effort.seeds + 1):
            flows = tuple(traffic.permutation(seed, size=MEGABYTE))
            for one in PERMUTED:
                yield Cell(
                    figure="9",
                    workload=f"{links} links",
                    scheme=one,
                    seed=seed,
                    network=Network(wan_links=links),
                    flows=flows,
                )


def _mixed(
    figure: str, effort: Effort, networks_of: dict[str, Network], loads: tuple[int, ...]
) -> Iterator[Cell]:
    for load in loads:
        for seed in range(1, effort.seeds + 1):
            flows = tuple(traffic.mixed(seed, load=load))
            for label, network in networks_of.items():
                for one in MIXED:
                    yield Cell(
                        figure=figure,
                        workload=label or f"{load} %",
                        scheme=one,
                        seed=seed,
                        network=network,
                        flows=flows,
                    )


def _loads(effort: Effort) -> Iterator[Cell]:
    """Yield figure 10: realistic traffic at three loads."""
    yield from _mixed("10", effort, {"": Network(slowdown=10)}, effort.loads)


def _ratios(effort: Effort) -> Iterator[Cell]:
    """Yield figure 11: the 40 % load with other round trips between the data centres."""
    delays = {8: 46_500, 32: 214_500, 512: 3_574_500}
    if effort is QUICK:
        delays = {8: 46_500}
    by_ratio = {
        f"ratio {ratio}": Network(slowdown=10, wan_nanos=delay) for ratio, delay in delays.items()
    }
    yield from _mixed("11", replace(effort, seeds=1), by_ratio, (40,))


def _buffers(effort: Effort) -> Iterator[Cell]:
    """Yield figure 12: the 40 % load with shallow near ports and deep far ones."""
    network = Network(slowdown=10, near_bytes=175_000, far_bytes=2_240_000)
    if effort is not QUICK:
        yield from _mixed("12", replace(effort, seeds=2), {"0.175 and 2.24 MB": network}, (40,))


def _failures(effort: Effort) -> Iterator[Cell]:
    """Yield figure 13: a dead link, and losses in bursts."""
    for label, network in (
        ("dead link", Network(dead_link=True)),
        ("bursts", Network(bursts=True)),
    ):
        for seed in range(1, effort.failure_seeds + 1):
            flows = tuple(traffic.between_sites(seed, size=5 * MEGABYTE))
            for one in RECOVERIES:
                yield Cell(
                    figure="13",
                    workload=label,
                    scheme=one,
                    seed=seed,
                    network=network,
                    flows=flows,
                )


def _all_reduces(effort: Effort) -> Iterator[Cell]:
    """Yield ring all-reduces, half of whose workers are in either data centre."""
    rings = effort.rings
    for seed in range(1, effort.seeds + 1):
        flows, chains = traffic.all_reduce(seed, rings)
        for one in MIXED:
            yield Cell(
                figure="all-reduce",
                workload=f"{rings.rings} rings of {rings.workers}",
                scheme=one,
                seed=seed,
                network=Network(),
                flows=tuple(flows),
                chains=tuple(chains),
                rings=rings,
            )


def _ablations(effort: Effort) -> Iterator[Cell]:
    """Yield the mixed incast without one rule at a time."""
    flows = tuple(traffic.incast(far=4, near=4, size=effort.incast_bytes))
    rules = {
        "uno-released": (
            "shared_threshold",
            "equal_epochs",
            "gradient",
            "discount",
            "quick_adapt",
        ),
        "uno": ("small_start", "fast_increase", "guarded"),
    }
    names = {"uno-released": "as released", "uno": "ours"}
    for congestion, left_out in rules.items():
        for rule in (None, *left_out):
            name = names[congestion] + (f", without {rule}" if rule else "")
            yield Cell(
                figure="ablations",
                workload="4 far + 4 near",
                scheme=scheme(
                    name, congestion, "spray", "phantom", without=(rule,) if rule else ()
                ),
                seed=1,
                network=Network(),
                flows=flows,
                sample_millis=5,
                time_millis=400,
            )


REPLAYS: Final[dict[str, tuple[str, Scheme, dict[str, Any]]]] = {
    "permutation, Uno": ("perm", RELEASED, {}),
    "permutation, Uno on one path": ("perm", RELEASED_ECMP, {}),
    "permutation, Gemini": ("perm", replace(GEMINI, congestion="gemini-released"), {}),
    "40 %, Uno": ("web40", RELEASED, {"slowdown": 10}),
    "40 %, Uno on one path": ("web40", RELEASED_ECMP, {"slowdown": 10}),
    "40 %, Gemini": ("web40", GEMINI, {"slowdown": 10}),
}
"""Matrices of the released code: name, scheme, network."""
DEAD_LINK_SEEDS: Final = 40


def _replays(effort: Effort) -> Iterator[Cell]:
    """Yield the matrices of the released code, if they are there."""
    for label, (name, one, settings) in REPLAYS.items():
        flows = traffic.matrix(name)
        if flows is not None:
            yield Cell(
                figure="replay",
                workload=label,
                scheme=one,
                seed=215,
                network=Network(**settings),
                flows=tuple(flows),
            )
    flows = traffic.matrix("fail8")
    if flows is None:
        return
    for one in RECOVERIES:
        for seed in range(min(DEAD_LINK_SEEDS, 8 * effort.failure_seeds)):
            yield Cell(
                figure="replay",
                workload="dead link",
                scheme=one,
                seed=seed,
                network=Network(dead_link=True),
                flows=tuple(flows),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure."""

    name: str
    title: str
    cells: Callable[[Effort], Iterator[Cell]]


FIGURES: Final = (
    Figure(name="8", title="Incast of eight long flows (figures 3 and 8)", cells=_incasts),
    Figure(name="4", title="Short near messages behind a far incast (figure 4)", cells=_behind),
    Figure(name="9", title="Permutation of 256 hosts, 1 MB each (figure 9)", cells=_permutations),
    Figure(name="10", title="Realistic traffic (figure 10)", cells=_loads),
    Figure(name="11", title="Ratio of far and near round trips (figure 11)", cells=_ratios),
    Figure(name="12", title="Unequal buffers (figure 12)", cells=_buffers),
    Figure(name="13", title="Dead link and bursts of losses (figure 13)", cells=_failures),
    Figure(name="all-reduce", title="Ring all-reduce over both data centres", cells=_all_reduces),
    Figure(name="ablations", title="Mixed incast without one rule", cells=_ablations),
    Figure(name="replay", title="Traffic matrices of the released code", cells=_replays),
)
