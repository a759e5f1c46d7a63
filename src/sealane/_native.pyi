"""Native engine: everything that is per-packet or per-sector. Contract of `native/py`."""

from typing import TypedDict

__version__: str

# Simulation (native/py/src/simulation.rs)

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
    forward: dict[str, int]
    """Link counters from sender to receiver."""
    backward: dict[str, int]
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
    unit_bytes: int = 4096,
    chunk_units: int = 16,
    real_payload: bool = False,
    rate_bits_per_second: int = 400_000_000_000,
    delay_nanos: int = 12_500_000,
    buffer_bytes: int = 16_777_216,
    loss_parts_per_billion: int = 0,
    backward_loss_parts_per_billion: int = 0,
    duplicate_parts_per_billion: int = 0,
    reorder_parts_per_billion: int = 0,
    reorder_nanos_max: int = 0,
    corrupt_parts_per_billion: int = 0,
    blackout_nanos: tuple[int, int] | None = None,
    idle_timeout_nanos: int = 60_000_000_000,
    time_nanos_max: int = 86_400_000_000_000,
) -> SimulationResult:
    """Send `count` messages over a simulated path and return what happened.

    Lengths are uniform from `message_bytes` to `message_bytes_max` (default: all equal); at most
    `depth` messages are outstanding. `erasure_code` is (k, m); without it, selective repeat.
    Both ends send at the rate of the link, which is the same both ways, as are its faults but
    for loss. `real_payload` seals real bytes and compares them; otherwise only lengths travel.

    Raises ValueError for a scenario that cannot be run, naming the value and the range.
    """
