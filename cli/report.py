"""`sealanectl report`: what to add to a ticket, as one file."""

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import platform
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from sealane.cli.figures import Interval, scrape
from sealane.cli.names import list_sessions
from sealane.cli.output import Output
from sealane.cli.report_page import (
    Plot,
    fields,
    heading,
    page,
    paragraph,
    plot,
    table,
    text_block,
)
from sealane.cli.session_stat import table as session_rows
from sealane.cli.several import add_also, first, other, others
from sealane.cli.top import operation_row, record, session_row, volume_row
from sealane.cli.verbs import pause
from sealane.cli.volumes import wide_row
from sealane.client import Client, NodeStatus, Volume
from sealane.daemon.config import load_config
from sealane.daemon.runtime.files import write_secret
from sealane.errors import Error, UsageError

CONFIG: Final = Path("/etc/sealane/sealaned.toml")
SAMPLED_SECONDS: Final = 30.0
INTERVAL_SECONDS: Final = 1.0
SAMPLES_MAX: Final = 3600
WATCHED_MAX: Final = 32
"""Volumes whose events are collected while sampling."""
EVENTS_MAX: Final = 1000
LIBRARIES: Final = ("grpcio", "cryptography", "pydantic", "prometheus-client")
LEFT_OUT: Final = "(left out)"
_USER_OF_URL: Final = re.compile(r"(\w+://)[^/@\s]+@")


@dataclass(frozen=True)
class Samples:
    """What was sampled: pages are large, so only the first and the last are kept."""

    whole: Interval
    records: Sequence[Mapping[str, Any]]
    """`top`'s record of each interval between two pages."""
    times: Sequence[float]
    """When each of them ended, on the monotonic clock."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.set_defaults(run=report)
    parser.add_argument("file", type=Path, metavar="FILE", help="HTML file to write")
    parser.add_argument(
        "--config",
        type=Path,
        default=CONFIG,
        metavar="FILE",
        help=f"configuration of the daemon at --socket (default: {CONFIG})",
    )
    parser.add_argument(
        "--seconds",
        type=pause,
        default=SAMPLED_SECONDS,
        metavar="SECONDS",
        help=f"time to sample rates for (default: {SAMPLED_SECONDS:g})",
    )
    parser.add_argument(
        "--interval",
        type=pause,
        default=INTERVAL_SECONDS,
        metavar="SECONDS",
        help=f"time between two samples (default: {INTERVAL_SECONDS:g})",
    )
    add_also(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


async def report(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Sample the daemon, and those of `--also`, for a while, and write the report."""
    path: Path = options.file
    check(options)
    made = await asyncio.gather(
        _daemon_report(client, options, is_first=True),
        *(_other_report(path, options) for path in others(options)),
        return_exceptions=True,
    )
    good = [each for each in made if not isinstance(each, BaseException)]
    for each in made:
        # A daemon's failure is a part of the report; without any daemon there is none.
        if isinstance(each, BaseException) and not (good and isinstance(each, Error)):
            raise each
    parts = [
        part
        for path, each in zip([first(options), *others(options)], made, strict=True)
        for part in (_failed(path, each) if isinstance(each, BaseException) else each[2])
    ]
    nodes = ", ".join(status.node for status, _, _ in good)
    title = f"Sealane report: {nodes}, {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC"
    write(path, page(title, parts), is_overwriting=options.overwrite)
    output.show_one(
        {"file": str(path), "samples": max((number for _, number, _ in good), default=0)}
    )


async def _other_report(
    path: str, options: argparse.Namespace
) -> tuple[NodeStatus, int, list[str]]:
    async with other(path, options) as client:
        return await _daemon_report(client, options, is_first=False)


def _failed(path: str, error: BaseException) -> list[str]:
    return [heading(f"Daemon at {path}"), paragraph(f"daemon {path}: {error}", is_wrong=True)]


async def _daemon_report(
    client: Client, options: argparse.Namespace, *, is_first: bool
) -> tuple[NodeStatus, int, list[str]]:
    """Return a daemon's status, the number of its samples and its part of the page."""
    status = await client.status()
    volumes, problem = await _volumes(client, status)
    async with _events(client, volumes) as events:
        samples = await sample(client, status, options, is_shown=is_first)
    parts = [
        *daemon_parts(status, options.config if is_first else None),
        *_rates(status, samples),
        *_volume_parts(volumes, problem, events),
        *await _session_parts(client, status),
    ]
    return status, len(samples.records), parts


def check(options: argparse.Namespace) -> None:
    """Raise UsageError `report.…` for what can be known before any time is spent."""
    directory = options.file.parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError("report.directory", f"{directory}: no directory that can be written to")
    if os.path.lexists(options.file) and not options.overwrite:
        raise UsageError("report.exists", f"{options.file} exists; --overwrite replaces it")
    if not options.interval <= options.seconds <= SAMPLES_MAX * options.interval:
        raise UsageError(
            "report.samples",
            f"--seconds {options.seconds:g}: allowed: 1 to {SAMPLES_MAX} times --interval "
            f"{options.interval:g}",
        )


def write(path: Path, text: str, *, is_overwriting: bool) -> None:
    """Write a file that only its owner can read; UsageError `report.unwritable`."""
    try:
        if is_overwriting:
            # Its mode, or what a link leads to, must not be those of somebody else's file.
            path.unlink(missing_ok=True)
        write_secret(path, text.encode())
    except (OSError, UsageError) as error:
        raise UsageError("report.unwritable", f"the report can't be written: {error}") from error


async def sample(
    client: Client, status: NodeStatus, options: argparse.Namespace, *, is_shown: bool = True
) -> Samples:
    """Read the metrics for as long and as often as told; raises as `scrape` does.

    The progress is shown on a terminal if it `is_shown`.
    """
    first = last = await scrape(client)
    end = first.seconds + options.seconds
    records: list[Mapping[str, Any]] = []
    times: list[float] = []
    with _progress(options.seconds, is_shown=is_shown) as show:
        while last.seconds < end:
            next_at = first.seconds + (len(records) + 1) * options.interval
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            after = await scrape(client)
            records.append(record(status, Interval(last, after), time.time()))
            last = after
            times.append(last.seconds)
            show(options.seconds - max(0.0, end - last.seconds))
    return Samples(Interval(first, last), records, times)


@contextlib.contextmanager
def _progress(seconds: float, *, is_shown: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar, if standard error is a terminal."""
    if not is_shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    # Imported only here: without a terminal it isn't needed.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sampling", total=seconds)
        yield lambda done: progress.update(task, completed=done)


async def _volumes(client: Client, status: NodeStatus) -> tuple[list[Volume], str]:
    """Return the gateway's volumes, or why they can't be listed."""
    if "gateway" not in status.roles:
        return [], "this daemon is no gateway: targets know volumes by their metrics only"
    try:
        return await client.volumes.list(with_store=True), ""
    except Error as error:
        return [], str(error)


@contextlib.asynccontextmanager
async def _events(
    client: Client, volumes: Sequence[Volume]
) -> AsyncIterator[list[Mapping[str, Any]]]:
    """Collect the events of attached volumes for as long as the block runs."""
    found: list[Mapping[str, Any]] = []

    async def collect(name: str) -> None:
        try:
            async with client.volumes.watch(name) as events:
                async for event in events:
                    if len(found) < EVENTS_MAX:
                        found.append({"volume": name, **asdict(event)})
        except Error as error:
            found.append({"volume": name, "kind": "not watched", "detail": str(error)})

    attached = [volume.name for volume in volumes if volume.attachment is not None]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(name)) for name in attached[:WATCHED_MAX]]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()


def daemon_parts(status: NodeStatus, config: Path | None) -> Iterator[str]:
    """Yield versions, and the configuration at `config` if there is one."""
    yield heading(f"Daemon {status.node}")
    yield fields(
        {
            **{name: value for name, value in asdict(status).items() if value is not None},
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES},
        }
    )
    if config is None:
        return
    yield heading("Configuration")
    try:
        loaded = load_config(config).model_dump(mode="json", exclude_none=True)
    except Error as error:
        yield paragraph(str(error), is_wrong=True)
    else:
        yield paragraph(f"{config} as it is read now, with what is left to its default.")
        if (name := loaded["node"]["name"]) != status.node:
            text = f"It is another daemon's: node {name}, not {status.node}; see --config."
            yield paragraph(text, is_wrong=True)
        yield text_block(json.dumps(public(loaded), indent=2))


def public(value: Any, name: str = "") -> Any:
    """Return a configuration without what could be secret.

    Keys and secrets are files, of which it has the paths. What remains: arguments of commands,
    settings of third parties' drivers, and users and passwords in URLs.
    """
    if isinstance(value, Mapping):
        if name == "settings":
            return dict.fromkeys(value, LEFT_OUT)
        return {key: public(each, key) for key, each in value.items()}
    if isinstance(value, list):
        if name == "command" and len(value) > 1:
            return [value[0], LEFT_OUT]
        return [public(each, name) for each in value]
    return _USER_OF_URL.sub(rf"\1{LEFT_OUT}@", value) if isinstance(value, str) else value


def _rates(status: NodeStatus, samples: Samples) -> Iterator[str]:
    whole = record(status, samples.whole, time.time())
    yield heading(f"Health and rates, {whole['seconds']:.0f} s")
    for each in whole["health"]:
        yield paragraph(f"{each['wrong']} ({each['where']})", is_wrong=True)
    if not whole["health"]:
        yield paragraph("Nothing wrong seen.")
    yield table([operation_row(row) for row in whole["operations"]])
    for made in plots(samples.records):
        yield plot(made, samples.times)
    yield heading("Volumes, rates")
    yield table([volume_row(row) for row in whole["volumes"]])
    yield heading("Sessions, rates")
    yield table([session_row(row) for row in whole["sessions"]])


def plots(samples: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Return the plots of consecutive records of `top`."""
    return [
        Plot("Operations", "per second", _lines(samples, "operations", "per_second")),
        Plot("p99 latency", "ms", _lines(samples, "operations", "p99_seconds", 1e3)),
        Plot("Read", "MB/s", _lines(samples, "volumes", "read_bytes_per_second", 1e-6)),
        Plot("Written", "MB/s", _lines(samples, "volumes", "written_bytes_per_second", 1e-6)),
        Plot("Messages sent", "Mbit/s", _lines(samples, "sessions", "sent_bits_per_second", 1e-6)),
        Plot("Packets lost", "%", _lines(samples, "sessions", "lost", 100)),
        Plot("Round trip", "ms", _lines(samples, "sessions", "round_trip_seconds", 1e3)),
        Plot("Processor", "cores", {"daemon": [each["processor_cores"] for each in samples]}),
        Plot("Memory", "MiB", {"daemon": [each["memory_bytes"] / 2**20 for each in samples]}),
    ]


def _lines(
    samples: Sequence[Mapping[str, Any]], table_name: str, figure: str, scale: float = 1
) -> dict[str, list[float | None]]:
    """Return a figure of each row over all samples; None where a sample lacks the row."""
    lines: dict[str, list[float | None]] = {}
    for number, sample in enumerate(samples):
        for row in sample[table_name]:
            line = lines.setdefault(_line_name(row), [None] * len(samples))
            line[number] = None if row[figure] is None else row[figure] * scale
    return lines


def _line_name(row: Mapping[str, Any]) -> str:
    if "session" in row:
        return str(row["session"])
    return f"{row['role']}: {row['volume'][:8] if 'volume' in row else row['operation']}"


def _volume_parts(
    volumes: Sequence[Volume], problem: str, events: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    yield heading("Volumes")
    yield paragraph(problem) if problem else table([wide_row(volume) for volume in volumes])
    yield heading("Events of volumes while sampling")
    yield table(
        [
            {
                name: event.get(name, "")
                for name in ("time", "volume", "origin", "kind", "reason", "lba", "detail")
            }
            for event in events
        ]
    )


async def _session_parts(client: Client, status: NodeStatus) -> list[str]:
    parts = [heading("Sessions")]
    if "fabric" not in status.roles:
        return [*parts, paragraph("this daemon is no fabric")]
    try:
        sessions = await list_sessions(client)
    except Error as error:
        return [*parts, paragraph(str(error), is_wrong=True)]
    if not sessions:
        return [*parts, paragraph("none")]
    return parts + [fields(session_rows(each, dict(each.statistics))) for each in sessions]
