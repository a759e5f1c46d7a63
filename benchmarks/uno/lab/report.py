"""Tables of what was measured on real sockets: one of times, one of the network."""

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.uno.report import Columns, Record, Value, table, times_of
from rich.console import Console


def _field(name: str, divisor: float = 1.0) -> Value:
    """Return the access to a number of a record."""

    def value(record: Record) -> float | None:
        found: float | None = record[name]
        return None if found is None else found / divisor

    return value


TIMES: Final[Columns] = {
    "mean, ms": (times_of("all", "mean"), "{:,.0f}"),
    "near mean, ms": (times_of("near", "mean"), "{:,.0f}"),
    "near p50, ms": (times_of("near", "p50"), "{:,.0f}"),
    "near p99, ms": (times_of("near", "p99"), "{:,.0f}"),
    "far mean, ms": (times_of("far", "mean"), "{:,.0f}"),
    "far p99, ms": (times_of("far", "p99"), "{:,.0f}"),
    "worst, ms": (times_of("all", "worst"), "{:,.0f}"),
}
NETWORK: Final[Columns] = {
    "Jain, 100 ms": (_field("jain_steps"), "{:.3f}"),
    "fair after, s": (_field("fair_after"), "{:.1f}"),
    "near/far": (_field("near_per_far"), "{:.2f}"),
    "queue p99, kB": (_field("queue_p99", 1000), "{:,.0f}"),
    "queue p99, ms": (_field("queue_p99_millis"), "{:,.0f}"),
    "wire/payload": (lambda record: record["wire_per_payload"] or None, "{:.2f}"),
    "CPU, s/GB": (_field("processor_per_gb"), "{:,.0f}"),
    "emulator, s/GB": (_field("emulator_per_gb"), "{:,.0f}"),
}
COLUMNS: Final[Columns] = TIMES | NETWORK
NOTES: Final = """\
* Near messages behind far ones are the short ones. Under mixed load, times count from a message's
  arrival, also while it waits for a connection.
* Jain: over the hosts that have something to send, by the bytes that arrive from each in 100 ms for
  each of its messages. Fair after: all later intervals have .95 or more; a run that never gets
  there counts whole.
* Queue: at the receiver's port. Wire: bytes that the senders put on their cables, with all headers,
  repeated packets and parity.
* CPU: user and system time of the sending and receiving processes; of sessions, jobs and fabrics.
  The receiving kernel's part counts as the emulator's, which hands it the packets: with TCP, that
  is TCP itself, and whatever it sends when it is acknowledged.
* For TCP: it runs in the kernel, before any program, and encrypts nothing. Against TCP: interfaces
  of the lab have no segmentation and receive offloads.
* For sessions: each uses up to ten paths, and so all links between the sites. TCP and QUIC have one
  path for each connection, at 12.5 Mbit/s from the other site, and only some of them meet the link
  that is down. Against sessions: nine fabrics share the cores with their jobs and the emulator.
* Against QUIC: each process has one thread for all of its connections.
"""
"""What is counted, and what makes which way look better than it is."""


def show(console: Console, title: str, records: Sequence[Record]) -> None:
    """Print both tables, and what to know of them."""
    console.print(table(f"{title}: completion times", records, TIMES))
    console.print(table("The network in the same runs", records, NETWORK))
    console.print(NOTES, highlight=False)


def void(record: dict[str, Any]) -> str:
    """Return in a line why a run is void."""
    return f"{record['scheme']}, {record['workload']}: void: {record['void'][0]}"
