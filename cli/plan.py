"""`sealanectl session plan`: the best scheme for messages on a lossy path, and why; offline."""

import argparse
from pathlib import Path as FilePath
from typing import Any, Final

from sealane.cli.output import SIZE_UNITS, Output, size_text
from sealane.cli.plan_map import draw_map
from sealane.daemon.config import UNIT_BYTES
from sealane.daemon.runtime.arguments import bounded
from sealane.planning.model import (
    RTO_FACTOR,
    Loss,
    Path,
    SelectiveRepeat,
    ideal,
)
from sealane.planning.packet import PACKET_OVERHEAD_BYTES
from sealane.planning.planner import (
    PARITY_BUDGET,
    Candidate,
    Objective,
    evaluate,
    plan,
    rank,
    scheme_text,
    why,
)

SHOWN: Final = 8
"""Largest number of candidates in the table, to which selective repeat is added if missing."""
UNIT_BYTES_MIN: Final = 256
"""Smallest payload of a unit (docs/formats/session-wire.md)."""
MESSAGE_BYTES_MAX: Final = 1 << 36
"""Largest message (docs/formats/session-wire.md)."""
RATE_UNITS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
ROUND_TRIP_SECONDS_MAX: Final = 3600.0
MTU_MAX: Final = 65_535
TIME_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `session plan`."""
    parser.set_defaults(run=session_plan, is_offline=True)
    add = parser.add_argument
    add(
        "--size",
        type=_size,
        required=True,
        metavar="SIZE",
        help="message size, such as 1MiB",
    )
    add("--loss", type=_share, required=True, metavar="P", help="share of packets lost: 1e-3")
    add("--rtt", type=_duration, required=True, metavar="TIME", help="round-trip time: 25ms")
    add(
        "--rate",
        type=_rate,
        default=10e9,
        metavar="RATE",
        help="bits per second: 400G (default: 10G)",
    )
    add(
        "--burst",
        type=float,
        default=1.0,
        metavar="B",
        help="mean length of a loss burst, in packets (default: 1)",
    )
    mtu = bounded(PACKET_OVERHEAD_BYTES + UNIT_BYTES_MIN, MTU_MAX)
    add("--mtu", type=mtu, metavar="BYTES", help="the path's MTU (default: 1500)")
    add(
        "--objective",
        choices=[objective.value for objective in Objective],
        default=Objective.AUTO.value,
        help="statistic of the completion time to minimize; auto (the default): p99 of messages "
        "that are sent within a round trip, the mean of longer ones",
    )
    add(
        "--parity-budget",
        type=_share,
        default=PARITY_BUDGET,
        metavar="SHARE",
        help=f"largest ratio of parity to data (default: {PARITY_BUDGET})",
    )
    add(
        "--plot",
        type=FilePath,
        metavar="FILE",
        help="also draw a map of the choices by size and loss to this PNG file",
    )


def session_plan(options: argparse.Namespace, output: Output) -> None:
    """Print the candidates for one size, why the best one wins, and the plan for all sizes."""
    path = _path(options)
    objective = Objective(options.objective)
    ranked = rank(path, options.size, objective, options.parity_budget)
    fastest = ideal(path, options.size)
    reason = why(path, options.size, ranked, objective)
    chosen = plan(path, objective, options.parity_budget)
    rows = [
        {
            "up_to": size_text(row.length_max),
            "scheme": scheme_text(row.scheme),
        }
        for row in chosen.rows
    ]
    if output.is_data:
        output.show_one(
            {
                "ideal_seconds": fastest,
                "objective": objective.value,
                "why": reason,
                "candidates": [_record(candidate) for candidate in ranked],
                "plan": [
                    {
                        "length_max": r.length_max,
                        "k": r.k,
                        "m": r.m,
                        "depth": r.depth,
                        "parity_gap_nanos": r.parity_gap_nanos,
                    }
                    for r in chosen.rows
                ],
            }
        )
    else:
        print(f"{size_text(options.size)}, ideal {fastest * 1e3:.3f} ms\n")
        output.show(
            [_row(c, fastest, is_best=c is ranked[0]) for c in _shown(path, options, ranked)]
        )
        print(f"\n{scheme_text(ranked[0].scheme)}: {reason}.\n")
        output.show(rows)
    if options.plot is not None:
        draw_map(options.plot, path, objective, options.parity_budget, size_bytes=options.size)
        if not output.is_data:
            print(f"\nmap: {options.plot}")


def _shown(path: Path, options: argparse.Namespace, ranked: list[Candidate]) -> list[Candidate]:
    """Return the best, selective repeat, and selective repeat that relies on time-outs alone."""
    repeat = next(c for c in ranked if isinstance(c.scheme, SelectiveRepeat))
    shown = ranked[:SHOWN]
    if repeat not in shown:
        shown.append(repeat)
    return [*shown, evaluate(path, options.size, SelectiveRepeat(RTO_FACTOR))]


def _row(candidate: Candidate, fastest: float, *, is_best: bool) -> dict[str, Any]:
    name = scheme_text(candidate.scheme)
    times = {
        title: f"{seconds * 1e3:.3f}"
        for title, seconds in (
            ("mean_ms", candidate.mean),
            ("p50_ms", candidate.p50),
            ("p99_ms", candidate.p99),
            ("p99.9_ms", candidate.p999),
        )
    }
    return {
        "": "*" if is_best else "",
        "scheme": name,
        "parity": f"{candidate.parity:.1%}",
        **times,
        "mean/ideal": f"{candidate.mean / fastest:.3f}",
    }


def _record(candidate: Candidate) -> dict[str, Any]:
    return {
        "scheme": scheme_text(candidate.scheme),
        "parity": candidate.parity,
        "mean_seconds": candidate.mean,
        "p50_seconds": candidate.p50,
        "p99_seconds": candidate.p99,
        "p999_seconds": candidate.p999,
    }


def _path(options: argparse.Namespace) -> Path:
    overhead = PACKET_OVERHEAD_BYTES
    unit_bytes = UNIT_BYTES if options.mtu is None else options.mtu - overhead
    return Path(
        rate_bits_per_second=options.rate,
        round_trip_seconds=options.rtt,
        loss=Loss(rate=options.loss, burst_packets=options.burst),
        unit_bytes=unit_bytes,
        overhead_bytes=overhead,
    )


def _size(text: str) -> int:
    digits = text.rstrip("KMGTPiB")
    size = _positive(digits, text) * SIZE_UNITS.get(text[len(digits) :], -1)
    if not 1 <= size <= MESSAGE_BYTES_MAX:
        message = f"{text!r}; allowed: bytes, or a number with KiB, MiB or GiB, up to 64GiB"
        raise argparse.ArgumentTypeError(message)
    return round(size)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number from 0 to below 1")
    return value


def _rate(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in RATE_UNITS else (text, "")
    return _positive(number, text) * RATE_UNITS[unit]


def _duration(text: str) -> float:
    unit = next((unit for unit in ("ms", "us", "s") if text.endswith(unit)), "")
    if not unit:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number with s, ms or us")
    seconds = _positive(text.removesuffix(unit), text) * TIME_UNITS[unit]
    if seconds > ROUND_TRIP_SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: up to {ROUND_TRIP_SECONDS_MAX:.0f}s")
    return seconds


def _positive(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a positive number")
    return value
