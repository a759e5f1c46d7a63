"""Runs the demo, from the first daemon to the written report."""

import asyncio
import json
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import sealane.client
from sealane.cli.demo.allreduce import REPEATS, run_all_reduce
from sealane.cli.demo.attacks import run_attacks
from sealane.cli.demo.card import WRITES, make_card, run_card
from sealane.cli.demo.cluster import CardFiles, ClusterBuilder
from sealane.cli.demo.link import LinkParameters
from sealane.cli.demo.options import DemoOptions
from sealane.cli.demo.report import draw_plot, print_report
from sealane.cli.demo.results import AttackResult, DemoResults, VolumeProof
from sealane.cli.demo.sessions import SCHEMES, Haul, run_haul, scheme_name
from sealane.cli.demo.source import open_source
from sealane.cli.demo.storage import VolumeJob, choose_volume_size, created, prove
from sealane.errors import UsageError

PLOT_NAME: Final = "completion-times.png"
RESULTS_NAME: Final = "results.json"


class StopSignal:
    """Cancels a task at the first signal; later signals don't interrupt its clean-up."""

    number = 0
    """The signal received, 0 for none."""

    def watch(self) -> None:
        """Cancel the current task at SIGINT, SIGTERM or SIGHUP."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine always runs in a task
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, task, number)

    def _stop(self, task: asyncio.Task[object], number: int) -> None:
        if not self.number:
            self.number = number
            task.cancel()


async def run_demo(options: DemoOptions, console: Console, stop: StopSignal) -> DemoResults:
    """Run everything, then write results and plot.

    A signal ends it with CancelledError, after stopping the daemons and removing scratch files; it
    then writes no output.
    """
    stop.watch()
    check_output(options.output)
    with tempfile.TemporaryDirectory(prefix="sealane-") as directory:
        scratch = Path(directory)
        source = await asyncio.to_thread(open_source, options.input, scratch)
        volume_bytes = choose_volume_size(source, options.volume_bytes)
        console.print(f"input: {source.name}, {source.size_bytes:,} bytes")
        card = make_card(scratch / "card") if options.accelerator else None
        builder = ClusterBuilder(scratch, console.print, card=card)
        async with builder.running() as cluster:
            console.print(
                "attestation: software evidence (a key on disk), allowed by a development policy; "
                "it proves nothing about the machine",
                style="yellow",
            )
            progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeElapsedColumn(),
                console=console,
                disable=not console.is_terminal,
            )
            with progress:
                job = VolumeJob(
                    cluster=cluster, source=source, size_bytes=volume_bytes, seed=options.seed
                )
                results = await run_parts(options, job, progress, card)
        plot = write_outputs(results, options.output, scratch)
    output_console = Console(highlight=False)
    print_report(output_console, results)
    output_console.print(f"plot: {plot}", markup=False)
    output_console.print(f"figures: {options.output / RESULTS_NAME}")
    return results


async def run_parts(
    options: DemoOptions, job: VolumeJob, progress: Progress, files: CardFiles | None
) -> DemoResults:
    """Run volume, attacks, both hauls and, if requested, all-reduce and card, with bars."""
    link = LinkParameters()
    volume, attacks = await run_volume_part(job, progress)
    sessions = []
    for number, reliability in enumerate(SCHEMES):
        haul = Haul(
            cluster=job.cluster,
            source=job.source,
            link=link,
            reliability=reliability,
            messages=options.messages,
            # Each link uses two seeds of its own.
            seed=options.seed + 2 * number,
        )
        total = haul.input_messages + haul.messages
        bar = progress.add_task(
            f"session, {scheme_name(reliability)}", total=total, unit="messages"
        )
        sessions.append(await run_haul(haul, partial(progress.advance, bar)))
    summed = None
    if options.all_reduce:
        bar = progress.add_task("all-reduce, 2 sites", total=REPEATS, unit="sums")
        seed = options.seed + 2 * len(SCHEMES)
        advance = partial(progress.advance, bar)
        summed = await run_all_reduce(job.cluster, link, seed=seed, advance=advance)
    card = None
    if files is not None:
        bar = progress.add_task("accelerator card", total=WRITES, unit="MiB")
        advance = partial(progress.advance, bar)
        card = await run_card(job.cluster, files, seed=options.seed, advance=advance)
    return DemoResults(
        source_name=job.source.name,
        seed=options.seed,
        link={
            "rtt_ms": 1e3 * link.rtt_seconds,
            "loss": link.loss,
            "rate_mbit_s": link.rate_bits_per_second / 1e6,
        },
        volume=volume,
        attacks=attacks,
        sessions=tuple(sessions),
        all_reduce=summed,
        card=card,
    )


async def run_volume_part(
    job: VolumeJob, progress: Progress
) -> tuple[VolumeProof, tuple[AttackResult, ...]]:
    """Run the storage half with bars for write, read, search and attacks."""
    bars: dict[str, TaskID] = {}

    def step(name: str, unit: str, total: int, done: int) -> None:
        if name not in bars:
            bars[name] = progress.add_task(name, total=total, unit=unit)
        progress.update(bars[name], completed=done)

    async with (
        sealane.client.connect(str(job.cluster.gateway.socket)) as client,
        created(job, client) as volume,
    ):
        proof = await prove(job, client, volume, step)
        return proof, await run_attacks(job, client, volume, step)


def check_output(directory: Path) -> None:
    """Check that the output directory can be written to; UsageError `output.…`."""
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError("output.directory", f"--output: {existing} is not a directory")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(
            "output.permission", f"--output: {existing} can't be written to ({error.strerror})"
        ) from error


def write_outputs(results: DemoResults, directory: Path, scratch: Path) -> str:
    """Write plot and figures, by way of temporary files, so that no half-written file remains.

    Return the plot's path, or why there is none.
    """
    (scratch / RESULTS_NAME).write_text(json.dumps(results.as_json(), indent=2) + "\n")
    plot = str(directory / PLOT_NAME)
    try:
        draw_plot(results, scratch / PLOT_NAME)
    except UsageError as error:
        plot = f"none, {error}"
    directory.mkdir(parents=True, exist_ok=True)
    for name in (PLOT_NAME, RESULTS_NAME):
        if (scratch / name).exists():
            part = directory / f".{name}.part"
            shutil.copyfile(scratch / name, part)
            part.replace(directory / name)
    return plot
