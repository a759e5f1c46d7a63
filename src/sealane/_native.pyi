"""Native engine: everything that is per-packet or per-sector. Contract of `native/py`."""

from typing import final

__version__: str

# Sessions

@final
class SessionEndpoint:
    # The daemon's handle on one session: UDP socket, sealed shared memories, worker thread.
    # ValueError: a size or address that can't be; OSError: no socket, memory or thread.
    def __init__(
        self,
        bind_address: str,
        region_bytes: int,
        ring_entries: int = 256,
        *,
        unit_bytes: int = 1408,
        chunk_units: int = 16,
        slots: int = 64,
    ) -> None: ...
    @property
    def local_address(self) -> str: ...
    # Region, submission, completion, doorbell; once. The caller passes and closes them.
    def take_job_fds(self) -> tuple[int, int, int, int]: ...
    # Once. Takes the keys over and wipes both arrays.
    def start(
        self,
        *,
        peer_address: str,
        connection_id_local: int,
        connection_id_peer: int,
        send_key: bytearray,
        receive_key: bytearray,
        rate_bits_per_second: int,
        idle_timeout_ns: int,
        initiator: bool,
    ) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    # ("establishing" | "established" | "closed", reason id); takes the notification back.
    def state(self) -> tuple[str, str]: ...
    # Readable when the state has changed since it was last asked.
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class Region:
    # Shared with the daemon; writable through the buffer protocol.
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Completion:
    @property
    def kind(self) -> str: ...  # "send" | "receive"
    @property
    def status(self) -> str: ...  # "ok" | "outcome_unknown" | "aborted" | "too_long" | "refused"
    @property
    def user_data(self) -> int: ...
    @property
    def message(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def immediate(self) -> int | None: ...
    @property
    def duration_ns(self) -> int: ...  # sends: first transmission to last acknowledgement

@final
class JobRing:
    # The job's side. Takes over the four descriptors.
    def __init__(
        self, region_fd: int, submission_fd: int, completion_fd: int, doorbell_fd: int
    ) -> None: ...
    @property
    def region(self) -> Region: ...
    @property
    def entries(self) -> int: ...
    @property
    def slots(self) -> int: ...
    # BlockingIOError: the queue is full, consume completions; ValueError: never acceptable.
    def post_send(
        self,
        *,
        offset: int,
        length: int,
        user_data: int,
        k: int = 0,
        m: int = 0,
        immediate: int | None = None,
    ) -> None: ...
    def post_receive(self, *, offset: int, length: int, user_data: int) -> None: ...
    # Never waits. BrokenPipeError: the daemon has ended the session and nothing is left.
    def completions(self, limit: int = 64) -> list[Completion]: ...
    # One byte per chunk of the slot's message, 1 where it has landed. Advisory.
    def bitmap(self, slot: int) -> bytes: ...
    def statistics(self) -> dict[str, int]: ...
    # Readable when there are completions or the session has ended.
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class Emulator:
    # A link between two loopback ports: what comes to `address` goes on to `forward_to`.
    def __init__(
        self,
        *,
        rate_bits_per_second: int,
        delay_ns: int,
        buffer_bytes: int,
        loss_ppb: int,
        seed: int,
        forward_to: str,
    ) -> None: ...
    @property
    def port(self) -> int: ...
    @property
    def address(self) -> str: ...
    # "forward_…" and "backward_…": offered_packets, offered_bytes, delivered_packets,
    # delivered_bytes, lost_packets, overflowed_packets, sent_packets, unsent_packets, slip_max_ns.
    def counters(self) -> dict[str, int]: ...
    def stop(self) -> None: ...
