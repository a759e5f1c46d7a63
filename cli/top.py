"""`sealanectl top`: what a daemon does now, from two looks at its metrics."""

import argparse
import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from sealane.cli.figures import Interval, scrape
from sealane.cli.output import Output, size_text
from sealane.cli.session_stat import LIMITS
from sealane.cli.several import add_also, daemons, named
from sealane.cli.verbs import WATCH_SECONDS, pause
from sealane.client import Client, NodeStatus
from sealane.protocol.sector import SECTOR_BYTES

_Result = TypeVar("_Result")

CERTIFICATE_SECONDS_MIN: Final = 120
"""With less left, the renewal of a certificate has failed for minutes."""
ID_CHARACTERS: Final = 8
HISTOGRAMS: Final = {
    "gateway": "sealane_gateway_io_seconds",
    "target": "sealane_target_io_seconds",
    "fabric": "sealane_fabric_message_seconds",
    "accelerator": "sealane_accelerator_job_seconds",
}
VOLUME_FIGURES: Final = {
    "gateway": ("reads", "writes", "read", "write", "sectors_opened", "sectors_sealed"),
    "target": (
        *("host_reads", "host_writes", "host_read", "host_write"),
        *("sectors_read", "sectors_stored"),
    ),
}
"""Names of the counters of reads, writes, their times and their sectors, at each role."""
_WRONG_NOW: Final = {
    "sealane_broker_away": "no broker answers",
    "sealane_broker_audit_log_low": "the audit log has no space left",
    "sealane_gateway_target_is_away": "the target is away",
    "sealane_gateway_target_is_unhealthy": "the target doesn't serve all its volumes",
    "sealane_space_is_full": "the disk is full",
    "sealane_space_is_low": "the disk is nearly full",
    "sealane_target_volume_failed": "the store accepts no writes",
    "sealane_plain_namespace_failed": "the store accepts no writes",
    "sealane_target_volume_orphaned_sets": "leaf pages are wrong",
    "sealane_target_volume_scrub_found": "a scrub found faulty sectors",
}
_WRONG_SINCE: Final = {
    "sealane_gateway_volume_refusals_total": "sectors or answers of the target were refused",
    "sealane_gateway_volume_commands_given_up_total": "commands were given up",
    "sealane_gateway_volume_associations_lost_total": "the target was lost",
    "sealane_target_volume_media_errors_total": "the drive fails reads or writes",
    "sealane_plain_namespace_media_errors_total": "the drive fails reads or writes",
    "sealane_role_barred_total": "the verifier refused a role",
    "sealane_session_breaker_trips_total": "the path can't carry the session's rate",
    "sealane_session_stalls_total": "the peer fell silent",
    "sealane_session_receive_drops_total": "this host drops packets",
    "sealane_session_send_drops_total": "this host drops packets",
}
_HELD_BACK: Final = {
    "sealane_target_volume_throttled_total": "limits of the volume",
    "sealane_target_volume_contended_total": "commands on the same sectors",
    "sealane_gateway_volume_journal_flushes_total": "a full journal",
    "sealane_gateway_volume_commands_resent_total": "a lost target",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `top`."""
    parser.set_defaults(run=top, is_endless=True)
    parser.add_argument(
        "--interval",
        type=pause,
        default=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"time between two looks (default: {WATCH_SECONDS:g})",
    )
    parser.add_argument(
        "--once",
        dest="is_endless",
        action="store_false",
        help="show one interval, then end: for scripts",
    )
    add_also(parser)


async def top(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Show each interval's figures; until interrupted, unless `--once`."""
    async with daemons(client, options) as clients:
        before = await _of_each(clients, scrape)
        is_first = True
        while True:
            await asyncio.sleep(options.interval)
            statuses = await _of_each(clients, Client.status)
            after = await _of_each(clients, scrape)
            if not is_first or (output.file.isatty() and options.is_endless):
                output.begin_again()
            intervals = map(Interval, before, after)
            show_all(
                [
                    record(status, interval, time.time())
                    for status, interval in zip(statuses, intervals, strict=True)
                ],
                output,
            )
            output.file.flush()
            if not options.is_endless:
                return
            before, is_first = after, False


async def _of_each(
    clients: Mapping[str, Client], call: Callable[[Client], Awaitable[_Result]]
) -> list[_Result]:
    """Return the call's result of each daemon; if there are several, an error says whose it is."""
    if len(clients) == 1:
        return [await call(each) for each in clients.values()]
    return await asyncio.gather(*(named(path, call(each)) for path, each in clients.items()))


def record(status: NodeStatus, interval: Interval, now: float) -> dict[str, Any]:
    """Return an interval's figures; `now` is Unix time."""
    after = interval.after
    return {
        "node": status.node,
        "version": status.version,
        "roles": list(status.roles),
        "seconds": interval.seconds,
        "processor_cores": interval.rate("process_cpu_seconds_total"),
        "memory_bytes": int(after.sum("process_resident_memory_bytes")),
        "health": [*health(interval, now)],
        "operations": [*operations(interval)],
        "volumes": _busiest_first([*volumes(interval)]),
        "sessions": sorted(sessions(interval), key=lambda row: -row["sent_bits_per_second"]),
    }


def health(interval: Interval, now: float) -> Iterator[dict[str, str]]:
    """Yield what is wrong now, or went wrong in the interval: what, and where."""
    after = interval.after
    for labels, expires in after.each("sealane_certificate_expiry_timestamp_seconds"):
        if expires - now < CERTIFICATE_SECONDS_MIN:
            text = f"the certificate expires in {max(0, int(expires - now))} s"
            yield {"wrong": text, "where": _where(labels)}
    for name, text in _WRONG_NOW.items():
        for labels, value in after.each(name):
            if value > 0:
                yield {"wrong": text, "where": _where(labels)}
    for name, text in _WRONG_SINCE.items():
        for labels, _ in after.each(name):
            if interval.increase(name, **labels) > 0:
                yield {"wrong": text, "where": _where(labels)}


def operations(interval: Interval) -> Iterator[dict[str, Any]]:
    """Yield rate and latencies of the operations of each role, and of a gateway's card."""
    for role, name in HISTOGRAMS.items():
        for labels, _ in interval.after.each(f"{name}_count"):
            operation = labels["operation"]
            yield {
                "role": role,
                "operation": operation,
                "per_second": interval.rate(f"{name}_count", operation=operation),
                "p50_seconds": interval.quantile(0.5, name, operation=operation),
                "p99_seconds": interval.quantile(0.99, name, operation=operation),
            }


def volumes(interval: Interval) -> Iterator[dict[str, Any]]:
    """Yield what each volume did, at each role that the daemon has."""
    for role, figures in VOLUME_FIGURES.items():
        prefix = f"sealane_{role}_volume_"
        reads, writes, read, write, opened, sealed = figures
        for labels, queues in interval.after.each(f"{prefix}queues_running"):
            rates = {
                name: interval.rate(f"{prefix}{name}_total", **labels)
                for name in (reads, writes, opened, sealed)
            }
            yield {
                "volume": labels["volume"],
                "mode": labels["mode"],
                "target": labels.get("target", ""),
                "role": role,
                "queues": int(queues),
                "reads_per_second": rates[reads],
                "writes_per_second": rates[writes],
                "read_bytes_per_second": rates[opened] * SECTOR_BYTES,
                "written_bytes_per_second": rates[sealed] * SECTOR_BYTES,
                "read_seconds": _mean(interval, prefix, read, reads, labels),
                "write_seconds": _mean(interval, prefix, write, writes, labels),
                "held_back_by": [
                    text
                    for name, text in _HELD_BACK.items()
                    if name.startswith(prefix) and interval.increase(name, **labels) > 0
                ],
            }


def sessions(interval: Interval) -> Iterator[dict[str, Any]]:
    """Yield what each session did, and what limited it."""
    after = interval.after
    for labels, _ in after.each("sealane_session_rate_bytes_per_second"):
        session = labels["session"]
        sent = interval.increase("sealane_session_packets_sent_total", session=session)
        lost = interval.increase("sealane_session_lost_packets_total", session=session)
        spent = {
            cause: interval.increase(
                "sealane_session_limited_seconds_total", session=session, cause=cause
            )
            for cause in LIMITS
        }
        total = sum(spent.values())
        yield {
            "session": session,
            "sent_bits_per_second": 8
            * interval.rate("sealane_session_payload_bytes_sent_total", session=session),
            "received_bits_per_second": 8
            * interval.rate("sealane_session_payload_bytes_received_total", session=session),
            "lost": lost / sent if sent else None,
            "round_trip_seconds": after.sum("sealane_session_srtt_seconds", session=session),
            "limits": {
                cause: seconds / total
                for cause, seconds in sorted(spent.items(), key=lambda item: -item[1])
                if seconds > 0
            },
        }


def show_all(records: Sequence[Mapping[str, Any]], output: Output) -> None:
    """Print the records of some daemons over an interval: as `show`, with a column for the node.

    As data, those of several daemons are a list.
    """
    if len(records) == 1:
        show(records[0], output)
    elif output.is_data:
        output.show(records)
    else:
        output.show([_summary(each) for each in records])
        figures = {
            name: [{"node": each["node"], **row} for each in records for row in each[name]]
            for name in ("operations", "volumes", "sessions")
        }
        figures["volumes"] = _busiest_first(figures["volumes"])
        figures["sessions"].sort(key=lambda row: -row["sent_bits_per_second"])
        _show_tables(figures, output, fixed=len(records) + 1)


def show(figures: Mapping[str, Any], output: Output) -> None:
    """Print an interval's record: as data, or as tables that fit a terminal."""
    if output.is_data:
        output.show_one(figures)
        return
    summary = _summary(figures)
    output.show_one(summary)
    _show_tables(figures, output, fixed=len(summary))


def _show_tables(figures: Mapping[str, Any], output: Output, *, fixed: int) -> None:
    """Print the tables below `fixed` lines."""
    room = _room(output, figures, fixed)
    tables = (
        [_of_node(row, operation_row) for row in figures["operations"]],
        [_of_node(row, volume_row) for row in figures["volumes"][:room]],
        [_of_node(row, session_row) for row in figures["sessions"][:room]],
    )
    for rows, name in zip(tables, ("operations", "volumes", "sessions"), strict=True):
        if rows:
            print(file=output.file)
            output.show(rows)
            if len(rows) < len(figures[name]):
                print(f"and {len(figures[name]) - len(rows)} more {name}", file=output.file)


def _of_node(
    row: Mapping[str, Any], shown: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a row for people, with its node if it says so."""
    return {**({"node": row["node"]} if "node" in row else {}), **shown(row)}


def _room(output: Output, figures: Mapping[str, Any], fixed: int) -> int | None:
    """Return how many rows volumes and sessions may have each; None: all, if no terminal."""
    if not output.file.isatty():
        return None
    fixed += len(figures["operations"]) + 9
    shared = sum(bool(figures[name]) for name in ("volumes", "sessions")) or 1
    return max(3, (shutil.get_terminal_size().lines - fixed) // shared)


def _summary(figures: Mapping[str, Any]) -> dict[str, Any]:
    wrong = [f"{each['wrong']} ({each['where']})" for each in figures["health"]]
    return {
        "node": f"{figures['node']}, {', '.join(figures['roles'])}, {figures['version']}",
        "interval": f"{figures['seconds']:.1f} s",
        "uses": (
            f"{figures['processor_cores']:.2f} cores, {size_text(figures['memory_bytes'])} memory"
        ),
        "health": "; ".join(wrong) or "nothing wrong seen",
    }


def operation_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of `operations` for people."""
    return {
        "role": row["role"],
        "operation": row["operation"],
        "per second": f"{row['per_second']:,.1f}",
        "p50": duration_text(row["p50_seconds"]),
        "p99": duration_text(row["p99_seconds"]),
    }


def volume_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `volumes` for people."""
    return {
        "volume": row["volume"][:ID_CHARACTERS],
        "role": row["role"],
        "target": row["target"] or "-",
        "queues": row["queues"],
        "reads/s": f"{row['reads_per_second']:,.0f}",
        "writes/s": f"{row['writes_per_second']:,.0f}",
        "read MB/s": f"{row['read_bytes_per_second'] / 1e6:,.1f}",
        "written": f"{row['written_bytes_per_second'] / 1e6:,.1f}",
        "read time": duration_text(row["read_seconds"]),
        "write time": duration_text(row["write_seconds"]),
        "held back by": ", ".join(row["held_back_by"]) or "-",
    }


def session_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of `sessions` for people."""
    cause, share = next(iter(row["limits"].items()), ("", 0.0))
    return {
        "session": row["session"].rpartition("/")[2],
        "sent Mbit/s": f"{row['sent_bits_per_second'] / 1e6:,.1f}",
        "received": f"{row['received_bits_per_second'] / 1e6:,.1f}",
        "lost": "-" if row["lost"] is None else f"{row['lost']:.3%}",
        "round trip": duration_text(row["round_trip_seconds"]),
        "limited by": f"{LIMITS[cause]} {share:.0%}" if cause else "-",
    }


def duration_text(seconds: float | None) -> str:
    """Return a duration in a fitting unit, "-" for none."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _mean(
    interval: Interval, prefix: str, seconds: str, count: str, labels: Mapping[str, str]
) -> float | None:
    number = interval.increase(f"{prefix}{count}_total", **labels)
    time_name = f"{prefix}{seconds}_seconds_total"
    # An idle volume has the count but not the time, which then would have risen by too little.
    if not number or not [*interval.before.keys(time_name, labels)]:
        return None
    return interval.increase(time_name, **labels) / number


def _busiest_first(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    def commands(row: Mapping[str, Any]) -> float:
        return float(row["reads_per_second"] + row["writes_per_second"])

    return sorted(rows, key=lambda row: (-commands(row), row["volume"], row["role"]))


def _where(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in labels.items()) or "this daemon"
