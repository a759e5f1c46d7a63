"""`sealanectl volume scrub | refresh | jobs`, and what `volume get` shows of a store."""

import argparse
import contextlib
import dataclasses
import datetime as dt
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from sealane.cli.names import find_volume
from sealane.cli.output import SIZE_UNITS, Output, size_text, text_of
from sealane.cli.verbs import named
from sealane.client import Client, JobFinding, Volume, VolumeJob, VolumeStore
from sealane.errors import UnavailableError, foreign_reason
from sealane.protocol.kinds import AnchorKind, JobKind, JobOrder, JobState, StoreHealth

_DIGITS_MAX: Final = 19
_HEALTH_NOTES: Final[dict[str, str]] = {
    StoreHealth.UNKNOWN: ": no whole scrub yet",
    StoreHealth.FAILED: ": refuses all commands until its target restarts",
}
_KINDS = {
    JobKind.SCRUB: "read and check every written sector at the target, in the background",
    JobKind.REFRESH: "renew fast-path MACs, in the background, so that reads need no leaf page",
}


def add_job_verbs(verbs: Any) -> None:
    """Add the verbs about background jobs."""
    for kind, text in _KINDS.items():
        parser = named(verbs, str(kind), partial(_run_job, kind=kind), text, find=find_volume)
        parser.add_argument(
            "--rate",
            type=parse_rate,
            metavar="RATE",
            help="limit in bytes per second, such as 200MiB/s; 0: no limit (default)",
        )
        parser.add_argument("--wait", action="store_true", help="wait until the job ends")
        orders = parser.add_mutually_exclusive_group()
        for order, what in (
            (JobOrder.PAUSE, "pause the job, keeping its position"),
            (
                JobOrder.RESUME,
                "continue the job; with --rate, change its rate even if it is running",
            ),
            (JobOrder.CANCEL, "end the job"),
        ):
            orders.add_argument(
                f"--{order}", dest="order", action="store_const", const=order, default="", help=what
            )
    named(
        verbs,
        "jobs",
        _show_jobs,
        "show a volume's last scrub and refresh, and what they found",
        find=find_volume,
    )


async def _run_job(
    client: Client, options: argparse.Namespace, output: Output, *, kind: str
) -> None:
    name = options.name
    if options.order:
        job = await client.volumes.change_job(
            name, kind, order=options.order, bytes_per_second=options.rate
        )
    else:
        job = await client.volumes.start_job(name, kind, bytes_per_second=options.rate or 0)
    if options.wait:
        with _progress(kind) as progress:
            job = await client.volumes.wait_job(name, kind, progress=progress)
    output.show_one(dataclasses.asdict(job), job_rows(job))


async def _show_jobs(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.get(options.name, with_store=True)
    if volume.store is None:
        raise UnavailableError(
            foreign_reason(volume.store_unknown),
            f"{volume.name}: its store can't be read: {volume.store_unknown}",
        )
    jobs = volume.store.jobs
    if output.is_data:
        output.show([dataclasses.asdict(job) for job in jobs])
        return
    for job in jobs:
        output.show_one({}, job_rows(job))


@contextlib.contextmanager
def _progress(kind: str) -> Iterator[Callable[[VolumeJob], None] | None]:
    """Show a progress bar while waiting for a job, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    # Imported only here: the other commands start faster without it.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(kind, total=None, state="")

        def show(job: VolumeJob) -> None:
            progress.update(task, total=job.sector_count, completed=job.position, state=_state(job))

        yield show


def job_rows(job: VolumeJob) -> dict[str, Any]:
    """Return a job as rows of a table."""
    rows: dict[str, Any] = {
        "job": job.kind,
        "state": _state(job),
        "sectors checked": job.checked,
        "found wrong": job.found,
        "repaired": job.repaired,
    }
    if job.unchecked:
        rows["sectors not checkable"] = job.unchecked
    if job.kind == JobKind.REFRESH:
        rows["sectors with a MAC"] = job.refreshed
    rows |= {
        "rate": _rate(job),
        "gave way to hosts": f"{job.yields} times",
        "started": job.started,
        "ended": job.ended or "",
        "interruptions": job.interruptions,
    }
    rows |= {f"finding {n}": _finding(found) for n, found in enumerate(job.findings, 1)}
    if job.found > len(job.findings) > 0:
        rows["further findings"] = job.found - len(job.findings)
    return rows


def _state(job: VolumeJob) -> str:
    if job.state not in {JobState.RUNNING, JobState.PAUSED}:
        return f"{job.state}: {job.detail}" if job.detail else job.state
    share = 100 * job.position // max(job.sector_count, 1)
    left = job.seconds_left
    eta = "" if left is None else f", {dt.timedelta(seconds=round(left))} left"
    return f"{job.state}, {share} %, {job.found} found wrong{eta}"


def _rate(job: VolumeJob) -> str:
    limit = f", {size_text(job.bytes_per_second)}/s at most" if job.bytes_per_second else ""
    moved = size_text(job.bytes_moved)
    if job.active_seconds <= 0:
        return f"{moved} so far{limit}"
    return f"{moved} at {size_text(round(job.bytes_moved / job.active_seconds))}/s{limit}"


def _finding(found: JobFinding) -> str:
    where = "" if found.lba is None else f"sector {found.lba}: "
    known = " (repairable: rewritten at the job's end)" if found.repairable else ""
    return f"{where}{found.reason}, {found.detail}{known}"


def store_rows(volume: Volume) -> dict[str, Any]:
    """Return a volume's store as `volume get` shows it."""
    if volume.store is None:
        return {"store": f"unknown: {volume.store_unknown}"} if volume.store_unknown else {}
    store = volume.store
    rows: dict[str, Any] = {"store": store.kind}
    if store.health:
        rows["health"] = health_text(store) + _HEALTH_NOTES.get(store.health, "")
    if store.health == StoreHealth.OPENING:
        return rows
    rows["sectors written"] = store.sectors_written
    return rows | _fresh_rows(store) if store.layout else rows


def health_text(store: VolumeStore) -> str:
    """Return a store's health as tables show it."""
    if store.health != StoreHealth.OPENING:
        return store.health
    return f"opening, {100 * store.opening_done // max(store.opening_expected, 1)} %"


def _fresh_rows(store: VolumeStore) -> dict[str, Any]:
    looks = store.leaf_cache_hits + store.leaf_cache_misses
    hits = f", hit by {100 * store.leaf_cache_hits // looks} % of {looks} reads" if looks else ""
    rows = {
        "layout": store.layout,
        "anchor": _anchor(store),
        "unmerged changes": f"{store.pending} of {store.pending_max}",
        "log": f"{store.log_pages_used} of {store.log_pages_max} pages",
        "root commits": store.root_commits,
        "epoch": store.epoch,
        "leaf pages in memory": f"{store.leaf_cache_pages}{hits}",
        "last opening": _opening(store),
    }
    return rows | {f"last {job.kind}": _last(job) for job in store.jobs}


def _anchor(store: VolumeStore) -> str:
    if not store.anchor_number:
        return store.anchor or AnchorKind.NONE
    age = store.anchor_age_seconds
    when = "" if age is None else f", {dt.timedelta(seconds=round(age))} ago"
    return f"{store.anchor or 'none'}, number {store.anchor_number}{when}"


def _opening(store: VolumeStore) -> str:
    if store.epoch <= 1:
        return "created"
    log = f"{store.recovered_log_pages} log pages in {store.recovery_seconds:.3g} s"
    return f"recovered {store.recovered_changes} changes from {log}"


def _last(job: VolumeJob) -> str:
    when = "" if job.ended is None else f"{text_of(job.ended)}, "
    repaired = f", {job.repaired} repaired" if job.found else ""
    return f"{when}{_state(job)}, {job.checked} sectors, {job.found} found wrong{repaired}"


def parse_rate(text: str) -> int:
    """Return bytes per second for "1000000", "200MiB" or "200MiB/s"; ArgumentTypeError."""
    size = text.removesuffix("/s")
    digits = size.rstrip("KMGTPiB")
    unit = SIZE_UNITS.get(size[len(digits) :])
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX
    if unit is None or not is_number or int(digits) * unit >= 1 << 63:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: bytes per second, as a number or with KiB to PiB"
        )
    return int(digits) * unit
