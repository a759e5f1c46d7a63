"""The engine's statistics as metrics: for each its type, its unit and what it means.

The engine counts in whole numbers and names them for itself; metrics follow Prometheus's rules:
base units, `_total` behind counters, one metric with a label instead of several that add up.
`make metrics` writes the table of docs/operate/metrics.md from this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from sealane.protocol.kinds import JobKind

_SECONDS: Final = {"_nanos": 1e-9, "_ms": 1e-3}
"""Suffixes of the engine's durations, and their units in seconds."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A figure of the engine, and the metric that has it."""

    help: str
    kind: Literal["counter", "gauge"] = "counter"
    metric: str = ""
    """Its name behind the prefix; empty: the engine's, with `_seconds` instead of its unit."""
    label: tuple[str, str] | None = None
    """Name and value of the label that tells it from others of the same metric."""
    is_always: bool = False
    """Whether an idle volume has it, too."""

    def name_of(self, figure: str) -> str:
        """Return the metric's name behind the prefix, without `_total`."""
        if self.metric:
            return self.metric
        for suffix in _SECONDS:
            if figure.endswith(suffix):
                return f"{figure.removesuffix(suffix)}_seconds"
        return figure


UNKNOWN: Final = Statistic("A figure of the engine that this version doesn't describe.", "gauge")


def scale_of(figure: str) -> float:
    """Return what one of the engine's units is in the metric's."""
    return next((scale for suffix, scale in _SECONDS.items() if figure.endswith(suffix)), 1)


def _counter(text: str, *, metric: str = "") -> Statistic:
    return Statistic(text, metric=metric)


def _gauge(text: str, *, metric: str = "") -> Statistic:
    return Statistic(text, "gauge", metric)


def _always(each: Statistic) -> Statistic:
    return replace(each, is_always=True)


class GatewayVolumeState(StrEnum):
    """What a gateway does with a volume that it has something to do with."""

    ATTACHED = "attached"
    STANDBY = "standby"
    REATTACHING = "reattaching"
    FILLING = "filling"

    @property
    def figure(self) -> str:
        """The name of its figure, which is 1."""
        return f"state_{self}"


def only_in(state: GatewayVolumeState) -> dict[str, int]:
    """Return the figure of a volume's state: the others' are absent, not 0."""
    return {state.figure: 1}


_GATEWAY_VOLUME: Final = {
    **{
        state.figure: Statistic(
            "1 for the volume's state at this gateway; detached volumes have none.",
            "gauge",
            "state",
            ("state", state),
            is_always=True,
        )
        for state in GatewayVolumeState
    },
    "size_bytes": _always(_gauge("Size of the volume, while it is attached or being filled.")),
    "reads": _always(_counter("Reads by the host.")),
    "writes": _always(_counter("Writes by the host.")),
    "flushes": _always(_counter("Flushes by the host.")),
    "read_nanos": _counter("Time of answered reads, added up."),
    "write_nanos": _counter("Time of answered writes, added up."),
    "flush_nanos": _counter("Time of answered flushes, added up."),
    "deallocations": _counter("Deallocations by the host."),
    "compares": _counter("Compares by the host."),
    "verifies": _counter("Verifies by the host."),
    "sectors_sealed": _counter("Sectors sealed, 4096 bytes each."),
    "sectors_opened": _counter("Sectors opened, 4096 bytes each."),
    "sectors_unwritten": _counter("Sectors read that were never written."),
    "counters_used": _counter("Counters used for sealing."),
    "counters_leased": _counter("Counters leased from brokers."),
    "refusals": _always(_counter("Sectors and answers of the target that were refused.")),
    "associations_lost": _always(_counter("Associations with the target that were lost.")),
    "commands_resent": _counter("Commands sent again after one was lost."),
    "commands_timed_out": _counter("Commands that the target did not answer in time."),
    "commands_given_up": _always(_counter("Commands that ended with an error for lack of one.")),
    "changes_replayed": _counter("Unflushed changes sent to a target again."),
    "journal_flushes": _counter("Flushes by the gateway, for room in the journal."),
    "journal_bytes": _always(_gauge("Acknowledged, unflushed changes that are kept.")),
    "rekeys": _counter("Changes of the secure queues' keys."),
    "sectors_accelerated": _counter("Sectors sealed by an accelerator."),
    "sectors_inline": _counter("Sectors sealed by the processor because the accelerator was full."),
    "accelerator_jobs": _counter("Sectors that an accelerator was given to seal."),
    "accelerator_nanos": _counter("Time of an accelerator's jobs that have ended, added up."),
    "accelerator_refusals": _counter("Wrong results of an accelerator; none was used."),
    "accelerators_lost": _counter("Times that a queue gave up an accelerator."),
    "queues_running": _always(_gauge("I/O queues of the host.")),
    "is_standby": _gauge("1 while another gateway of its fail-over group serves its host."),
    "events_dropped": _counter("Events that the log had no room for."),
}

_JOBS: Final = {
    f"{kind}_{figure}": each
    for kind in JobKind
    for figure, each in {
        "running": _gauge(f"1 while a {kind} runs."),
        "position": _gauge(f"The sector that the {kind} has reached."),
        "checked": _gauge(f"Sectors checked by the last {kind}."),
        "found": _gauge(f"Faulty sectors found by the last {kind}."),
        "repaired": _gauge(f"Of these, those written again by the {kind}."),
        "ended_seconds": _gauge(
            f"When the last {kind} ended, Unix time.", metric=f"{kind}_ended_timestamp_seconds"
        ),
    }.items()
}

_TARGET_VOLUME: Final = {
    "size_bytes": _always(_gauge("Size of the volume.")),
    "host_reads": _counter("Reads served."),
    "host_writes": _counter("Writes served."),
    "flushes": _counter("Flushes served."),
    "host_read_nanos": _counter("Time of answered reads, added up."),
    "host_write_nanos": _counter("Time of answered writes, added up."),
    "flush_nanos": _counter("Time of answered flushes, added up."),
    "deallocations": _counter("Deallocations served."),
    "sectors_read": _always(_counter("Sectors read, 4096 bytes each.")),
    "sectors_stored": _always(_counter("Sectors stored, 4096 bytes each.")),
    "busy_ms": _counter("Time in which any command was in progress."),
    "media_errors": _always(_counter("Reads and writes that the device failed.")),
    "refusals": _always(_counter("Commands and sectors refused, stale ones among them.")),
    "reservation_conflicts": _counter("Commands refused for another host's reservation."),
    "throttled": _counter("Commands delayed by a limit."),
    "contended": _counter("Commands that waited for another on the same sectors."),
    "take_overs": _counter("Times that a gateway of a fail-over group took over."),
    "standby_refusals": _counter("Queues refused to gateways that another one had fenced."),
    "superseded": _counter("Changes that came again and were already made."),
    "ordering_flushes": _counter("Flushes made to keep changes of several gateways in order."),
    "events_dropped": _counter("Events that the log had no room for."),
    "device_reads": _counter("Reads of the device."),
    "device_writes": _counter("Writes of the device."),
    "device_flushes": _counter("Flushes of the device."),
    "device_deallocations": _counter("Deallocations of the device."),
    "device_bytes_read": _counter("Bytes read from the device."),
    "device_bytes_written": _counter("Bytes written to the device."),
    "device_failures": _counter("Operations that the device failed."),
    "leaf_cache_hits": _counter("Leaf pages found in memory."),
    "leaf_cache_misses": _counter("Leaf pages that had to be read."),
    "leaf_pages_read": _counter("Leaf pages read."),
    "leaf_pages_written": _counter("Leaf pages written."),
    "node_pages_written": _counter("Pages of the tree's nodes written."),
    "log_pages_written": _counter("Log pages written."),
    "device_syncs": _counter("Syncs of the device."),
    "merges": _counter("Merges of changes into leaf pages."),
    "checkpoints": _counter("Checkpoints written."),
    "anchors": _counter("Advances of the anchor."),
    "recovered_log_pages": _gauge("Log pages found when the store was opened."),
    "recovered_changes": _gauge("Changes recovered from them."),
    "recovery_ms": _gauge("Duration of that opening."),
    "epoch": _gauge("Number of that opening."),
    "anchored": _gauge("1 if an anchor keeps the store's state."),
    "anchor_number": _gauge("Number of the anchor's last advance."),
    "log_pages_used": _gauge("Log pages that may not be written again yet."),
    "orphaned_sets": _always(_gauge("Leaf pages found wrong since the store was opened.")),
    "root_commits": _counter("Commits of the tree's root."),
    "leaf_cache_pages": _gauge("Leaf pages in memory."),
    "log_pages_max": _gauge("Log pages that may be used."),
    "pending_max": _gauge("Largest number of changes that wait for a merge."),
    "anchor_age_ms": _always(_gauge("Time since the anchor was advanced.")),
    "pending_entries": _gauge("Changes that wait for a merge."),
    "failed": _always(_gauge("1 when the store accepts no writes until it is opened again.")),
    "sectors_written": _gauge("Sectors that have data."),
    "queues_running": _gauge("I/O queues of gateways."),
    **_JOBS,
    "scrub_found": _always(_JOBS["scrub_found"]),
    "scrub_ended_seconds": _always(_JOBS["scrub_ended_seconds"]),
}

_PATH: Final = {
    "validated": _gauge("1 when the peer has answered on the path."),
    "packets_sent": _counter("Packets sent."),
    "wire_bytes_sent": _counter("Bytes sent, headers included."),
    "packets_received": _counter("Packets received."),
    "lost_packets": _counter("Packets lost on the way to the peer."),
    "lost_runs": _counter("Runs of packets lost one after the other."),
    "peer_drops": _counter("Packets that the peer's host dropped."),
    "srtt_nanos": _gauge("Smoothed round trip."),
    "ce_received": _counter("Packets received with a congestion mark."),
    "ce_echoed": _counter("Packets sent that the peer received with a congestion mark."),
}

_SESSION: Final = {
    **{name: each for name, each in _PATH.items() if name != "validated"},
    "data_packets_sent": _counter("Packets with data sent for the first time."),
    "parity_packets_sent": _counter("Packets with parity sent."),
    "retransmitted_packets": _counter("Packets sent again."),
    "control_packets_sent": _counter("Packets without units sent."),
    "wire_bytes_received": _counter("Bytes received, headers included."),
    "units_received": _counter("Units received for the first time."),
    "duplicates": _counter("Units received again."),
    "surplus": _counter("Units of blocks that were complete."),
    "late": _counter("Units of messages that had ended."),
    "forged": _counter("Packets that no key opens."),
    "replayed": _counter("Packets received a second time."),
    "malformed": _counter("Packets with a wrong format."),
    "unposted": _counter("Units of messages without a receive."),
    "scratch_full": _counter("Parity units dropped for lack of memory."),
    "decoded_units": _counter("Units rebuilt from parity."),
    "fallbacks": _counter("Messages with a code that needed units sent again."),
    "stalls": _counter("Times that nothing came from the peer for a time-out."),
    "payload_bytes_sent": _counter("Bytes of messages sent whole."),
    "payload_bytes_received": _counter("Bytes of messages received whole."),
    "sends_completed": _counter("Sends that succeeded."),
    "receives_completed": _counter("Receives that succeeded."),
    "failed": _counter("Sends and receives that failed.", metric="failures"),
    "rto_nanos": _gauge("Retransmission time-out."),
    "misdirected": _counter("Packets for another session."),
    "foreign_packets": _counter("Packets from an address that isn't the peer's."),
    "unknown_epoch": _counter("Packets under a key that isn't known."),
    "key_updates_sent": _counter("Changes of the sending key."),
    "key_updates_received": _counter("Changes of the receiving key."),
    "is_ecn_capable": _gauge("1 if packets carry congestion marks."),
    "spurious_retransmissions": _counter("Packets sent again that had not been lost."),
    "timed_runs": _counter("Runs of packets lost without a queue whose length in time is known."),
    "timed_runs_nanos": _counter("Length of these runs, added up."),
    "missing_packets": _counter("Packets missing when later ones came."),
    "missing_runs": _counter("Runs of such packets."),
    "reordered_packets": _counter("Packets that came after later ones."),
    "reported_losses": _counter("Losses that the peer reported."),
    "timeouts": _counter("Retransmission time-outs."),
    "probes_sent": _counter("Probes sent."),
    "stalled_nanos": _counter("Time in which nothing came from the peer."),
    "rate_bytes_per_second": _gauge("Rate at which the session may send."),
    "breaker_trips": _counter("Times that the rate was cut because the path can't carry it."),
    "path_mtu_bytes": _gauge("Largest packet that the path carries."),
    "paths_validated": _gauge("Paths on which the peer has answered."),
    "path_silences": _counter("Times that a path fell silent."),
    "path_moves": _counter("Times that the peer's address changed."),
    "window_bytes": _gauge("Window of the congestion controller."),
    "marking_failures": _counter("Times that marks were found not to reach the peer."),
    "is_fallen_back": _gauge("1 while the controller goes by delay for lack of marks."),
    "rtt_least_nanos": _gauge("Least round trip seen."),
    "clear_packets": _counter("Packets that arrived or were lost while the path had no queue."),
    "clear_losses": _counter("Packets lost while the path had no queue."),
    "clear_runs": _counter("Runs of packets lost while the path had no queue."),
    "send_errors": _counter("Errors of the socket when sending."),
    "send_calls": _counter("System calls that sent."),
    "send_drops": _counter("Packets that this host dropped when sending."),
    "receive_calls": _counter("System calls that received."),
    "receive_drops": _counter("Packets that this host dropped when receiving."),
    **{
        f"limited_{cause}_nanos": Statistic(
            "Time in which something kept the session from sending more, by cause.",
            metric="limited_seconds",
            label=("cause", cause),
        )
        for cause in (
            *("application", "credit", "pacing", "loss", "round_trip", "stall", "completions"),
            *("shared_rate", "congestion"),
        )
    },
}

_JOB: Final = {
    "sessions": _gauge("Sessions and listeners open."),
    "region_bytes": _gauge("Shared memory."),
    "receives": _gauge("Receives outstanding."),
    "sends": _gauge("Sends outstanding."),
    "wire_bytes_sent": _counter("Bytes sent, headers included."),
    "waits": _counter("Times that it waited for its turn on the shared rate."),
    "waited_nanos": _counter("Time of these waits."),
    "refused_operations": _counter("Operations refused for being too many at once."),
}

CATALOGUE: Final[Mapping[str, Mapping[str, Statistic]]] = {
    "gateway_volume": _GATEWAY_VOLUME,
    "gateway_target": {
        "is_away": _gauge("1 while a target of this gateway doesn't answer, or is refused."),
        "is_unhealthy": _gauge("1 while its device, or one of its stores, doesn't serve."),
        "is_draining": _gauge("1 while it is being drained and takes no new volumes."),
        "free_bytes": _gauge("Its room for new volumes, as it says."),
        "capacity_bytes": _gauge("Capacity of which the free bytes are a part."),
    },
    "target_volume": _TARGET_VOLUME,
    "plain_namespace": _TARGET_VOLUME,
    "target_opening": {
        "done": _gauge("Pages and records processed by an opening of the store."),
        "expected": _gauge("Their number, as far as it is known."),
    },
    "space": {
        "capacity_bytes": _gauge("Capacity of the file system that holds the directory."),
        "free_bytes": _gauge("What of it the daemon may still take."),
        "reserve_bytes": _gauge("Kept of it for what must go on while it is full."),
        "promised_bytes": _gauge("What thin volumes there may still take."),
        "is_low": _gauge("1 while more than node.space_warning_percent of it is used."),
        "is_full": _gauge("1 while less than 1 MiB of it is free, or in the reserve."),
        "is_unknown": _gauge("1 while it answers with errors, or hasn't answered for 30 s."),
    },
    "session": _SESSION,
    "session_path": {
        **_PATH,
        "device_failures": _counter("Failures of the RDMA device; the queue pair is made again."),
    },
    "job": _JOB,
    **{
        f"{role}_authorization": {
            "age_seconds": _gauge("Time since a peer was last authorized by the broker.")
        }
        for role in ("target", "gateway", "fabric")
    },
}
"""What each prefix of metrics exports."""

LATENCIES: Final[Mapping[str, tuple[str, str]]] = {
    "gateway": ("sealane_gateway_io_seconds", "Time from a host's command to its answer."),
    "target": ("sealane_target_io_seconds", "Time from a command's arrival to its answer."),
    "fabric": ("sealane_fabric_message_seconds", "Time from a job's send to its completion."),
    "accelerator": (
        "sealane_accelerator_job_seconds",
        "Time from a job's submission to the gateway's card to its end.",
    ),
}
"""Name and help of the histogram of each role and of a gateway's card, by label `operation`."""
