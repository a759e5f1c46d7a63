"""Native engine: all per-packet and per-sector work. This stub is the contract of `native/py`."""

import os
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Literal, Self, TypedDict, final

from typing_extensions import Buffer

from sealane.protocol.kinds import JobKind, JobOrder, StoreKind

__version__: str

# Sessions

SOCKET_BUFFER_BYTES: int
"""Receive and send buffer that a session asks the kernel for, for each of its sockets."""

@final
class SharedLine:
    # The rate that all sessions of a fabric share, in bits per second on the wire.
    def __new__(cls, rate_bits_per_second: int) -> Self: ...
    # Add a job with its limits: bits per second on the wire, and receives and sends in progress.
    def add_user(self, *, rate_bits_per_second: int, receives: int, sends: int) -> UserAccount: ...

@final
class UserAccount:
    """What the jobs of one user use together."""

    def add_job(self, *, rate_bits_per_second: int, receives: int, sends: int) -> JobAccount: ...

@final
class JobAccount:
    # What all sessions of one job use together. `waits` and `waited_nanos` count waits for a turn
    # on the shared line; `receives` and `sends` are those in progress now.
    def usage(self) -> dict[str, int]: ...

class SessionPath(TypedDict):
    wire: str
    local_address: str
    peer_address: str
    state: Literal["challenged", "validated", "silent", "abandoned"]
    statistics: dict[str, int]

@final
class Steering:
    # How a session steers what it sends. `congestion` is a controller by its name in the engine, or
    # None for the session's rate alone; the line and the round trips must be equal for all sessions
    # of a network. With `phantom_marks`, marks are no sign of a queue. `window_bytes`: a window
    # that suited the path so long ago; 0: none is known.
    # ValueError: no such controller, or a network that it can't work in.
    def __new__(
        cls,
        *,
        congestion: str | None,
        line_bits_per_second: int,
        near_rtt_nanos: int,
        far_rtt_nanos: int,
        phantom_marks: bool = False,
        window_bytes: int = 0,
        window_age_nanos: int = 0,
    ) -> Self: ...

@final
class WireAddress:
    # The end of a path, as a peer names it: address:port, or verbs:address,qpn=…,psn=…,mtu=…
    # [,rkey=…].
    # ValueError: it is neither.
    def __new__(cls, text: str) -> Self: ...
    # "udp" or "verbs"
    @property
    def wire(self) -> str: ...
    @property
    def host(self) -> str: ...
    # Largest packet of a queue pair, in bytes; None for UDP.
    @property
    def mtu_bytes(self) -> int | None: ...

@final
class SharedRegion:
    # The daemon's handle on a region; sessions of one job may share it. Its memory is freed once
    # neither this, nor a session, nor a job's mapping of it is left. ValueError: 0 bytes; OSError:
    # no memory or descriptor.
    def __new__(cls, size_bytes: int) -> Self: ...
    @property
    def size_bytes(self) -> int: ...

@final
class SessionEndpoint:
    # The daemon's handle on one session: a UDP socket or queue pair for each path that it may use,
    # the sealed shared memories, and a worker thread. To bind: address:port,
    # verbs:address, or verbs:address,write if peers write to a ring.
    # ValueError: a size or address is not valid; OSError: no socket, memory or thread, or no queue
    # pair although nothing else was asked for.
    def __new__(
        cls,
        bind_addresses: list[str],
        region: SharedRegion,
        ring_entries: int = 256,
        *,
        unit_bytes: int = 1408,
        chunk_units: int = 16,
        slots: int = 64,
        account: JobAccount | None = None,
        pinned_bytes_max: int = 0,
    ) -> Self: ...
    @property
    def local_addresses(self) -> list[str]: ...
    # Why queue pairs were left out, one text for each.
    @property
    def unavailable(self) -> list[str]: ...
    # Memory in bytes that RDMA devices may use.
    @property
    def pinned_bytes(self) -> int: ...
    # Return the descriptors of region, submission queue, completion queue, doorbell and call (an
    # eventfd). Can be called once; the caller passes them to the job and closes them.
    def take_job_fds(self) -> tuple[int, int, int, int, int]: ...
    # Can be called once. Takes the keys over and wipes both arrays. Packets carry the largest of
    # `units` (descending) that fits the path; None: the endpoint's unit. A unit other than the
    # endpoint's creates new memories: ValueError once the job has its descriptors. There is one
    # path for each address, with the next local end of its kind; others are closed. Without
    # `steering` the session sends at its rate. It ends when `permit` no longer holds; None: no
    # permit limits it.
    # `path_threads`: threads beside the session's own that seal, send, receive and open for its
    # paths, at most one for each; 0: its own does.
    def start(
        self,
        *,
        peer_addresses: list[str],
        connection_id_local: int,
        connection_id_peer: int,
        send_key: bytearray,
        receive_key: bytearray,
        rate_bits_per_second: int,
        idle_timeout_ns: int,
        initiator: bool,
        version: int,
        reordering_ns: int = 0,
        units: list[int] | None = None,
        steering: Steering | None = None,
        permit: Permit | None = None,
        path_threads: int = 0,
    ) -> None: ...
    # Final once the session is established.
    @property
    def unit_bytes(self) -> int: ...
    # Set the plan for all later sends with `auto`: rows (length_max, k, m, depth, nanoseconds
    # between data and parity), ascending by length_max; (0, 0, 1, 0) is selective repeat. After a
    # ValueError the current plan stays.
    def install_plan(self, rows: list[tuple[int, int, int, int, int]]) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    # Lengths of the messages so far for which the plan chose: bit b stands for up to 2^b bytes and
    # more than half of that.
    def message_sizes(self) -> int: ...
    # The worker's latest report; empty before the start.
    def paths(self) -> list[SessionPath]: ...
    # Send nothing new at either end, and close once nothing is in progress.
    def drain(self) -> None: ...
    # Return ("establishing" | "established" | "draining" | "closed", reason id), and clear the
    # notification that `fileno` signals.
    def state(self) -> tuple[str, str]: ...
    # Readable when the state has changed since the last call of `state`.
    def fileno(self) -> int: ...
    # `state` and the job's ring then report this reason id, unless the session had already ended.
    def close(self, reason: str = "session.closed.requested") -> None: ...

@final
class Permit:
    # The time until which one peer may act, shared with every engine thread that works for it. A
    # new permit has already ended.
    def __new__(cls) -> Self: ...
    # Nanoseconds on CLOCK_BOOTTIME; a time before the current one changes nothing.
    def extend(self, until_ns: int) -> None: ...
    # End the permit at once, regardless of the time left; its users then end with this reason id.
    def take_back(self, reason: str) -> None: ...
    @property
    def holds(self) -> bool: ...

@final
class Region:
    # The job's region, shared with the daemon; writable through the buffer protocol.
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    # `alignment` is a power of two up to 4096. MemoryError: no free range is long enough;
    # ValueError: the shape, element type or alignment is not valid.
    def empty(self, shape: list[int], dtype: str, alignment: int = 64) -> RegionArray: ...
    # Return the (offset, length) of a contiguous buffer. ValueError: it lies outside the region.
    def locate(self, buffer: object) -> tuple[int, int]: ...

@final
class RegionArray:
    # A row-major array in the region; its bytes are freed once no view of it remains.
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    # bfloat16 is exported as uint16.
    def __buffer__(self, flags: int, /) -> memoryview: ...
    # BufferError: the caller wants another device or a copy.
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# Element-wise and in place, on bfloat16 bits in buffers of equal length that do not overlap; each
# pair is computed in single precision and rounded once. Operations: "sum", "max", "min", "product".
# ValueError: the buffers or the operation are not valid.
def reduce_bfloat16(into: object, other: object, operation: str) -> None: ...
def scale_bfloat16(elements: object, factor: float) -> None: ...

@final
class Completion:
    @property
    def kind(self) -> str: ...  # "send" | "receive" | "stream" | "continue" | "end" | "cancel" | …
    @property
    def status(self) -> str: ...  # "ok" | "outcome_unknown" | "aborted" | "too_long" | "refused"
    @property
    def user_data(self) -> int: ...
    @property
    def handle(self) -> int: ...  # of the operation, as its post returned it
    @property
    def message(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def immediate(self) -> int | None: ...
    @property
    def duration_ns(self) -> int: ...  # sends: first transmission to last acknowledgement
    @property
    def packets(self) -> bytes: ...  # packet maps: bit i of byte j is unit 8j + i of the chunk

@final
class ChunkBitmap:
    # A read-only buffer with one byte for each chunk of a receive, 1 once the chunk has landed
    # completely. It is the memory that the daemon writes: it changes at any time, and belongs to
    # another receive once that has the slot. Readable while a view of it exists.
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    # Whether the slot still belongs to this receive. If so, all bytes read before are about it.
    @property
    def is_current(self) -> bool: ...
    # Return the current bytes; every chunk with a 1 is in the region. None if it is no longer
    # current.
    def read(self) -> bytes | None: ...

@final
class JobRing:
    # The job's side of a session. Takes over the five descriptors. `region`: that of another
    # session, which shares it, so that arrays in it belong to both; OSError if it is another one.
    # RuntimeError: the rings are of another version of the ABI.
    def __new__(
        cls,
        region_fd: int,
        submission_fd: int,
        completion_fd: int,
        doorbell_fd: int,
        call_fd: int,
        *,
        region: Region | None = None,
    ) -> Self: ...
    @property
    def region(self) -> Region: ...
    @property
    def entries(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    # k = m = 0: selective repeat; `depth` code blocks are interleaved; `auto`: by the plan. Returns
    # the operation's handle. BlockingIOError: the queue is full, consume completions first;
    # ValueError: the send can never be accepted.
    def post_send(
        self,
        *,
        offset: int,
        length: int,
        user_data: int,
        k: int = 0,
        m: int = 0,
        depth: int = 1,
        auto: bool = False,
        unreliable: bool = False,
        immediate: int | None = None,
        priority: int = 0,
        deadline_nanos: int | None = None,
    ) -> int: ...
    def post_receive(self, *, offset: int, length: int, user_data: int) -> int: ...
    # A stream lands in the peer's next receive and uses at most its first `length` bytes. Its parts
    # and its end name it by its handle, as the other commands name their operation; each command
    # gets its own completion, "refused" if no such operation is in progress.
    def post_stream(
        self,
        *,
        length: int,
        user_data: int,
        unreliable: bool = False,
        immediate: int | None = None,
        priority: int = 0,
        deadline_nanos: int | None = None,
    ) -> int: ...
    def post_continue(
        self, *, stream: int, offset: int, length: int, remote_offset: int, user_data: int
    ) -> int: ...
    def post_end(self, *, stream: int, user_data: int) -> int: ...
    def post_cancel(self, *, operation: int, user_data: int) -> int: ...
    def post_complete(self, *, receive: int, user_data: int) -> int: ...
    def post_packet_map(self, *, receive: int, chunk: int, user_data: int) -> int: ...
    # Never blocks. BrokenPipeError: the daemon has ended the session and no completion is left.
    def completions(self, limit: int = 64) -> list[Completion]: ...
    # The bitmap of a receive with this many chunks; None while the receive waits for a slot, and
    # once a later receive has it.
    def bitmap(self, handle: int, chunk_count: int) -> ChunkBitmap | None: ...
    # The reason id with which the session ended; empty while it has not, or if the fabric has gone.
    def close_reason(self) -> str: ...
    # Choose whether the descriptor also becomes readable when chunks have landed.
    def wake_for_chunks(self, wanted: bool) -> None: ...
    # Choose whether successful sends leave the descriptor unreadable.
    def quiet_sends(self, are_quiet: bool) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    # Readable when there are completions or the session has ended.
    def fileno(self) -> int: ...
    # Keep an object that an operation uses until the operation has ended; beyond `close`, and the
    # end of this object, until the fabric has ended the session.
    def hold(self, user_data: int, held: object) -> None: ...
    def close(self) -> None: ...

@final
class LinkSettings:
    """Properties of one direction of a link. Probabilities are parts per billion, per packet.

    `gilbert_elliott` is (p, r, loss in the bad state, loss in the good state) and replaces
    independent loss, as does `timed_bursts`, the mean times without loss and of total loss in
    nanoseconds; `red` is (low bytes, high bytes, probability just below high); `phantom` is
    (drain in parts per billion of the rate, cap bytes, and the same three as `red`). ValueError if
    the settings are not valid.
    """

    def __new__(
        cls,
        *,
        rate_bits_per_second: int,
        delay_nanos: int,
        buffer_bytes: int,
        loss_parts_per_billion: int = 0,
        gilbert_elliott: tuple[int, int, int, int] | None = None,
        timed_bursts: tuple[int, int] | None = None,
        jitter_nanos: int = 0,
        reorder_parts_per_billion: int = 0,
        reorder_nanos_max: int = 0,
        duplicate_parts_per_billion: int = 0,
        corrupt_parts_per_billion: int = 0,
        red: tuple[int, int, int] | None = None,
        phantom: tuple[int, int, int, int, int] | None = None,
    ) -> Self: ...

class LinkCounters(TypedDict):
    """Counters of one direction of a link. Packets are wire packets; bytes are those of IP."""

    offered_packets: int
    offered_bytes: int
    delivered_packets: int
    delivered_bytes: int
    lost_packets: int
    overflowed_packets: int
    down_packets: int
    dropped_early_packets: int
    marked_packets: int
    reordered_packets: int
    duplicated_packets: int
    corrupted_packets: int
    crowded_packets: int
    """Dropped because the model's memory was full."""
    queued_bytes_max: int

class EmulatorDirection(TypedDict):
    paths: list[LinkCounters]
    sent_packets: int
    unsent_packets: int
    """Packets that the kernel did not accept."""
    slip_nanos: list[tuple[int, int]]
    """(lateness, packets): how late packets left, ascending, to within a hundredth."""

class AccessCounters(LinkCounters):
    queued_bytes: int
    """Bytes in the buffer now."""

class AccessReport(TypedDict):
    """A host's access link, to its site and from there."""

    up: AccessCounters
    down: AccessCounters
    arrived_bytes: list[int]
    """Bytes that arrived at this host, by sending host, in the order of the ports."""

class EmulatorReport(TypedDict):
    forward: EmulatorDirection
    backward: EmulatorDirection
    access: list[AccessReport]
    """In the order of the ports; empty if there are none."""
    missed_packets: int
    """Dropped by the kernel before the emulator saw them."""
    oversized_packets: int
    foreign_packets: int
    local_packets: int
    """Packets between hosts of one side."""
    cpu_nanos: int

@final
class Emulator:
    # A link in real time, on its own thread. `forward` and `backward` have one entry for each
    # parallel path; `outages` are (path, start ns, end ns) of the schedule, `detours` the same with
    # the ns by which packets arrive later. ValueError: the settings are not valid; OSError: an
    # error of the kernel.
    #
    # UDP between loopback ports: packets that arrive at `address` are sent on to `forward_to`.
    @staticmethod
    def relay(
        forward: Sequence[LinkSettings],
        backward: Sequence[LinkSettings],
        *,
        seed: int,
        forward_to: str,
        outages: Sequence[tuple[int, int, int]] = ...,
        detours: Sequence[tuple[int, int, int, int]] = ...,
        strips_ce: tuple[bool, bool] = ...,
    ) -> Emulator: ...
    # IP packets between interfaces of the caller's network namespace; `ports` are (interface,
    # whether it is on the second side, addresses of the host behind it). `access` is the cable
    # between each host and its side, both ways; `strips_ce`: whether CE becomes ECT(0) on the way
    # forward, and back.
    @staticmethod
    def wan(
        forward: Sequence[LinkSettings],
        backward: Sequence[LinkSettings],
        *,
        seed: int,
        ports: Sequence[tuple[str, bool, Sequence[IPv4Address | IPv6Address | str]]],
        mtu: int,
        outages: Sequence[tuple[int, int, int]] = ...,
        detours: Sequence[tuple[int, int, int, int]] = ...,
        corruption_passes_checksum: bool = False,
        access: LinkSettings | None = None,
        strips_ce: tuple[bool, bool] = ...,
    ) -> Emulator: ...
    @property
    def address(self) -> str | None: ...
    def report(self) -> EmulatorReport: ...
    def start_schedule(self) -> None: ...
    def stop(self) -> None: ...

# Simulation

class SimulationResult(TypedDict):
    """Result of a simulated run. Times are nanoseconds of virtual time."""

    completion_nanos: list[int]
    """By message: first packet sent to last acknowledgement received; -1 if it did not complete."""
    elapsed_nanos: int
    trace_hash: str
    """16 hexadecimal digits, equal for equal arguments."""
    steps: int
    """Datagrams sent and received, in both directions."""
    sender: dict[str, int]
    """Session statistics of the sending end."""
    receiver: dict[str, int]
    forward: LinkCounters
    """From sender to receiver."""
    backward: LinkCounters
    foreign_units: int
    """Units that a receiver with only a bitmap for each slot, and no message numbers in packets,
    would have counted towards a later message in the same slot."""
    foreign_messages: int
    """Messages that such a receiver would have completed with foreign units in them."""
    violations: list[str]
    """Rules that the checkers found broken; any entry is a bug."""

def simulate(
    *,
    count: int,
    message_bytes: int,
    message_bytes_max: int | None = None,
    seed: int = 0,
    depth: int = 1,
    slots: int = 16,
    erasure_code: tuple[int, int] | None = None,
    interleaving: int = 1,
    parity_gap_nanos: int = 0,
    path_count: int = 1,
    unit_bytes: int = 4096,
    chunk_units: int = 16,
    real_payload: bool = False,
    forward: LinkSettings | None = None,
    backward: LinkSettings | None = None,
    blackout_nanos: tuple[int, int] | None = None,
    idle_timeout_nanos: int = ...,
    reordering_nanos: int = 0,
    detection: Literal["reports", "timeout"] = "reports",
    time_nanos_max: int = ...,
) -> SimulationResult:
    """Send `count` messages over a simulated path and return what happened.

    Lengths are uniform from `message_bytes` to `message_bytes_max` (default: all equal); at most
    `depth` messages are outstanding. `erasure_code` is (k, m), of which `interleaving` blocks
    are sent interleaved, and their parity `parity_gap_nanos` after the data; without it, selective
    repeat. `path_count` paths are alike, with losses of their own, and share the ends' rate.
    Both ends send at the rate of `forward`; `backward` defaults to the same settings.
    A packet that arrives up to `reordering_nanos` after one that was sent later isn't taken for
    lost. With `detection` "timeout" the sender ignores reports of losses.
    `real_payload` seals real bytes and compares them; otherwise only lengths travel. Defaults: a
    clean link of 400 Gbit/s with 25 ms round-trip time, 60 s idle time-out, at most one day of
    virtual time.

    Raises ValueError for a scenario that cannot be run, naming the value and the range.
    """

class RingSimulationResult(TypedDict):
    """Result of a simulated ring. Times are nanoseconds of virtual time."""

    completion_nanos: list[int]
    """By operation: until the last site had everything; shorter if a rule was broken."""
    sessions: list[SimulationResult]
    """By site: its session to the next one."""
    arrays: list[bytes]
    """Contents of each site's array at the end; empty without payload."""

def simulate_ring(
    *,
    sites: Sequence[tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, bool]]]],
    arrays: Sequence[bytes] | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    repeats: int = 1,
    seed: int = 0,
    depth: int = 16,
    slots: int = 16,
    erasure_code: tuple[int, int] | None = None,
    interleaving: int = 1,
    unit_bytes: int = 4096,
    link: LinkSettings | None = None,
    detection: Literal["reports", "timeout"] = "reports",
) -> RingSimulationResult:
    """Run a collective operation around a ring of sites, `repeats` times, all starting at once.

    Each site has sends (first byte, end, messages that must have arrived before) to the next site
    and receives (first byte, end, whether to add to what is there) from the previous one.
    With `arrays`, one for each site, bytes are sealed and elements of `dtype` summed; otherwise
    only lengths travel. All links and sessions have equal settings, as for `simulate`; at most
    `depth` messages of a session are unacknowledged.

    Raises ValueError for a ring that cannot be run, naming the value and the range.
    """

class FlowsResult(TypedDict):
    """Result of many simulated flows. Times are nanoseconds of virtual time."""

    flows: list[tuple[int, int, int]]
    """By flow: when its sender knew that all had arrived (0: never), packets sent, and how many of
    them had been sent before."""
    samples: list[tuple[int, list[int], int]]
    """Time, acknowledged bytes of each flow, and bytes waiting at the port to the observed host."""
    chunks: list[list[int]]
    """By flow: when each chunk had arrived, if flows depend on each other."""
    overflowed_packets: int
    """Data packets that a full buffer refused."""
    packet_nanos: int
    """Time that a full packet takes on a host's cable."""
    near_way_nanos: int
    """One-way time of a full packet on idle links, the longest way within a data centre …"""
    far_way_nanos: int
    """… and between data centres."""
    near_rtt_nanos: int
    """Round trip of a full packet and its acknowledgement within a data centre, on idle links."""
    far_rtt_nanos: int

def simulate_flows(
    *,
    flows: Sequence[tuple[int, int, int, int]],
    host: LinkSettings,
    near: LinkSettings,
    border: LinkSettings,
    wan: LinkSettings,
    wan_links: int,
    congestion: str,
    without: Sequence[str] = (),
    balance: Literal["ecmp", "spray", "subflows", "plb"] = "subflows",
    code: tuple[int, int] | None = None,
    chains: Sequence[tuple[int, int] | None] = (),
    outages: Sequence[tuple[int, int, int]] = (),
    sample_every_nanos: int = 0,
    sample_host: int = 0,
    seed: int = 0,
    time_nanos_max: int = ...,
) -> FlowsResult:
    """Run flows (from host, to host, start, payload bytes) in a network of two data centres.

    Each has 128 hosts in a fat tree of three tiers below a border switch; hosts 128 to 255 are in
    the second one. `host` is the cable from a host, `near` all others in a data centre, `border`
    those to a border switch, and `wan` each of the `wan_links` links between the data centres.
    `congestion` names the controller of all flows, `without` rules of it to leave out; flows
    between the data centres use the erasure code `code`. With `chains` (flow that it follows, bytes
    of a chunk; for each flow, or None) a flow's first chunk leaves at its start, each other one
    when the chunk before it has arrived of the flow that it follows, which ends at its sender.
    `outages` are (link, start, end) of links that leave the first data centre.

    Raises ValueError for a cell that cannot be run, naming the value and the range.
    """

def simulate_sessions(
    *,
    starts_nanos: Sequence[int],
    rate_bits_per_second: int,
    link: LinkSettings,
    time_nanos: int,
    congestion: str | None = None,
    are_marks_queues: bool = True,
    seed: int = 0,
) -> list[dict[str, int]]:
    """Let sessions send through one link for a time; return statistics of the sending ends.

    Each sends without end from its start on, at `rate_bits_per_second` at most. `link` is for both
    directions. `congestion` names the controller of all; None: the rate alone. `are_marks_queues`:
    a mark of the link means a queue.

    Raises ValueError for a link or controller that isn't valid, and for no or too many sessions.
    """

# Storage data path
class QueueError(Exception):
    """A queue ended or timed out. Arguments: (reason id, text)."""

class StatusError(Exception):
    """A command completed with an error. Arguments: (status code, LBA, text, do not retry)."""

class DataDigestError(ValueError): ...

class PduError(ValueError):
    """A PDU violates the protocol. Arguments: (fatal error status, header offset, text)."""

@final
class SecureQueueParameters:
    """Keys and context of one secure queue, consumed by `start_queue`. Zeroes `secret`."""

    def __new__(
        cls,
        *,
        secret: bytearray,
        volume_id: bytes,
        host_nqn: str,
        queue_id: int,
        association_epoch: int,
        incarnation: int,
    ) -> SecureQueueParameters: ...

@final
class StorageEvent:
    """One event of a volume."""

    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def lba(self) -> int | None: ...
    @property
    def association(self) -> int: ...
    @property
    def queue_id(self) -> int: ...
    @property
    def detail(self) -> str: ...

class StoreRefusedError(OSError):
    """A store was refused. Arguments: (reason id, text)."""

@final
class StoreAnchor:
    """The anchor of one store: the caller takes each state to anchor and answers how it went.

    `latest`: the number and state (65 bytes) that were anchored last. None: none yet; the first
    state then gets the number after `base`. With `every_commit` the anchor advances with each
    flush, otherwise with checkpoints, at the start and at the end. A flush waits up to
    `timeout_seconds` for the answer. `believed`: if this anchor has no record of the store, the
    operator accepts the store as found. StoreRefusedError `store.rolled_back`: `latest` has a state
    that does not belong to its number.
    """

    def __new__(
        cls,
        *,
        latest: tuple[int, bytes] | None,
        base: int,
        every_commit: bool,
        timeout_seconds: float,
        believed: bool = False,
    ) -> StoreAnchor: ...
    # Readable when `take` would return something.
    def fd(self) -> int: ...
    # The next number, one higher than the last, and the state to anchor. The same pair again if no
    # answer came.
    def take(self) -> tuple[int, bytes] | None: ...
    # Report the outcome: anchored; `lost`: it never will be; `unreachable`: it is not known.
    def answer(
        self, number: int, *, lost: str | None = None, unreachable: str | None = None
    ) -> None: ...

# Return the number of blocks of an NVMe namespace (4096 + 64 bytes each), and whether the first
# block's data are zeros. OSError if it is no namespace, is in use, or has another format.
def examine_drive(path: str | os.PathLike[str]) -> tuple[int, bool]: ...

# Remove the store from a drive. OSError.
def erase_drive(path: str | os.PathLike[str]) -> None: ...

# Blocks that a new store with this many sectors takes.
def drive_blocks(sector_count: int) -> int: ...

@final
class Namespace:
    """A namespace of a target: a store with its limits, reservations, events and jobs.

    `sealed`: 4160-byte blocks behind secure queues; otherwise plain 4096-byte blocks. A sealed
    "file" keeps freshness itself, authenticated under `secret` (32 bytes, wiped) if given, and
    detects a rollback as far as `anchor` records; "memory" can't be rolled back. Without
    `freshness` a store keeps none.
    `metadata`: plain blocks of 4096 bytes with 64 bytes of metadata for the host's own use.
    "inline" is a file laid out like a drive with 64-byte metadata. `exist` "create": the file must
    not exist. `reserves`: its file system reserves the store's full size at creation.
    OSError if the store can't be opened, including StoreRefusedError (`store.rolled_back`,
    `anchor.unreachable`, `sector.stale`); ValueError for options that conflict.
    """

    def __new__(
        cls,
        *,
        store: StoreKind,
        block_count: int,
        sealed: bool,
        path: str | os.PathLike[str] | None = None,
        exist: Literal["create", "open"] = "create",
        drive: str | None = None,
        in_place: bool = False,
        freshness: bool = True,
        metadata: bool = False,
        secret: bytearray | None = None,
        anchor: StoreAnchor | None = None,
        opening: StoreOpening | None = None,
        reserves: bool = False,
    ) -> Namespace: ...
    @property
    def block_count(self) -> int: ...
    # Offer `block_count` blocks to queues that start from now on; a power cut leaves either the old
    # size or the new one. ValueError: fewer blocks, or a size that the store can't have; OSError: a
    # queue or a job is running, the device is full, or it can't grow.
    def extend(self, block_count: int) -> None: ...
    # Human-readable block layout of a store that keeps freshness; empty if it keeps none.
    @property
    def layout(self) -> str: ...
    @property
    def sealed(self) -> bool: ...
    # The state that the store has reached: 32 bytes, or empty.
    @property
    def milestone(self) -> bytes: ...
    # Whether the store has everything that was flushed when it reported `milestone`. ValueError for
    # a wrong length.
    def contains(self, milestone: bytes) -> bool: ...
    # Limits per second, effective at once, also for waiting commands; 0: no limit.
    def set_limits(
        self,
        *,
        iops: int = 0,
        bytes_per_second: int = 0,
        read_iops: int = 0,
        write_iops: int = 0,
        read_bytes_per_second: int = 0,
        write_bytes_per_second: int = 0,
    ) -> None: ...
    # host_reads, host_writes, flushes, deallocations: commands; sectors_read, sectors_stored:
    # blocks moved; sectors_written: sealed sectors that are in the written state now; busy_ms;
    # media_errors; refusals; reservation_conflicts; throttled; contended; events_dropped; and the
    # store's own counters.
    def statistics(self) -> dict[str, int]: ...
    def reservation(self) -> ReservationState: ...
    # Kind "refused": about a stored sector or the store; "reservation": `reason` is the notice,
    # `detail` the hexadecimal host identifier of the registrant to notify.
    def take_events(self) -> list[StorageEvent]: ...
    def event_fd(self) -> int: ...
    # OSError if the store fails.
    def sync(self) -> None: ...
    # Background jobs, at most one of each kind at a time. `position` is a block; rates count bytes
    # read and written (0: no limit). JobRefusedError `volume.job.running`,
    # `volume.job.unsupported`, `store.failed`.
    def start_job(
        self,
        kind: JobKind,
        *,
        position: int = 0,
        bytes_per_second: int = 0,
        paused: bool = False,
    ) -> None: ...
    # JobRefusedError `volume.job.over`.
    def order_job(self, kind: JobKind, order: JobOrder) -> None: ...
    def set_job_rate(self, kind: JobKind, bytes_per_second: int) -> None: ...
    # The last started job of each kind.
    def jobs(self) -> list[JobStatus]: ...
    # Interrupt the jobs and wait until none of them uses the store.
    def end_jobs(self) -> None: ...
    # End the jobs; the store is closed with the last queue that uses it.
    def close(self) -> None: ...

    # Open or create a store on a third party's plain namespace; to "create", its first 4096 bytes
    # must be zeros. OSError: EEXIST if they aren't, ENOTCONN if the connection ended;
    # StoreRefusedError if the anchor has a later state on record; ValueError if the device is used
    # already.
    @staticmethod
    def on_device(
        device: RemoteDevice,
        *,
        volume_id: bytes,
        block_count: int,
        store_key: bytearray,
        exist: Literal["create", "open"],
        freshness: bool = True,
        anchor: StoreAnchor | None = None,
    ) -> Namespace: ...

class HostQueueDescription(TypedDict):
    """A connected I/O queue of a host; its descriptor is duplicated."""

    descriptor: int
    queue_depth: int
    h2c_data_max: int
    transfer_max: int
    in_capsule_max: int
    header_digest: bool
    data_digest: bool
    block_bytes: int
    nsid: int

@final
class RemoteDevice:
    """A plain namespace of a third party's target behind an I/O queue, for one store.

    `timeout_seconds` applies to each command. ValueError for block sizes other than 512, 1024,
    2048, 4096 and 4160; with 4160 each block is a sector with its metadata.
    """

    def __new__(
        cls, queue: HostQueueDescription, *, block_count: int, timeout_seconds: float
    ) -> RemoteDevice: ...
    # Remove the volume's store from the namespace, and close the device. OSError if it isn't there.
    def erase(self, volume_id: bytes) -> None: ...
    def close(self) -> None: ...

@final
class StoreOpening:
    """Progress of opening a store, readable while another thread opens it."""

    def __new__(cls) -> StoreOpening: ...
    # Pages and records processed, and the total as far as it is known.
    def progress(self) -> tuple[int, int]: ...

class JobRefusedError(Exception):
    """A background job was refused. Arguments: (reason id, text)."""

class JobStatus(TypedDict):
    """Progress of a background job; counters start with the job.

    `checked`: written sectors examined; `unchecked`: sectors whose leaf page is wrong; `found`:
    number of faults; `findings`: the first of them, as (sector or None, reason id, text, whether
    the store knows the right content); `repaired`: faults fixed by writing again.
    `yields`: times it paused because host commands took long.
    """

    kind: str
    state: str
    detail: str
    position: int
    total: int
    checked: int
    unchecked: int
    refreshed: int
    found: int
    repaired: int
    findings: list[tuple[int | None, str, str, bool]]
    bytes: int
    bytes_per_second: int
    active_ms: int
    yields: int

class ReservationState(TypedDict):
    """Reservations of a namespace. `type` 0: none; `holder` None: nobody, or all registrants."""

    type: int
    holder: bytes | None
    generation: int
    registrants: list[tuple[bytes, int, bool]]
    """(host identifier, key, whether it holds the reservation)"""

@final
class Controller:
    """All I/O queues of one association. `host_id` has 16 bytes.

    `read_only`: commands that change blocks fail with Namespace is Write Protected. Once `permit`
    no longer holds, the queues start no command, send no response, and end; None: no permit limits
    them.
    """

    def __new__(
        cls,
        *,
        association: int,
        host_nqn: str,
        host_id: bytes,
        controller_id: int,
        read_only: bool = False,
        permit: Permit | None = None,
    ) -> Controller: ...
    @property
    def association(self) -> int: ...
    @property
    def host_nqn(self) -> str: ...
    @property
    def controller_id(self) -> int: ...
    # Entries are (nsid, namespace, ANA state). They replace the previous ones, also for running
    # queues.
    def set_namespaces(
        self,
        entries: Sequence[
            tuple[
                int,
                Namespace,
                Literal["optimized", "non-optimized", "inaccessible", "persistent-loss", "change"],
            ]
        ],
    ) -> None: ...
    # Duplicates the descriptor. Only secure queues see sealed namespaces; only queues without
    # `secure` see plain ones.
    def start_queue(
        self,
        descriptor: int,
        *,
        queue_id: int,
        queue_depth: int,
        h2c_data_max: int,
        in_capsule_max: int,
        transfer_max: int,
        header_digest: bool = False,
        data_digest: bool = False,
        success_flag: bool = False,
        secure: SecureQueueParameters | None = None,
    ) -> None: ...
    # Time since the last byte received on any of its I/O queues, or since the last queue started.
    def idle_ms(self) -> int: ...
    # Abort a command whose data hasn't all arrived yet; no other can be aborted. Waits for the
    # queue's thread.
    def abort(self, queue_id: int, command_id: int) -> bool: ...
    # The error log, newest first, at most 64 entries of (error count, queue id, command id, status
    # field of the completion, LBA, namespace id).
    def errors(self) -> list[tuple[int, int, int, int, int, int]]: ...
    def queues_running(self) -> int: ...
    # Number of commands and PDUs that failed a check and so ended their queue.
    def refusals(self) -> int: ...
    # Kinds "queue_opened", "queue_closed", and "refused" for checks other than of stored sectors.
    def take_events(self) -> list[StorageEvent]: ...
    def event_fd(self) -> int: ...
    # Stop every queue and wait until nothing is in flight: call it on a thread.
    def close(self) -> None: ...

class StaleAssociationError(Exception):
    """The association of a back-end queue is over; open a newer one."""

class QueueClosedError(Exception):
    """The back end's front-end queue is closed."""

@final
class JournalPool:
    """Memory shared by the journals of a gateway's volumes, beyond the 1 MiB that each has."""

    def __new__(cls, *, bytes_max: int) -> Self: ...
    # Bytes of the pool in use.
    @property
    def taken(self) -> int: ...
    # Number of open volumes; each has its keys and a journal in memory.
    @property
    def volumes(self) -> int: ...

class Accelerator:
    """A card that seals, connected through a Unix socket; OSError if it can't be.

    Keys of volumes that use it stay at the card until they are closed. Each method blocks for up to
    a second, without the GIL.
    """

    def __new__(cls, socket: str | os.PathLike[str]) -> Self: ...
    @property
    def profile(self) -> str:
        """Its kind, in its own words."""

    @property
    def depth(self) -> int:
        """Jobs that one queue holds."""

    @property
    def key_slots(self) -> int:
        """Keys that it holds."""

    @property
    def loss(self) -> str | None:
        """Why a volume gave it up, if one has: a reason id, and what it did."""

    @property
    def record(self) -> AcceleratorRecord:
        """What volumes had of it; doesn't keep the connection."""

    def evidence(self, nonce: bytes) -> bytes:
        """Return its statement about itself, which answers `nonce` (32 bytes)."""

    def probe(self) -> None:
        """Let it seal known sectors; OSError says what it did wrong."""

class AcceleratorRecord:
    """What volumes had of a connected card; good also when the connection has ended."""

    def figures(self) -> dict[str, int]:
        """Return `jobs` given, sectors `sealed`, sectors sealed `inline` as the card was full.

        Also `refusals`; `losses`, one for each queue; `nanos`, the time of jobs that have ended.
        """

class GatewayVolume:
    """An attached volume with its keys. It can read at once, and write once it has counters.

    `command_timeout_seconds`: the target's limit for one command; `hold_seconds`: how long commands
    wait when the back end is lost; `journal_bytes_max`: bytes of unflushed changes kept for
    resending; `nonce_ledger`: a file that records every seal (tests); `fully_sealed`: an unwritten
    sector is an error, and Write Zeroes seals zeros; `read_only`: hosts may not change anything,
    and no counters are needed. Event "association_lost" asks for a newer association for all
    queues, "rekey_due" for new queue keys within the current one.
    """

    def __new__(
        cls,
        *,
        volume_id: bytes,
        generation: int,
        sector_count: int,
        oldest_key_epoch: int,
        key_epoch: int,
        key: bytearray,
        command_timeout_seconds: float = 30.0,
        hold_seconds: float = 60.0,
        journal_bytes_max: int = ...,
        commands_per_key_max: int = ...,
        nonce_ledger: str | os.PathLike[str] | None = None,
        fully_sealed: bool = False,
        read_only: bool = False,
        journal_pool: JournalPool | None = None,
    ) -> Self: ...
    def accelerate(self, accelerator: Accelerator | None) -> None:
        """Let a card seal for this volume from now on, or none.

        It gets the volume's key. Blocks for up to a second a queue. After an OSError the volume
        uses none. Event "accelerator_lost": it was given up, and isn't used until the next call.
        """

    def rest_accelerator(self) -> int:
        """Let the card get no more jobs; return how many it still has.

        Until a later call of `accelerate` gives another card. A queue that doesn't know yet counts
        as a job. Waits, without the GIL, for a call of `accelerate`.
        """

    def add_counters(
        self, *, broker_instance: int, start_epoch: int, start: int, end: int
    ) -> None: ...
    # Add the key of another epoch, from the oldest one up to 255 above it; the newest key seals.
    # Wipes `key`.
    def add_key(self, *, key_epoch: int, key: bytearray) -> None: ...
    # Replace all counters that no queue holds, and return the replaced ones; the new ones are used
    # in the given order. Ranges: (broker instance, start epoch, first, end).
    def replace_counters(
        self, ranges: list[tuple[int, int, int, int]]
    ) -> list[tuple[int, int, int, int]]: ...
    def counters_remaining(self) -> int: ...
    # Serve a front-end queue; its commands wait until it has a back end.
    def start_queue(
        self,
        fd: int,
        *,
        association: int,
        queue_id: int,
        queue_depth: int,
        h2c_data_max: int,
        in_capsule_max: int,
        transfer_max: int,
        success_flag: bool,
        header_digest: bool = False,
        data_digest: bool = False,
    ) -> None: ...
    # Give a front-end queue its first or next back end. `confirmed`: the milestone that the target
    # says it has; `milestone`: the state that its store has reached (empty: none).
    # StaleAssociationError, also when another incarnation confirmed an older milestone;
    # QueueClosedError.
    def replace_back(
        self,
        fd: int,
        *,
        association: int,
        queue_id: int,
        queue_depth: int,
        h2c_data_max: int,
        transfer_max: int,
        in_capsule_max: int,
        association_epoch: int,
        incarnation: int,
        confirmed: bytes,
        milestone: bytes,
        secure: SecureQueueParameters,
    ) -> None: ...
    # Run a load on a queue of the gateway's own with `queue` as its back end. Blocks: call it on a
    # thread.
    def run_load(
        self,
        queue: HostQueueDescription,
        settings: LoadSettings,
        *,
        association_epoch: int,
        incarnation: int,
        secure: SecureQueueParameters,
    ) -> LoadResult: ...
    # Report that the newest association can't be used; does nothing if that is already known.
    def lose_association(self, detail: str) -> None: ...
    # Fail the volume for good: from now on every command ends with an error.
    def fail(
        self,
        reason: Literal[
            "verification.limit",
            "gateway.barred",
            "volume.withdrawn",
            "volume.rolled_back",
            "volume.unflushed_lost",
        ],
        detail: str,
    ) -> None: ...
    # The milestone that the target's next incarnation must have: 32 bytes, or empty.
    @property
    def milestone(self) -> bytes: ...
    # Set if everything acknowledged so far is durable: then only this incarnation of the target can
    # lose what is acknowledged from now on. None: something isn't durable, or no target is
    # connected.
    @property
    def settled_incarnation(self) -> int | None: ...
    # Time since the last byte from the host on any I/O queue of the association; None if it has no
    # queue.
    def idle_ms(self, association: int) -> int | None: ...
    # Number of commands that the host of the association has no answer to yet.
    def unanswered(self, association: int) -> int: ...
    def close_queues(self, association: int | None = None) -> None: ...
    # Close all queues, wipe the keys and free every buffer. From then on statistics and events are
    # empty, and other calls raise QueueClosedError.
    def close(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    def take_events(self) -> list[StorageEvent]: ...
    def event_fd(self) -> int: ...

@final
class HostQueue:
    """A plain I/O queue of a host: whole buffers, many transfers at once, from any thread.

    Calls that start a transfer return its ticket without waiting for the peer. `take_done` returns
    the tickets of transfers that ended, each with its error (StatusError or QueueError) if it
    failed; `event_fd` is readable while there are any. A buffer is held until `take_done` has
    returned its transfer.
    """

    def __new__(
        cls, queue: HostQueueDescription, *, io_bytes: int, timeout_seconds: float
    ) -> HostQueue: ...
    def write(self, lba: int, data: Buffer, *, is_forced: bool = False) -> int: ...
    def read(self, lba: int, into: Buffer) -> int: ...
    def compare(self, lba: int, data: Buffer) -> int: ...
    def compare_and_write(self, lba: int, expected: Buffer, data: Buffer) -> int: ...
    def write_zeroes(self, lba: int, blocks: int, *, deallocate: bool = False) -> int: ...
    def verify(self, lba: int, blocks: int) -> int: ...
    # (lba, blocks) of up to 256 ranges.
    def deallocate(self, ranges: Sequence[tuple[int, int]]) -> int: ...
    def flush(self) -> int: ...
    # Submit nothing more of the transfer, and copy nothing more into its buffer.
    def cancel(self, ticket: int) -> None: ...
    def take_done(self) -> list[tuple[int, BaseException | None]]: ...
    def event_fd(self) -> int: ...
    def progress(self) -> int: ...
    def close(self) -> None: ...

@final
class PduHeader:
    """The fields of a PDU header; fields that its type doesn't have are zero or empty."""

    @property
    def kind(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def entry(self) -> bytes: ...
    @property
    def version(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def digests(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def cid(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...

def pdu_lengths(
    common: bytes, data_max: int, *, header_digest: bool = False, data_digest: bool = False
) -> tuple[int, int, int]: ...  # type, header bytes, data bytes (with digests)
def decode_pdu(
    header: bytes, *, header_digest: bool = False, data_digest: bool = False
) -> PduHeader: ...
def pdu_data(header: PduHeader, data: bytes) -> bytes: ...  # without the digest; DataDigestError
def encode_ic_req(*, header_digest: bool = False, data_digest: bool = False) -> bytes: ...
def encode_ic_resp(
    h2c_data_max: int, *, header_digest: bool = False, data_digest: bool = False
) -> bytes: ...
def encode_capsule_cmd(
    submission: bytes, data: bytes, *, header_digest: bool = False, data_digest: bool = False
) -> bytes: ...
def encode_capsule_resp(completion: bytes, *, header_digest: bool = False) -> bytes: ...
def encode_c2h_data(
    cid: int, data: bytes, *, header_digest: bool = False, data_digest: bool = False
) -> bytes: ...

# Quotes as much of the offending header as fits into a termination request.
def encode_termination(from_host: bool, code: int, offset: int, offending: bytes) -> bytes: ...
def find_pieces(path: str | os.PathLike[str], pieces: Sequence[bytes]) -> list[tuple[int, int]]: ...
def status_name(code: int) -> str | None: ...

# Upper bounds of the buckets of `latencies` in nanoseconds, each inclusive.
def latency_bounds() -> list[int]: ...

# For each role and operation the operations in each bucket alone, the last without a bound, and
# their nanoseconds together, since the start of the process.
def latencies() -> dict[str, dict[str, tuple[list[int], int]]]: ...
def sector_layout() -> dict[str, tuple[int, int]]: ...

class LoadSettings(TypedDict):
    """A load's kind: on each queue, `depth` commands of `io_bytes` at once for `seconds`."""

    is_write: bool
    is_random: bool
    io_bytes: int
    depth: int
    span_bytes: int
    seconds: float
    seed: int
    is_verified: bool

class LoadResult(TypedDict):
    """What a load measured; `cpu_seconds` covers only the load's own threads."""

    commands: int
    bytes: int
    seconds: float
    cpu_seconds: float
    latency_p50_us: float
    latency_p99_us: float
    latency_p999_us: float
    latency_max_us: float
    verified: int

# With `is_verified`, what was written is read back afterwards; ValueError if it isn't the same.
def run_load(queues: Sequence[HostQueueDescription], settings: LoadSettings) -> LoadResult: ...
