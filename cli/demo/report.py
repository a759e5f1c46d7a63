"""Tables and the plot of a demo run."""

from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sealane.cli.demo.results import (
    AllReduceRun,
    CardRun,
    DemoResults,
    SessionRun,
    VolumeProof,
    quantiles,
)
from sealane.cli.plots import pyplot
from sealane.protocol.sector import METADATA_BYTES, SECTOR_BYTES


def mebibytes_per_second(size_bytes: int, seconds: float) -> str:
    """Format a rate."""
    return f"{size_bytes / seconds / (1 << 20):,.0f} MiB/s"


def verdict(*, good: bool) -> str:
    """Return "yes" or "NO", coloured."""
    return "[green]yes[/]" if good else "[bold red]NO[/]"


def volume_table(proof: VolumeProof) -> Table:
    """Return the table of the volume: its rates, its counters, and the search of the store."""
    table = Table(title="Sealed volume", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("what")
    table.add_column("found", justify="right")
    rate = mebibytes_per_second
    rows = [
        ("bytes of input", f"{proof.input_bytes:,}"),
        ("write, flush included", rate(proof.input_bytes, proof.write_seconds)),
        ("read", rate(proof.input_bytes, proof.read_seconds)),
        (f"sectors sealed ({SECTOR_BYTES} + {METADATA_BYTES} bytes)", f"{proof.sectors_written:,}"),
        ("counters used, 256 a sector", f"{proof.counters_used:,}"),
        ("counters leased", f"{proof.counters_leased:,}"),
        ("SHA-256 read = written", verdict(good=proof.sha256_read == proof.sha256_written)),
        (
            "16-byte pieces of the input found in the input itself",
            f"{proof.pieces_found_in_input:,} of {proof.pieces_sampled:,}",
        ),
        (
            "the same pieces found in the target's store",
            f"{proof.pieces_found_in_store:,} of {proof.pieces_sampled:,}",
        ),
    ]
    for what, found in rows:
        table.add_row(what, found)
    return table


def attack_table(results: DemoResults) -> Table:
    """Return the table of attacks and their refusals."""
    table = Table(title="Attacks", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("attack", "refusal", "host saw", "held"):
        table.add_column(heading)
    for attack in results.attacks:
        table.add_row(
            attack.name,
            f"{attack.refused_by}: {attack.found_reason}",
            attack.host_saw,
            verdict(good=attack.refused),
        )
    return table


def session_table(results: DemoResults) -> Table:
    """Return the table of both reliability schemes, with model and ideal."""
    link = results.link
    title = (
        f"Sealed sessions over {link['rtt_ms']:g} ms RTT, loss {link['loss']:g}, "
        f"{link['rate_mbit_s']:g} Mbit/s"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("what", *(run.scheme for run in results.sessions)):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, cells in session_rows(results.sessions):
        table.add_row(what, *cells)
    return table


def session_rows(runs: tuple[SessionRun, ...]) -> list[tuple[str, list[str]]]:
    """Return one row per figure, with one cell per scheme."""

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.1f} ms"

    rows = [
        ("input carried", [mebibytes_per_second(r.input_bytes, r.transfer_seconds) for r in runs]),
        ("SHA-256 received = sent", [verdict(good=run.holds) for run in runs]),
        ("messages timed, n", [f"{len(run.completion_seconds)}" for run in runs]),
        ("ideal (no loss, no parity)", [milliseconds(run.ideal_seconds) for run in runs]),
    ]
    rows += [
        (f"completion {name}", [milliseconds(run.quantiles()[name]) for run in runs])
        for name in ("mean", "p50", "p95", "max")
    ]
    rows += [
        (f"model {name}", [milliseconds(run.model_quantiles()[name]) for run in runs])
        for name in ("mean", "p50", "p95")
    ]
    rows += [
        ("packets sent", [f"{run.packets_sent:,}" for run in runs]),
        ("lost on the link, both ways", [f"{run.link_packets_lost:,}" for run in runs]),
        ("retransmitted", [f"{run.packets_retransmitted:,}" for run in runs]),
        ("parity", [f"{run.packets_parity:,}" for run in runs]),
        ("units decoded from parity", [f"{run.units_decoded:,}" for run in runs]),
    ]
    return rows


def all_reduce_table(run: AllReduceRun) -> Table:
    """Return the table of the all-reduce, measured and predicted."""
    title = f"All-reduce of {run.array_bytes >> 20} MiB, {run.sites} sites, over the same links"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("what", "measured", "model"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    measured = quantiles(np.asarray(run.seconds))
    expected = quantiles(np.asarray(run.model_seconds))
    table.add_row("SHA-256 at all sites = that of the sum", verdict(good=run.holds), "")
    table.add_row("sums timed, n", f"{len(run.seconds)}", "")
    table.add_row("ideal (no loss, no parity)", "", f"{1e3 * run.ideal_seconds:.1f} ms")
    for name in ("mean", "p50", "p95"):
        cells = (f"{1e3 * one[name]:.1f} ms" for one in (measured, expected))
        table.add_row(f"completion {name}", *cells)
    return table


def card_table(run: CardRun) -> Table:
    """Return the table of the accelerator card that was killed."""
    table = Table(
        title="Accelerator card, killed under load",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("found", justify="right")
    rows = [
        ("card, emulated", run.product),
        ("bytes written", f"{run.written_bytes:,}"),
        ("sectors sealed by the card", f"{run.sectors_by_card:,}"),
        ("sectors sealed by the processor", f"{run.sectors_by_processor:,}"),
        ("given up by the gateway, times", f"{run.losses}"),
        ("SHA-256 read = written", verdict(good=run.sha256_read == run.sha256_written)),
    ]
    for what, found in rows:
        table.add_row(what, found)
    return table


def print_report(console: Console, results: DemoResults) -> None:
    """Print the tables."""
    console.print(volume_table(results.volume))
    console.print(attack_table(results))
    console.print(session_table(results))
    if results.all_reduce is not None:
        console.print(all_reduce_table(results.all_reduce))
    if results.card is not None:
        console.print(card_table(results.card))


def draw_plot(results: DemoResults, path: Path) -> None:
    """Draw measured and predicted completion times as cumulative distributions.

    UsageError `plots.library` without matplotlib.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.0, 4.8), layout="constrained")
    for run, colour in zip(results.sessions, ("tab:blue", "tab:orange"), strict=True):
        for seconds, style, label in (
            (run.completion_seconds, "-", f"{run.scheme}, measured (n = {{}})"),
            (run.model_seconds, "--", f"{run.scheme}, model"),
        ):
            times = np.sort(np.asarray(seconds)) * 1e3
            share = np.arange(1, len(times) + 1) / len(times)
            axes.step(
                np.concatenate(([times[0]], times)),
                np.concatenate(([0.0], share)),
                where="post",
                linestyle=style,
                color=colour,
                label=label.format(len(times)),
            )
    ideal = results.sessions[0].ideal_seconds * 1e3
    axes.axvline(ideal, color="grey", linestyle=":", label=f"ideal, {ideal:.1f} ms")
    link = results.link
    size_mebibytes = results.sessions[0].message_bytes / (1 << 20)
    axes.set_title(
        f"{size_mebibytes:g} MiB messages over {link['rtt_ms']:g} ms RTT, "
        f"loss {link['loss']:g}, {link['rate_mbit_s']:g} Mbit/s"
    )
    axes.set_xlabel("completion time, ms (first transmission to last acknowledgement)")
    axes.set_ylabel("share of messages completed")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
