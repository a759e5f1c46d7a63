"""Native engine: everything that is per-packet or per-sector. Contract of `native/py`."""

import os
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Literal, Self, TypedDict, final

from typing_extensions import Buffer

from sealane.protocol.kinds import JobKind, JobOrder, StoreKind

__version__: str

# Sessions

@final
class SharedLine:
    # The rate that all sessions of a fabric share, in wire bits.
    def __new__(cls, rate_bits_per_second: int) -> Self: ...
    # A job with its limits: wire bits a second, receives and sends under way.
    def add_job(self, *, rate_bits_per_second: int, receives: int, sends: int) -> JobAccount: ...

@final
class JobAccount:
    # What the sessions of one job use together. `waits` and `waited_nanos`: for their turn on the
    # line; `receives` and `sends` are under way now.
    def usage(self) -> dict[str, int]: ...

class SessionPath(TypedDict):
    local_address: str
    peer_address: str
    state: Literal["challenged", "validated", "silent", "abandoned"]
    statistics: dict[str, int]

@final
class SessionEndpoint:
    # The daemon's handle on one session: a UDP socket for each path that it may have, sealed shared
    # memories, worker thread.
    # ValueError: a size or address that can't be; OSError: no socket, memory or thread.
    def __new__(
        cls,
        bind_addresses: list[str],
        region_bytes: int,
        ring_entries: int = 256,
        *,
        unit_bytes: int = 1408,
        chunk_units: int = 16,
        slots: int = 64,
        account: JobAccount | None = None,
    ) -> Self: ...
    @property
    def local_addresses(self) -> list[str]: ...
    # Region, submission, completion, doorbell; once. The caller passes and closes them.
    def take_job_fds(self) -> tuple[int, int, int, int]: ...
    # Once. Takes the keys over and wipes both arrays. The unit is the largest of `units`, which
    # fall, that the path carries; None: the endpoint's. Another one than the endpoint's makes the
    # memories anew: ValueError once the job has its descriptors. As many paths as there are
    # addresses; sockets beyond those are closed. The session ends when `permit` doesn't hold; None:
    # nobody's word ends it.
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
        reordering_ns: int = 0,
        units: list[int] | None = None,
        permit: Permit | None = None,
    ) -> None: ...
    # Final once it is established.
    @property
    def unit_bytes(self) -> int: ...
    # What sends with `auto` do from the next one on: rows (length_max, k, m, depth) by rising
    # length_max; (0, 0, 1) is selective repeat. ValueError: the plan in force stays.
    def install_plan(self, rows: list[tuple[int, int, int, int]]) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    # As of the last look; empty before the start.
    def paths(self) -> list[SessionPath]: ...
    # Sends nothing new at either end; closes when nothing is under way.
    def drain(self) -> None: ...
    # ("establishing" | "established" | "draining" | "closed", reason id); takes the notification
    # back.
    def state(self) -> tuple[str, str]: ...
    # Readable when the state has changed since it was last asked.
    def fileno(self) -> int: ...
    # The reason id is what `state` and the job's ring then say, unless it had ended by itself.
    def close(self, reason: str = "session.closed.requested") -> None: ...

@final
class Permit:
    # Until when one peer may act, shared with every thread of the engine that works for it. Begins
    # ended.
    def __new__(cls) -> Self: ...
    # Nanoseconds on CLOCK_BOOTTIME; an earlier time than it has changes nothing.
    def extend(self, until_ns: int) -> None: ...
    # At once, whatever time it had left; the reason id is what its users then end with.
    def take_back(self, reason: str) -> None: ...
    @property
    def holds(self) -> bool: ...

@final
class Region:
    # Shared with the daemon; writable through the buffer protocol.
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    # `alignment` is a power of two up to 4096. MemoryError: no free range is long enough;
    # ValueError: no such shape, element type or alignment.
    def empty(self, shape: list[int], dtype: str, alignment: int = 64) -> RegionArray: ...
    # (offset, length) of a contiguous buffer. ValueError: it lies elsewhere.
    def locate(self, buffer: object) -> tuple[int, int]: ...

@final
class RegionArray:
    # An array in the region, row-major; its bytes are free again when no view of it is left.
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    # bfloat16 comes as uint16.
    def __buffer__(self, flags: int, /) -> memoryview: ...
    # BufferError: another device or a copy is wanted.
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# Element-wise, in place, on bits of bfloat16 in buffers of equal length that do not overlap; each
# pair in single precision, rounded once. Operations: "sum", "max", "min", "product".
# ValueError: other buffers, or no such operation.
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
    # A read-only buffer of a byte for each chunk of a receive, 1 where it has landed whole, in the
    # memory that the daemon writes: it changes at any time, and is another receive's once that has
    # the slot. Readable as long as there is a view of it.
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    # Whether the slot is still the receive's: then what was read before is its own.
    @property
    def is_current(self) -> bool: ...
    # What it has now; each chunk with a 1 is in the region. None if it is not current any more.
    def read(self) -> bytes | None: ...

@final
class JobRing:
    # The job's side. Takes over the four descriptors.
    def __new__(
        cls, region_fd: int, submission_fd: int, completion_fd: int, doorbell_fd: int
    ) -> Self: ...
    @property
    def region(self) -> Region: ...
    @property
    def entries(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    # k = m = 0: selective repeat; `depth` blocks of a code go out in turn; `auto`: by plan.
    # Returns the operation's handle. BlockingIOError: the queue is full, consume completions;
    # ValueError: never acceptable.
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
    ) -> int: ...
    def post_receive(self, *, offset: int, length: int, user_data: int) -> int: ...
    # A stream lands in the next receive of the peer, in its first `length` bytes at most. Parts and
    # end name it by its handle, and so do the other commands; each gets a completion of its own,
    # "refused" if there is no such operation under way.
    def post_stream(
        self,
        *,
        length: int,
        user_data: int,
        unreliable: bool = False,
        immediate: int | None = None,
    ) -> int: ...
    def post_continue(
        self, *, stream: int, offset: int, length: int, remote_offset: int, user_data: int
    ) -> int: ...
    def post_end(self, *, stream: int, user_data: int) -> int: ...
    def post_cancel(self, *, operation: int, user_data: int) -> int: ...
    def post_complete(self, *, receive: int, user_data: int) -> int: ...
    def post_packet_map(self, *, receive: int, chunk: int, user_data: int) -> int: ...
    # Never waits. BrokenPipeError: the daemon has ended the session and nothing is left.
    def completions(self, limit: int = 64) -> list[Completion]: ...
    # Of a receive of so many chunks; None while it waits for a slot and once a later one has that.
    def bitmap(self, handle: int, chunk_count: int) -> ChunkBitmap | None: ...
    # Why the session has ended: a reason id; empty while it has not, and if the fabric is gone.
    def close_reason(self) -> str: ...
    # Whether the descriptor becomes readable also when chunks have landed.
    def wake_for_chunks(self, wanted: bool) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    # Readable when there are completions or the session has ended.
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class LinkSettings:
    """What one direction of a link is like. Probabilities are parts per billion, per packet.

    `gilbert_elliott` is (p, r, loss in the bad state, in the good one) and replaces independent
    loss; `red` is (low bytes, high bytes, probability just below high); `phantom` (drain in parts
    per billion of the rate, cap bytes, and the same three). ValueError if that can't be.
    """

    def __new__(
        cls,
        *,
        rate_bits_per_second: int,
        delay_nanos: int,
        buffer_bytes: int,
        loss_parts_per_billion: int = 0,
        gilbert_elliott: tuple[int, int, int, int] | None = None,
        jitter_nanos: int = 0,
        reorder_parts_per_billion: int = 0,
        reorder_nanos_max: int = 0,
        duplicate_parts_per_billion: int = 0,
        corrupt_parts_per_billion: int = 0,
        red: tuple[int, int, int] | None = None,
        phantom: tuple[int, int, int, int, int] | None = None,
    ) -> Self: ...

class LinkCounters(TypedDict):
    """What one direction of a link has done. Packets are wire packets, bytes those of IP."""

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
    """Refused because the model's memory was full."""
    queued_bytes_max: int

class EmulatorDirection(TypedDict):
    paths: list[LinkCounters]
    sent_packets: int
    unsent_packets: int
    """The kernel did not take them."""
    slip_nanos: list[tuple[int, int]]
    """How late packets left (rising, to a hundredth), and how many."""

class EmulatorReport(TypedDict):
    forward: EmulatorDirection
    backward: EmulatorDirection
    missed_packets: int
    """Dropped by the kernel before the emulator saw them."""
    oversized_packets: int
    foreign_packets: int
    local_packets: int
    """Between hosts of one side."""
    cpu_nanos: int

@final
class Emulator:
    # A link in real time, on a thread of its own. `forward` and `backward` have one entry for each
    # parallel path; `outages` are (path, start ns, end ns) of the schedule. ValueError: settings
    # that can't be; OSError: the kernel refuses.
    #
    # UDP between loopback ports: what comes to `address` goes on to `forward_to`.
    @staticmethod
    def relay(
        forward: Sequence[LinkSettings],
        backward: Sequence[LinkSettings],
        *,
        seed: int,
        forward_to: str,
        outages: Sequence[tuple[int, int, int]] = ...,
    ) -> Emulator: ...
    # IP packets between interfaces of the caller's network namespace; `ports` are (interface,
    # whether on the second side, addresses of the host behind it).
    @staticmethod
    def wan(
        forward: Sequence[LinkSettings],
        backward: Sequence[LinkSettings],
        *,
        seed: int,
        ports: Sequence[tuple[str, bool, Sequence[IPv4Address | IPv6Address | str]]],
        mtu: int,
        outages: Sequence[tuple[int, int, int]] = ...,
        corruption_passes_checksum: bool = False,
    ) -> Emulator: ...
    @property
    def address(self) -> str | None: ...
    def report(self) -> EmulatorReport: ...
    def start_schedule(self) -> None: ...
    def stop(self) -> None: ...

# Simulation.

class SimulationResult(TypedDict):
    """What a simulated run showed. Times are nanoseconds of virtual time."""

    completion_nanos: list[int]
    """By message: first packet sent to last acknowledgement received; -1 if it did not complete."""
    elapsed_nanos: int
    trace_hash: str
    """16 hexadecimal digits, equal for equal arguments."""
    steps: int
    """Datagrams sent and received, both ways."""
    sender: dict[str, int]
    """Session statistics of the sending end."""
    receiver: dict[str, int]
    forward: LinkCounters
    """From sender to receiver."""
    backward: LinkCounters
    foreign_units: int
    """Units that a receiver without message numbers in its packets, with a bitmap for each slot
    only, would have taken for units of the message that the slot holds now."""
    foreign_messages: int
    """Messages that it would have completed with such units in them."""
    violations: list[str]
    """Rules that the checkers saw broken: empty, or there is a bug."""

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
    go out in turn; without it, selective repeat.
    Both ends send at the rate of `forward`, which is also the way back unless that is given.
    What arrives `reordering_nanos` later than what was sent after it is not lost. With `detection`
    by time-out the sender heeds no reports of losses.
    `real_payload` seals real bytes and compares them; otherwise only lengths travel. Defaults: a
    clean link of 400 Gbit/s and 25 ms of round trip, 60 s of idle time-out, one day of virtual
    time at most.

    Raises ValueError for a scenario that cannot be run, naming the value and the range.
    """

class RingSimulationResult(TypedDict):
    """What a simulated ring showed. Times are nanoseconds of virtual time."""

    completion_nanos: list[int]
    """By operation: until the last site had all; fewer than asked for if a rule was broken."""
    sessions: list[SimulationResult]
    """By site: the session to the next one."""
    arrays: list[bytes]
    """What the sites hold at the end; none without payload."""

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
    """Let sites around a ring do a collective operation, `repeats` times, all beginning at once.

    Each site has sends (first byte, end, messages that must have arrived before) to the next and
    receives (first byte, end, whether they are added to what is there) from the one before.
    With `arrays`, one for each site, bytes are sealed and elements of `dtype` summed; else lengths
    travel. All links and sessions are alike, as for `simulate`; at most `depth` messages of a
    session are unacknowledged.

    Raises ValueError for a ring that cannot be run, naming the value and the range.
    """

# Storage data path.
class QueueError(Exception):
    """A queue ended or timed out: arguments (reason id, text)."""

class StatusError(Exception):
    """A command was answered with an error: arguments (status code, LBA, text, do not retry)."""

class DataDigestError(ValueError): ...

class PduError(ValueError):
    """A PDU breaks the rules: arguments (fatal error status, header offset, text)."""

@final
class SecureQueueParameters:
    """Keys and context of one secure queue; used up by `start_queue`. Zeroes `secret`."""

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
    """A store was refused: arguments (reason id, text)."""

@final
class StoreAnchor:
    """The anchor of one store: what is to be anchored out, whether it was in.

    `latest`: number and state (65 bytes) that it was advanced to last, None if never: then `base`
    is the number that the first state follows. `every_commit`: it is advanced
    with each flush, else with checkpoints, at the start and at the end. A flush waits
    `timeout_seconds` for the answer. `believed`: an operator takes the store as it is found, if
    this anchor knows nothing of it. StoreRefusedError `store.rolled_back`: the state isn't the one
    of that number.
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
    # Readable when `take` would find something.
    def fd(self) -> int: ...
    # The number, which grows by one, and what is to be anchored; the same again if no answer came.
    def take(self) -> tuple[int, bytes] | None: ...
    # Anchored, unless it is known never to be (`lost`) or not known (`unreachable`).
    def answer(
        self, number: int, *, lost: str | None = None, unreachable: str | None = None
    ) -> None: ...

# Blocks of an NVMe namespace of 4096 + 64 bytes that nobody uses, and whether the first one's data
# are zeros. OSError if it is another format, in use, or no namespace.
def examine_drive(path: str | os.PathLike[str]) -> tuple[int, bool]: ...

# Takes a store off it. OSError.
def erase_drive(path: str | os.PathLike[str]) -> None: ...

# Blocks that a new store of so many sectors takes.
def drive_blocks(sector_count: int) -> int: ...

@final
class Namespace:
    """A namespace of a target: a store, and who may use it when.

    `sealed`: 4160-byte blocks behind secure queues; else plain 4096-byte blocks. A sealed "file"
    keeps freshness itself, under `secret` (32 bytes, wiped) if there is one, and as far as `anchor`
    remembers; "memory" can't be rolled back. Without `freshness` a store keeps none.
    `metadata`: plain blocks of 4096 bytes with 64 of metadata, which are the host's. "inline" is a
    file laid out as a drive with 64-byte metadata has it. `exist` "create": the file must not
    exist. `reserves`: its file system keeps room for all of it, from its making on.
    OSError if the store can't be had, StoreRefusedError (`store.rolled_back`,
    `anchor.unreachable`, `sector.stale`) among them; ValueError for options that don't go together.
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
    # Offers `block_count` blocks to queues that start from now on; a power cut leaves the old size
    # or the new one. ValueError for fewer blocks, or a size that the store can't take; OSError: a
    # queue or a job is running, the device has no room, or it doesn't grow.
    def extend(self, block_count: int) -> None: ...
    # How a store that keeps freshness lays blocks out, for people; empty: it keeps none.
    @property
    def layout(self) -> str: ...
    @property
    def sealed(self) -> bool: ...
    # How far the store has come: 32 bytes, or none.
    @property
    def milestone(self) -> bytes: ...
    # Whether it has everything that was flushed when this was told. ValueError for another length.
    def contains(self, milestone: bytes) -> bool: ...
    # Per second, from now on and for commands that wait; 0: no limit.
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
    # blocks moved; sectors_written: sealed sectors that are written now; busy_ms; media_errors;
    # refusals; reservation_conflicts; throttled; contended; events_dropped; the store's own.
    def statistics(self) -> dict[str, int]: ...
    def reservation(self) -> ReservationState: ...
    # Kind "refused": a stored sector or the store; "reservation": `reason` is the notice,
    # `detail` the hexadecimal host identifier of the registrant to tell.
    def take_events(self) -> list[StorageEvent]: ...
    def event_fd(self) -> int: ...
    # OSError if the store can't.
    def sync(self) -> None: ...
    # Background jobs, one of each kind at a time: a position is a block, rates are bytes read and
    # written (0: no limit). JobRefusedError `volume.job.running`, `volume.job.unsupported`,
    # `store.failed`.
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
    # Those that were started, the last one of each kind.
    def jobs(self) -> list[JobStatus]: ...
    # Ends them where they are and waits until none of them uses the store.
    def end_jobs(self) -> None: ...
    # Ends the jobs; the store goes with the last queue that uses it.
    def close(self) -> None: ...

    # On a plain namespace of somebody else's, whose first 4096 bytes must be zeros to "create".
    # OSError: EEXIST if they aren't, ENOTCONN if the connection ended; StoreRefusedError if the
    # anchor knows of a later state; ValueError: used device.
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
    """A plain namespace of somebody else's target behind an I/O queue, for one store.

    `timeout_seconds` is for one command. ValueError for block sizes but 512, 1024, 2048, 4096, and
    4160: there sectors lie with their metadata.
    """

    def __new__(
        cls, queue: HostQueueDescription, *, block_count: int, timeout_seconds: float
    ) -> RemoteDevice: ...
    # Takes the volume's store off the namespace, and ends the device. OSError if it isn't there.
    def erase(self, volume_id: bytes) -> None: ...
    def close(self) -> None: ...

@final
class StoreOpening:
    """How far the opening of a store is, while another thread opens it."""

    def __new__(cls) -> StoreOpening: ...
    # Pages and records gone through, and how many there are as far as is known.
    def progress(self) -> tuple[int, int]: ...

class JobRefusedError(Exception):
    """A background job was refused: arguments (reason id, text)."""

class JobStatus(TypedDict):
    """How far a background job is; counts since it was started.

    `checked`: written sectors looked at; `unchecked`: sectors whose leaf page is wrong; `found`:
    all that is wrong, of which `findings` has the first: (sector or None, reason id, text, whether
    the store knows what is right); `repaired`: those of it that were written again.
    `yields`: times it held back because commands of hosts took long.
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
    """Reservations of a namespace; `type` 0: none; `holder` None: nobody, or all registrants."""

    type: int
    holder: bytes | None
    generation: int
    registrants: list[tuple[bytes, int, bool]]
    """(host identifier, key, whether it holds the reservation)"""

@final
class Controller:
    """Every I/O queue of one association. `host_id` has 16 bytes.

    `read_only`: commands that change blocks end with Namespace is Write Protected. Its queues begin
    and answer nothing once `permit` doesn't hold, and end; None: nothing ends them.
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
    # (nsid, namespace, ANA state); replaces what was there, also for queues that run.
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
    # Duplicates the descriptor. Sealed namespaces are seen by secure queues only, plain ones by
    # queues without `secure`.
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
    # Since the last byte received on any of its I/O queues, or the start of the last queue.
    def idle_ms(self) -> int: ...
    # Only a command whose data hasn't all arrived can be aborted. Waits for the queue's thread.
    def abort(self, queue_id: int, command_id: int) -> bool: ...
    # The error log, newest first, at most 64 entries: (error count, queue id, command id, status
    # field of the completion, LBA, namespace id).
    def errors(self) -> list[tuple[int, int, int, int, int, int]]: ...
    def queues_running(self) -> int: ...
    # Commands and PDUs that failed a check and ended their queue.
    def refusals(self) -> int: ...
    # "queue_opened", "queue_closed", and "refused" for what isn't about a stored sector.
    def take_events(self) -> list[StorageEvent]: ...
    def event_fd(self) -> int: ...
    # Stops every queue and waits until nothing is in flight: use a thread.
    def close(self) -> None: ...

class StaleAssociationError(Exception):
    """The association of a back-end queue is over: open a newer one."""

class QueueClosedError(Exception):
    """The front-end queue that a back end is for is closed."""

@final
class JournalPool:
    """Room for the journals of all volumes of a gateway, beyond 1 MiB that each has of its own."""

    def __new__(cls, *, bytes_max: int) -> Self: ...
    # Bytes that journals have of it.
    @property
    def taken(self) -> int: ...
    # Volumes that are open: each has its keys and a journal in memory.
    @property
    def volumes(self) -> int: ...

class GatewayVolume:
    """An attached volume with its keys; reads at once, writes once it has counters.

    `command_timeout_seconds`: how long the target may take for a command; `hold_seconds`: how long
    commands wait for a lost back end; `journal_bytes_max`: unflushed changes kept to be sent again;
    `nonce_ledger`: file that every seal is noted in (tests); `fully_sealed`: an unwritten sector is
    an error, and writing zeroes seals zeros; `read_only`: hosts may change nothing, and no counters
    are needed. Events of kind "association_lost" ask for a newer association for every queue,
    "rekey_due" for a queue with fresh keys in this one.
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
    def add_counters(
        self, *, broker_instance: int, start_epoch: int, start: int, end: int
    ) -> None: ...
    # Adds the key of another epoch, from the oldest one to 255 above; the newest seals. Wipes it.
    def add_key(self, *, key_epoch: int, key: bytearray) -> None: ...
    # Puts counters, used in this order, in the place of those that no queue holds and returns
    # these: (broker instance, start epoch, first, end).
    def replace_counters(
        self, ranges: list[tuple[int, int, int, int]]
    ) -> list[tuple[int, int, int, int]]: ...
    def counters_remaining(self) -> int: ...
    # Serves a front-end queue; its commands are held until it has a back end.
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
    # Gives a front-end queue its (next) back end. `confirmed`: the milestone that the target said
    # it has; `milestone`: how far its store has come (no bytes: none). StaleAssociationError, also
    # of another incarnation that confirmed an older milestone; QueueClosedError.
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
    # A load on a queue of the gateway's own, whose back end is `queue`; blocks: use a thread.
    def run_load(
        self,
        queue: HostQueueDescription,
        settings: LoadSettings,
        *,
        association_epoch: int,
        incarnation: int,
        secure: SecureQueueParameters,
    ) -> LoadResult: ...
    # The newest association can't be used; does nothing if that is known.
    def lose_association(self, detail: str) -> None: ...
    # Ends the volume: every command ends with an error from now on.
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
    # What the next incarnation of the target must have: 32 bytes, or none.
    @property
    def milestone(self) -> bytes: ...
    # Incarnation of the target that alone can lose what is acknowledged from now on: everything
    # acknowledged before is durable. None: something isn't, or no target is connected.
    @property
    def settled_incarnation(self) -> int | None: ...
    # Since the last byte from the host on any I/O queue of the association; None if it has none.
    def idle_ms(self, association: int) -> int | None: ...
    def close_queues(self, association: int | None = None) -> None: ...
    # Closes all queues, wipes the keys and gives back every buffer. Statistics and events are empty
    # from then on; other calls raise QueueClosedError.
    def close(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    def take_events(self) -> list[StorageEvent]: ...
    def event_fd(self) -> int: ...

@final
class HostQueue:
    """A plain I/O queue of a host: whole buffers, many transfers at once, from any thread.

    Calls that start a transfer return its ticket and never wait for the peer; `take_done` returns
    the tickets of transfers that ended, each with its error (StatusError or QueueError) if it
    failed. `event_fd` is readable while there are any. A buffer is held until its transfer was
    taken.
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
    # (lba, blocks) of up to 256 ranges
    def deallocate(self, ranges: Sequence[tuple[int, int]]) -> int: ...
    def flush(self) -> int: ...
    # nothing more is submitted of it, nothing more copied into its buffer
    def cancel(self, ticket: int) -> None: ...
    def take_done(self) -> list[tuple[int, BaseException | None]]: ...
    def event_fd(self) -> int: ...
    def progress(self) -> int: ...
    def close(self) -> None: ...

@final
class PduHeader:
    """The fields of a PDU header; those its type doesn't have are zero or empty."""

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
) -> tuple[int, int, int]: ...  # type, bytes of header and of data, digests included
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

# Quotes of the offending header what a termination request has room for.
def encode_termination(from_host: bool, code: int, offset: int, offending: bytes) -> bytes: ...
def find_pieces(path: str | os.PathLike[str], pieces: Sequence[bytes]) -> list[tuple[int, int]]: ...
def status_name(code: int) -> str | None: ...
def sector_layout() -> dict[str, tuple[int, int]]: ...

class LoadSettings(TypedDict):
    """What a load does: `depth` commands of `io_bytes` outstanding on each queue for `seconds`."""

    is_write: bool
    is_random: bool
    io_bytes: int
    depth: int
    span_bytes: int
    seconds: float
    seed: int

class LoadResult(TypedDict):
    """What a load measured; `cpu_seconds` is of the load's own threads."""

    commands: int
    bytes: int
    seconds: float
    cpu_seconds: float
    latency_p50_us: float
    latency_p99_us: float
    latency_p999_us: float

def run_load(queues: Sequence[HostQueueDescription], settings: LoadSettings) -> LoadResult: ...
