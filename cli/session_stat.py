"""`sealanectl session stat`: a session's figures, and what limits its rate."""

import argparse
import asyncio
import itertools
from collections.abc import Mapping
from typing import Any, Final

from sealane.cli.names import find_session
from sealane.cli.output import CALL_SECONDS, Output, size_text
from sealane.cli.verbs import CALLED, finds, pause
from sealane.client import Client, translated
from sealane.protocol.v1 import sessions_pb2

LIMITS: Final = {
    "application": "nothing to send",
    "credit": "the peer posts no receives",
    "pacing": "the rate",
    "loss": "lost packets",
    "round_trip": "awaiting acknowledgements",
    "stall": "the peer is silent",
    "completions": "unread completions",
    "shared_rate": "the rate that sessions share",
    "congestion": "congestion control",
}
"""Possible limits of sending: the name in statistics and JSON, and the text in tables."""
_SHARE_MIN: Final = 0.005
"""Smallest share of the time for which a table shows a limit."""
LAST_ROW: Final = (1 << 64) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `session stat`."""
    finds(parser, "name", find_session, metavar="NAME", help=CALLED)
    parser.add_argument(
        "--watch",
        type=pause,
        metavar="SECONDS",
        help="repeat at this interval, with the figures of the interval, until interrupted",
    )


async def session_stat(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Print a session's figures since it began; with `--watch`, then those of each interval."""
    before: Mapping[str, int] = {}
    for turn in itertools.count():
        if turn:
            await asyncio.sleep(options.watch)
            if not output.is_data:
                print(file=output.file)
        request = sessions_pb2.GetSessionRequest(name=options.name)
        with translated():
            session = await client.sessions.GetSession(request, timeout=CALL_SECONDS)
        now = dict(session.statistics)
        output.show_one(record(session, since(now, before)), table(session, since(now, before)))
        if options.watch is None or session.state == sessions_pb2.Session.CLOSED:
            return
        before = now


def since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each counter; levels, such as the round trip, stay as they are."""
    return {
        name: value if name in _LEVELS else value - before.get(name, 0)
        for name, value in now.items()
    }


def limits(figures: Mapping[str, int]) -> dict[str, float]:
    """Return each limit's share of the time, largest first, without those that have none."""
    spent = {name: figures.get(f"limited_{name}_nanos", 0) for name in LIMITS}
    total = sum(spent.values())
    ranked = sorted(spent.items(), key=lambda item: -item[1])
    return {name: nanos / total for name, nanos in ranked if nanos}


def record(session: sessions_pb2.Session, figures: Mapping[str, int]) -> dict[str, Any]:
    """Return all figures, for JSON."""
    seconds = _seconds(figures)
    return {
        "name": session.name,
        "state": _state(session),
        "peer": session.peer_node,
        "seconds": seconds,
        "limits": limits(figures),
        "bits_per_second": {
            name: _per_second(figures, counter, seconds) for name, counter in _RATES.items()
        },
        "estimate": _estimate(session.outlook) if session.HasField("outlook") else None,
        "plan": [
            {
                "length_max": row.length_max,
                "k": row.k,
                "m": row.m,
                "depth": row.depth,
                "parity_gap_nanos": row.parity_gap_nanos,
            }
            for row in session.outlook.plan
        ],
        "paths": [_path(path) for path in session.paths],
        "statistics": dict(sorted(figures.items())),
    }


def table(session: sessions_pb2.Session, figures: Mapping[str, int]) -> dict[str, str]:
    """Return the figures for people, as lines of a table."""
    seconds = _seconds(figures)

    def rate(name: str) -> str:
        return f"{_per_second(figures, _RATES[name], seconds) / 1e6:,.1f} Mbit/s"

    def counts(**named: str) -> str:
        return ", ".join(
            f"{text.replace('_', ' ')} {figures.get(counter, 0):,}"
            for text, counter in named.items()
        )

    found = limits(figures)
    rows = {
        "session": f"{session.display_name} with {session.peer_node}, {_state(session)}",
        "limited by": ", ".join(
            f"{LIMITS[name]} {share:.0%}" for name, share in found.items() if share >= _SHARE_MIN
        )
        or "-",
        "round trip": (
            f"{figures.get('srtt_nanos', 0) / 1e6:.3f} ms, "
            f"time-out {figures.get('rto_nanos', 0) / 1e6:.3f} ms"
        ),
        "sent": f"{rate('wire_sent')} on the wire, {rate('payload_sent')} of messages",
        "received": f"{rate('wire_received')} on the wire, {rate('payload_received')} of messages",
        "window": _window_text(figures),
        "rate": (
            f"{figures.get('rate_bytes_per_second', 0) * 8 / 1e6:,.1f} of "
            f"{session.rate_bits_per_second / 1e6:,.1f} Mbit/s, "
            + counts(breaker_trips="breaker_trips")
        ),
        "messages": counts(sent="sends_completed", received="receives_completed", failed="failed"),
        "packets": counts(
            sent="packets_sent",
            lost="lost_packets",
            loss_bursts="lost_runs",
            retransmitted="retransmitted_packets",
            needlessly="spurious_retransmissions",
        ),
        "parity": counts(
            sent="parity_packets_sent", units_decoded="decoded_units", fallbacks="fallbacks"
        ),
        "dropped here": counts(
            decrypt_failures="forged",
            replayed="replayed",
            malformed="malformed",
            late="late",
            duplicate="duplicates",
            surplus="surplus",
        ),
        "dropped by this host": counts(outgoing="send_drops", incoming="receive_drops"),
        "dropped by the peer's host": counts(packets="peer_drops"),
        "congestion marks": counts(
            received="ce_received", echoed="ce_echoed", found_missing="marking_failures"
        ),
        "silence": counts(stalls="stalls", time_outs="timeouts", probes="probes_sent"),
        "paths": counts(skipped="path_silences", moved="path_moves"),
    }
    rows |= {f"path {n}": _path_text(path) for n, path in enumerate(session.paths)}
    if session.HasField("outlook"):
        rows["loss estimate"] = _estimate_text(session.outlook)
        rows["plan"] = "; ".join(_row_text(row) for row in session.outlook.plan)
    if session.close_reason:
        rows["ended"] = session.close_reason
    return rows


_LEVELS: Final = frozenset(
    {
        "srtt_nanos",
        "rto_nanos",
        "rtt_least_nanos",
        "rate_bytes_per_second",
        "window_bytes",
        "path_mtu_bytes",
        "is_ecn_capable",
        "is_fallen_back",
    }
)
_RATES: Final = {
    "wire_sent": "wire_bytes_sent",
    "payload_sent": "payload_bytes_sent",
    "wire_received": "wire_bytes_received",
    "payload_received": "payload_bytes_received",
}


def _seconds(figures: Mapping[str, int]) -> float:
    """Return the time that the figures cover: the sum of all limits' times."""
    return sum(figures.get(f"limited_{name}_nanos", 0) for name in LIMITS) / 1e9


def _per_second(figures: Mapping[str, int], counter: str, seconds: float) -> float:
    return figures.get(counter, 0) * 8 / seconds if seconds else 0.0


def _window_text(figures: Mapping[str, int]) -> str:
    window = figures.get("window_bytes", 0)
    if not window:
        return "no limit"
    least = figures.get("rtt_least_nanos", 0) / 1e6
    text = f"{window / 1024:,.1f} KiB, least round trip {least:.3f} ms"
    return text + (", by delay: marks don't arrive" if figures.get("is_fallen_back") else "")


def _state(session: sessions_pb2.Session) -> str:
    return sessions_pb2.Session.State.Name(session.state).lower()


def _path(path: sessions_pb2.Path) -> dict[str, Any]:
    return {
        "state": sessions_pb2.Path.State.Name(path.state).lower(),
        "wire": path.wire,
        "local_address": path.local_address,
        "peer_address": path.peer_address,
        "statistics": dict(path.statistics),
    }


def _path_text(path: sessions_pb2.Path) -> str:
    figures = path.statistics
    return (
        f"{path.local_address} to {path.peer_address}, "
        f"{sessions_pb2.Path.State.Name(path.state).lower()}, {path.wire}, "
        f"{figures['srtt_nanos'] / 1e6:.3f} ms, packets sent {figures['packets_sent']:,}, "
        f"lost {figures['lost_packets']:,}, received {figures['packets_received']:,}, "
        f"marked {figures['ce_echoed']:,}"
    )


def _estimate(outlook: sessions_pb2.Outlook) -> dict[str, float]:
    return {
        "loss_rate": outlook.loss_rate,
        "loss_rate_low": outlook.loss_rate_low,
        "loss_rate_high": outlook.loss_rate_high,
        "burst_packets": outlook.burst_packets,
        "burst_packets_low": outlook.burst_packets_low,
        "burst_packets_high": outlook.burst_packets_high,
        "packets": outlook.packets,
    }


def _estimate_text(outlook: sessions_pb2.Outlook) -> str:
    return (
        f"{outlook.loss_rate:.2g} ({outlook.loss_rate_low:.2g} to {outlook.loss_rate_high:.2g}), "
        f"bursts of {outlook.burst_packets:.3g} ({outlook.burst_packets_low:.3g} to "
        f"{outlook.burst_packets_high:.3g})"
    )


def _row_text(row: sessions_pb2.PlanRow) -> str:
    scheme = "selective repeat"
    if row.k:
        depth = f" depth {row.depth}" if row.depth > 1 else ""
        scheme = f"{'XOR' if row.m == 1 else 'MDS'} ({row.k}, {row.m}){depth}"
        if row.parity_gap_nanos:
            scheme += f", parity {row.parity_gap_nanos / 1e6:.1f} ms later"
    if row.length_max == LAST_ROW:
        return f"longer {scheme}"
    return f"to {size_text(row.length_max)} {scheme}"
