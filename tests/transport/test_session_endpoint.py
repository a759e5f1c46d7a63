"""Pairs of native endpoints over loopback, with jobs that drive their rings directly."""

import concurrent.futures
import contextlib
import contextvars
import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import random
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from permits import permitted
from relays import emulator, forger, phantom_queue, switch
from sealane._native import Completion, JobRing, Permit, SessionEndpoint, SharedRegion, Steering
from sealane.daemon.runtime.clock import monotonic_ns

REGION = 4 << 20
path_threads = contextvars.ContextVar("path_threads", default=0)


@pytest.fixture(autouse=True, params=[0, 1], ids=["own", "path-thread"])
def _path_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds for sessions with a path thread and for those without."""
    token = path_threads.set(request.param)
    yield
    path_threads.reset(token)


@dataclass
class End:
    endpoint: SessionEndpoint
    ring: JobRing
    submission: int
    """A second descriptor of the submission memory, as a hostile job would keep."""
    call: int
    """And of the eventfd that wakes the daemon."""

    def wait_state(self, wanted: str) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        poller = select.poll()
        poller.register(self.endpoint.fileno(), select.POLLIN)
        while (state := self.endpoint.state())[0] != wanted:
            assert time.monotonic() < deadline, f"{state}, not {wanted}: {self.statistics()}"
            assert state[0] != "closed", state
            poller.poll(1000)
        return state[1]

    def statistics(self) -> dict[str, int]:
        return self.endpoint.statistics()

    def completions(self, count: int) -> list[Completion]:
        poller = select.poll()
        poller.register(self.ring.fileno(), select.POLLIN)
        found: list[Completion] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found) < count:
            found += self.ring.completions()
            if len(found) < count:
                assert time.monotonic() < deadline, self.statistics()
                poller.poll(1000)
        return found

    def scribble(self, offset: int, content: bytes) -> None:
        with mmap.mmap(self.submission, 0) as memory:
            memory[offset : offset + len(content)] = content


def attach(endpoint: SessionEndpoint) -> End:
    region, submission, completion, doorbell, call = endpoint.take_job_fds()
    kept, kept_call = os.dup(submission), os.dup(call)
    return End(endpoint, JobRing(region, submission, completion, doorbell, call), kept, kept_call)


@contextlib.contextmanager
def pair(
    *,
    relay: Callable[[str], contextlib.AbstractContextManager[str]] | None = None,
    same_keys: bool = True,
    rate: int = 400_000_000,
    ring_entries: int = 256,
    establish: bool = True,
    reordering_ns: int = 0,
    permits: tuple[Permit | None, Permit | None] = (None, None),
    steering: Steering | None = None,
    second_steering: Steering | None = None,
) -> Iterator[tuple[End, End]]:
    """Return two endpoints that share keys; the first opens the session, maybe via a relay.

    `second_steering`: of the second one, if it differs.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            endpoint = SessionEndpoint(["127.0.0.1:0"], SharedRegion(REGION), ring_entries)
            stack.callback(endpoint.close)
            end = attach(endpoint)
            stack.callback(os.close, end.submission)
            stack.callback(end.ring.close)
            ends.append(end)
        left, right = ends
        forward, backward = secrets.token_bytes(32), secrets.token_bytes(32)
        via = right.endpoint.local_addresses[0]
        if relay is not None:
            via = stack.enter_context(relay(via))
        skew: dict[str, Any] = {
            "rate": rate,
            "reordering_ns": reordering_ns,
            "steering": steering,
        }
        start(left, via, (1, 2), (forward, backward), **skew, initiator=True, permit=permits[0])
        if not same_keys:
            forward = bytes(32)
        skew["steering"] = second_steering or steering
        back = left.endpoint.local_addresses[0]
        start(right, back, (2, 1), (backward, forward), **skew, initiator=False, permit=permits[1])
        if establish:
            left.wait_state("established")
            right.wait_state("established")
        yield left, right


def start(
    end: End,
    peer: str,
    connection_ids: tuple[int, int],
    keys: tuple[bytes, bytes],
    *,
    rate: int,
    initiator: bool,
    reordering_ns: int = 0,
    steering: Steering | None = None,
    permit: Permit | None = None,
) -> None:
    send_key, receive_key = bytearray(keys[0]), bytearray(keys[1])
    end.endpoint.start(
        peer_addresses=[peer],
        connection_id_local=connection_ids[0],
        connection_id_peer=connection_ids[1],
        send_key=send_key,
        receive_key=receive_key,
        rate_bits_per_second=rate,
        idle_timeout_ns=30 * 10**9,
        initiator=initiator,
        version=6,
        reordering_ns=reordering_ns,
        steering=steering,
        permit=permit,
        path_threads=path_threads.get(),
    )
    assert send_key == receive_key == bytes(32), "the endpoint wipes the keys it was given"


def transfer(left: End, right: End, *, sizes: list[int], k: int = 0, m: int = 0) -> None:
    """Send messages of these sizes, all in flight together, and compare every byte."""
    source, sink = memoryview(left.ring.region), memoryview(right.ring.region)
    content = random.Random(3).randbytes(sum(sizes))
    source[: len(content)] = content
    sink[:] = bytes(len(sink))
    offset = 0
    for number, size in enumerate(sizes):
        right.ring.post_receive(offset=offset, length=size, user_data=number)
        left.ring.post_send(
            offset=offset, length=size, user_data=number, k=k, m=m, immediate=number
        )
        offset += size
    received = right.completions(len(sizes))
    sent = left.completions(len(sizes))
    for completions in (received, sent):
        assert sorted(done.user_data for done in completions) == list(range(len(sizes)))
        assert {done.status for done in completions} == {"ok"}
        assert all(done.length == sizes[done.user_data] for done in completions)
    assert all(done.immediate == done.user_data for done in received)
    assert all(done.duration_ns > 0 for done in sent)
    landed = hashlib.sha256(sink[: len(content)]).digest()
    assert landed == hashlib.sha256(content).digest()
    assert bytes(sink[len(content) :]) == bytes(len(sink) - len(content)), "nothing else changed"


UNO = Steering(
    congestion="uno",
    line_bits_per_second=400_000_000,
    near_rtt_nanos=6_000_000,
    far_rtt_nanos=25_000_000,
    phantom_marks=True,
)


def test_a_receiver_without_a_controller_acknowledges_as_its_network_allows() -> None:
    """The sender asks for 2.5 µs; each 100 µs would be 400 acknowledgements of 2 MB, or some more.

    Real timers: a busy machine acknowledges what has come meanwhile at once, so it may try again.
    """
    asking = Steering(
        congestion="uno",
        line_bits_per_second=10**10,
        near_rtt_nanos=10_000,
        far_rtt_nanos=10_000_000,
    )
    agreeing = Steering(
        congestion=None,
        line_bits_per_second=10**10,
        near_rtt_nanos=10_000,
        far_rtt_nanos=0,
    )
    counts: list[int] = []
    while not counts or counts[-1] < 1000:
        assert len(counts) < 15, counts
        with pair(steering=asking, second_steering=agreeing) as (left, right):
            transfer(left, right, sizes=[2_000_000])
            counts.append(right.statistics()["control_packets_sent"])


@pytest.mark.slow
@pytest.mark.parametrize("steering", [UNO, None], ids=["uno", "rate"])
def test_congestion_control_finds_the_rate_of_a_slower_link(steering: Steering | None) -> None:
    """The link has an eighth of the session's rate and a buffer of a tenth of a second."""
    with pair(relay=phantom_queue, steering=steering) as (left, right):
        for _ in range(4):
            transfer(left, right, sizes=[2_000_000])
        found = left.statistics()
    # Real timers: a busy machine sends in bursts.
    if steering is None:
        assert found["window_bytes"] == 0
        assert found["lost_packets"] * 5 > found["packets_sent"]
    else:
        assert found["window_bytes"] > 0
        assert found["ce_echoed"] > 0
        assert found["lost_packets"] * 20 < found["packets_sent"]
        assert found["limited_congestion_nanos"] > 0


SIZES = [0, 1, 1407, 1408, 1409, 100_000, 16 * 1408, 0, 32 * 1408, 1_000_000]


def test_a_plan_decides_for_sends_that_ask_for_it() -> None:
    with pair() as (left, right):

        def parity_of(size: int) -> int:
            before = left.statistics()
            right.ring.post_receive(offset=0, length=size, user_data=1)
            left.ring.post_send(offset=0, length=size, user_data=1, auto=True)
            assert left.completions(1)[0].status == right.completions(1)[0].status == "ok"
            while (after := left.statistics())["sends_completed"] == before["sends_completed"]:
                time.sleep(0.001)
            return after["parity_packets_sent"] - before["parity_packets_sent"]

        def wait_for_parity(size: int) -> None:
            # Parity is sent last, and not at all if the answer is faster.
            end = time.monotonic() + PATIENCE_SECONDS
            while not parity_of(size):
                assert time.monotonic() < end

        assert parity_of(50_000) == parity_of(100_000) == 0
        left.endpoint.install_plan([(50_000, 0, 0, 1, 0), (1 << 20, 16, 2, 4, 0)])
        assert parity_of(50_000) == 0
        wait_for_parity(100_000)
        left.endpoint.install_plan([(1, 32, 8, 1, 0)])
        wait_for_parity(50_000)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(2, 0, 0, 1, 0), (1, 0, 0, 1, 0)],
        [(1, 200, 56, 1, 0)],
        [(1, 4, 2, 0, 0)],
        [(1, 0, 0, 2, 0)],
        [(1, 4, 0, 1, 0)],
        [(1, 4, 2, 1, 1_000_000_001)],
    ],
)
def test_plans_that_cannot_be_followed_are_refused(
    rows: list[tuple[int, int, int, int, int]],
) -> None:
    with pair(establish=False) as (left, _), pytest.raises(ValueError, match="plan"):
        left.endpoint.install_plan(rows)


@pytest.mark.parametrize("scheme", [{"k": 4}, {"depth": 2}, {"k": 4, "m": 2, "depth": 0}])
def test_impossible_schemes_are_refused_before_they_are_posted(scheme: dict[str, int]) -> None:
    with pair(establish=False) as (left, _), pytest.raises(ValueError, match="reliability"):
        left.ring.post_send(offset=0, length=10, user_data=1, **scheme)
    with pair(establish=False) as (left, _), pytest.raises(ValueError, match="auto"):
        left.ring.post_send(offset=0, length=10, user_data=1, k=4, m=2, auto=True)


def test_reordering_within_the_skew_that_the_operator_names_is_no_loss() -> None:
    relay = functools.partial(emulator, loss_ppb=0, reorder_ppb=300_000_000)

    with pair(relay=relay, reordering_ns=2 * 10**9) as (left, right):
        transfer(left, right, sizes=[400_000])
        known = right.statistics()
    with pair(relay=relay) as (left, right):
        transfer(left, right, sizes=[400_000])
        learnt = right.statistics()

    assert (known["missing_runs"], known["reordered_packets"]) == (0, 0)
    assert learnt["missing_runs"] > 0


CODES = [pytest.param(0, 0, id="selective repeat"), pytest.param(32, 8, id="erasure coded")]


@pytest.mark.parametrize(("k", "m"), CODES)
def test_messages_arrive_whole_over_loopback(k: int, m: int) -> None:
    with pair() as (left, right):
        transfer(left, right, sizes=SIZES, k=k, m=m)


@pytest.mark.parametrize(("k", "m"), CODES)
def test_messages_arrive_whole_over_a_lossy_link(k: int, m: int) -> None:
    with pair(relay=emulator) as (left, right):
        transfer(left, right, sizes=SIZES, k=k, m=m)

        statistics = right.statistics() if k else left.statistics()
        assert statistics["decoded_units" if k else "retransmitted_packets"] > 0


@pytest.mark.parametrize(("k", "m"), CODES)
def test_message_as_long_as_the_region_arrives(k: int, m: int) -> None:
    with pair() as (left, right):
        transfer(left, right, sizes=[REGION], k=k, m=m)


def test_bitmap_shows_the_chunks_of_the_message_in_its_slot() -> None:
    with pair() as (left, right):
        right.ring.post_receive(offset=0, length=200_000, user_data=1)
        left.ring.post_send(offset=0, length=100_000, user_data=1)
        right.completions(1)

        chunks = -(-100_000 // (16 * 1408))
        bitmap = right.ring.bitmap(0, -(-200_000 // (16 * 1408)))
        assert bitmap is not None
        assert bitmap.read() == b"\x01" * chunks + bytes(len(bitmap) - chunks)
        right.ring.post_receive(offset=0, length=200_000, user_data=2)
        assert right.ring.statistics()["payload_bytes_received"] == 100_000


def test_a_paced_sender_wakes_up_for_several_packets_at_once() -> None:
    # 8 packets are earned per millisecond; a loaded machine makes it more, never less.
    with pair(rate=100_000_000) as (left, right):
        transfer(left, right, sizes=[1 << 19])
        sent = left.statistics()
    assert sent["packets_sent"] >= 4 * sent["send_calls"], sent


def _shrink_receive_buffer(address: str, size: int) -> None:
    """Shrink the receive buffer of this process's UDP socket with that address, to `size` bytes."""
    for entry in Path("/proc/self/fd").iterdir():
        if not (entry.is_symlink() and str(entry.readlink()).startswith("socket:")):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as found:
            if (found.type, found.family) == (socket.SOCK_DGRAM, socket.AF_INET):
                host, port = found.getsockname()
                if f"{host}:{port}" == address:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
                    return
    raise AssertionError(f"no socket has {address}")


def test_what_the_peers_host_drops_slows_a_session_and_is_no_loss_of_the_path() -> None:
    with pair(rate=8 * 10**9) as (left, right):
        _shrink_receive_buffer(right.endpoint.local_addresses[0], 64 << 10)
        most = left.statistics()["rate_bytes_per_second"]
        end = time.monotonic() + PATIENCE_SECONDS
        while left.statistics()["rate_bytes_per_second"] == most:
            assert time.monotonic() < end, left.statistics()
            transfer(left, right, sizes=[REGION])
        found = left.statistics()
    assert found["peer_drops"] > 100
    assert found["lost_packets"] * 10 < found["peer_drops"]
    assert found["breaker_trips"] == 0


def test_both_directions_carry_data() -> None:
    with pair() as (left, right):
        transfer(left, right, sizes=[50_000])
        transfer(right, left, sizes=[60_000])


@pytest.mark.parametrize(("k", "m"), CODES)
def test_forged_and_replayed_packets_change_nothing(k: int, m: int) -> None:
    with pair(relay=forger, rate=40_000_000) as (left, right):
        # Again while the host was busy and dropped some of the relay's packets.
        end = time.monotonic() + PATIENCE_SECONDS
        found: tuple[int, ...] = (0,)
        while min(found) <= 100:
            assert time.monotonic() < end, found
            transfer(left, right, sizes=[300_000, 5], k=k, m=m)
            statistics = right.statistics()
            found = tuple(statistics[each] for each in ("forged", "replayed", "foreign_packets"))


def test_other_keys_never_establish() -> None:
    with pair(same_keys=False, establish=False) as (left, right):
        poller = select.poll()
        poller.register(left.endpoint.fileno(), select.POLLIN)
        poller.register(right.endpoint.fileno(), select.POLLIN)
        while right.statistics().get("forged", 0) < 2:
            assert poller.poll(1) == []

        assert left.endpoint.state()[0] == "establishing"
        assert right.endpoint.state()[0] == "establishing"


def test_forged_packets_from_elsewhere_are_soon_not_opened() -> None:
    with pair() as (left, right):
        host, port = left.endpoint.local_addresses[0].rsplit(":", 1)
        connection_id, number = (1).to_bytes(8, "big"), (1 << 40).to_bytes(8, "big")
        forged = bytes([6 << 4]) + connection_id + bytes(5) + number + bytes(64)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while left.statistics()["foreign_packets"] == 0:
                assert time.monotonic() < deadline, left.statistics()
                for _ in range(100):
                    stranger.sendto(forged, (host, int(port)))
        assert left.statistics()["forged"] >= 64

        transfer(left, right, sizes=[1000])


def test_running_session_takes_packets_from_elsewhere_and_stays_where_its_peer_receives() -> None:
    with switch() as (lay, turn), pair(relay=lay) as (left, right):
        transfer(left, right, sizes=[1000])
        (before,) = right.endpoint.paths()
        turn()
        transfer(left, right, sizes=[1000, 300_000])
        (after,) = right.endpoint.paths()
        assert after["peer_address"] == before["peer_address"]
        assert right.statistics()["path_moves"] == 0
        turn()
        transfer(left, right, sizes=[1000])


def test_death_of_the_job_ends_the_session_at_both_ends() -> None:
    with pair() as (left, right):
        left.ring.close()

        assert left.wait_state("closed") == "session.job.gone"
        assert right.wait_state("closed") == "session.peer_closed.requested"
        with pytest.raises(BrokenPipeError):
            right.ring.completions()


def test_operations_in_flight_complete_when_the_session_ends() -> None:
    with pair() as (left, right):
        left.ring.post_send(offset=0, length=100, user_data=7)
        right.ring.post_send(offset=0, length=100, user_data=8)
        right.ring.post_receive(offset=0, length=10, user_data=9)
        (too_long,) = right.completions(1)
        left.endpoint.close()
        right.wait_state("closed")
        left_done, right_done = left.completions(1), right.completions(1)

    assert (too_long.user_data, too_long.status) == (9, "too_long")
    assert [(done.user_data, done.status) for done in left_done] == [(7, "too_long")]
    assert right_done[0].user_data == 8
    assert right_done[0].status in ("aborted", "outcome_unknown")


BAD_ENTRIES = [
    pytest.param(struct.pack("<BBBBIQQQ", 9, 0, 0, 0, 0, 0, 1, 0), "opcode", id="opcode"),
    pytest.param(struct.pack("<BBBBIQQQ", 1, 8, 0, 0, 0, 0, 1, 0), "flags", id="flags"),
    pytest.param(struct.pack("<BBBBIQQQ", 1, 0, 4, 0, 0, 0, 1, 0), "reliability", id="code"),
    pytest.param(struct.pack("<BBBBIQQQ", 1, 0, 0, 0, 0, REGION, 1, 0), "range", id="offset"),
    pytest.param(struct.pack("<BBBBIQQQ", 2, 0, 0, 0, 0, 2**64 - 1, 2, 0), "range", id="overflow"),
    pytest.param(struct.pack("<BBBBIQQQ", 2, 0, 0, 0, 0, 0, 1 << 50, 0), "length", id="length"),
    pytest.param(
        struct.pack("<BBBBIQQQQ", 2, 0, 0, 0, 0, 0, 1, 0, 1 << 16), "reserved", id="reserved"
    ),
    pytest.param(
        struct.pack("<BBBBIQQQQ", 1, 0, 0, 0, 0, 0, 1, 0, 8 << 8), "priority", id="priority"
    ),
]


@pytest.mark.parametrize(("entry", "fault"), BAD_ENTRIES)
def test_bad_entry_ends_only_the_session_of_its_job(entry: bytes, fault: str) -> None:
    with pair() as (left, right), pair() as others:
        left.scribble(128, entry)
        poke(left, struct.pack("<Q", 1))

        assert left.wait_state("closed") == f"ring.entry.{fault}"
        assert right.wait_state("closed") == "session.peer_closed.requested"
        transfer(*others, sizes=[1000])


@pytest.mark.parametrize("index", [257, 2**63, 2**64 - 1])
def test_index_jump_ends_the_session(index: int) -> None:
    with pair() as (left, _):
        poke(left, struct.pack("<Q", index))

        assert left.wait_state("closed") == "ring.index.jump"


def poke(end: End, producer: bytes) -> None:
    """Set the producer index and wake the daemon, as only a hostile job would."""
    end.scribble(0, producer)
    os.eventfd_write(end.call, 1)


def test_flooded_doorbell_and_scribbled_memory_harm_nobody_else() -> None:
    with pair() as (left, _), pair() as others:
        for _ in range(10_000):
            os.eventfd_write(left.call, 1)
        left.scribble(0, random.Random(1).randbytes(128 + 64 * 256))
        poke(left, struct.pack("<Q", 5))

        assert left.wait_state("closed").startswith("ring.")
        transfer(*others, sizes=[10_000])


def test_job_can_not_write_what_it_may_only_read() -> None:
    endpoint = SessionEndpoint(["127.0.0.1:0"], SharedRegion(REGION))
    descriptors = endpoint.take_job_fds()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptors[2], 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for descriptor in descriptors[:3]:
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
        with pytest.raises(RuntimeError):
            endpoint.take_job_fds()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        endpoint.close()


PUNCH_HOLE_KEEP_SIZE = 3
LIBC = ctypes.CDLL(None, use_errno=True)


def protect_writable(descriptor: int) -> None:
    """Map for reading, then request write access, as only C can."""
    LIBC.mmap.restype = ctypes.c_void_p
    length = ctypes.c_size_t(mmap.PAGESIZE)
    view = LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ctypes.c_long(0))
    address = ctypes.c_void_p(view)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    refused = LIBC.mprotect(address, length, both) != 0
    error = ctypes.get_errno()
    LIBC.munmap(address, length)
    if refused:
        raise PermissionError(error, "mprotect")


def punch_hole(descriptor: int) -> None:
    where, length = ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)
    if LIBC.fallocate(descriptor, PUNCH_HOLE_KEEP_SIZE, where, length) != 0:
        raise PermissionError(ctypes.get_errno(), "fallocate")


def map_reopened(descriptor: int) -> None:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        mmap.mmap(again, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE).close()
    finally:
        os.close(again)


@pytest.mark.parametrize(
    "attack",
    [
        protect_writable,
        punch_hole,
        map_reopened,
        lambda descriptor: os.pwrite(descriptor, b"x", 64),
        lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda descriptor: os.ftruncate(descriptor, 1 << 30),
    ],
)
def test_job_finds_no_other_way_to_write_completions(attack: Callable[[int], None]) -> None:
    endpoint = SessionEndpoint(["127.0.0.1:0"], SharedRegion(REGION))
    descriptors = endpoint.take_job_fds()
    try:
        before = os.pread(descriptors[2], 4096, 0)
        with pytest.raises(PermissionError):
            attack(descriptors[2])
        assert os.pread(descriptors[2], 4096, 0) == before
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        endpoint.close()


def test_any_thread_reads_the_statistics_while_the_session_ends() -> None:
    with pair() as (left, _), concurrent.futures.ThreadPoolExecutor(1) as threads:
        has_read, is_over = threading.Event(), threading.Event()

        def read() -> int:
            count = 0
            while not is_over.is_set():
                assert left.endpoint.statistics()
                assert left.endpoint.paths()
                count += 1
                has_read.set()
            return count

        reader = threads.submit(read)
        try:
            assert has_read.wait(PATIENCE_SECONDS)
            left.endpoint.close()
        finally:
            is_over.set()
        assert reader.result(PATIENCE_SECONDS) > 0


def try_send(end: End, number: int) -> bool:
    try:
        end.ring.post_send(offset=0, length=10, user_data=number)
    except BlockingIOError:
        return False
    return True


def test_full_ring_asks_for_a_retry_and_loses_nothing() -> None:
    with pair(ring_entries=4) as (left, right):
        posted = 0
        with contextlib.suppress(BlockingIOError):
            while posted < 100:
                right.ring.post_receive(offset=10 * posted, length=10, user_data=posted)
                posted += 1
        for number in range(posted):
            while not try_send(left, number):
                left.completions(1)

        assert posted == 3, "the last entry is for commands"
        # An end accepts only what fits its completion queue, so both are emptied in turn.
        poller = select.poll()
        for end in (left, right):
            poller.register(end.ring.fileno(), select.POLLIN)
        received: list[Completion] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(received) < posted:
            assert time.monotonic() < deadline, right.statistics()
            left.ring.completions()
            found = right.ring.completions()
            received += found
            if not found:
                poller.poll(1000)
        assert [done.user_data for done in received] == list(range(posted))


@pytest.mark.parametrize(
    "arguments",
    [
        {"region_bytes": 0},
        {"ring_entries": 3},
        {"ring_entries": 1 << 20},
        {"slots": 5},
        {"unit_bytes": 0},
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, int]) -> None:
    sizes = {"region_bytes": REGION, **arguments}
    with pytest.raises(ValueError, match="out of range"):
        SessionEndpoint(["127.0.0.1:0"], SharedRegion(sizes.pop("region_bytes")), **sizes)


# Permits: no caller closes these sessions; their own threads check the permit.

PERMITTED_BYTES = 100_000


def _send(left: End, right: End) -> None:
    memoryview(left.ring.region)[:PERMITTED_BYTES] = b"x" * PERMITTED_BYTES
    right.ring.post_receive(offset=PERMITTED_BYTES, length=PERMITTED_BYTES, user_data=7)
    left.ring.post_send(offset=0, length=PERMITTED_BYTES, user_data=7)


def _landed(right: End) -> bytes:
    return bytes(memoryview(right.ring.region)[PERMITTED_BYTES : 2 * PERMITTED_BYTES])


@pytest.mark.parametrize("side", [0, 1], ids=["sender", "receiver"])
def test_nothing_passes_once_the_permit_has_ended(side: int) -> None:
    permit = permitted()
    with pair(permits=(None, permit) if side else (permit, None)) as ends:
        left, right = ends
        transfer(left, right, sizes=[PERMITTED_BYTES])
        before = _landed(right)
        permit.take_back("node.revoked")
        _send(left, right)
        assert ends[side].wait_state("closed") == "session.peer.revoked"
        assert ends[1 - side].wait_state("closed") == "session.peer_closed.revoked"
        assert _landed(right) == before


@contextlib.contextmanager
def _extended(permit: Permit) -> Iterator[None]:
    """Let a permit hold until three seconds after the end of the block."""
    is_over = threading.Event()

    def extend() -> None:
        while not is_over.wait(0.1):
            permit.extend(monotonic_ns() + 3 * 10**9)

    permit.extend(monotonic_ns() + 3 * 10**9)
    extending = threading.Thread(target=extend)
    extending.start()
    try:
        yield
    finally:
        is_over.set()
        extending.join()


@pytest.mark.slow
def test_a_session_ends_when_nobody_extends_its_permit() -> None:
    permit = Permit()
    with contextlib.ExitStack() as stack:
        with _extended(permit):
            left, right = stack.enter_context(pair(permits=(permit, None)))
            transfer(left, right, sizes=[PERMITTED_BYTES])
            before = _landed(right)
        while permit.holds:
            time.sleep(0.01)
        _send(left, right)
        assert left.wait_state("closed") == "session.trust.ended"
        assert _landed(right) == before


def test_a_session_whose_permit_never_held_is_never_established() -> None:
    with pair(permits=(Permit(), None), establish=False) as (left, _):
        assert left.wait_state("closed") == "session.trust.ended"


def test_nothing_that_was_submitted_after_a_drain_is_taken() -> None:
    # Workers that are busy look at the request now and then only.
    for _ in range(20):
        with pair() as (left, right):
            length = REGION // 4
            for end in (left, right):
                end.ring.post_receive(offset=0, length=length, user_data=1)
            right.ring.post_send(offset=length, length=length, user_data=2)
            # No receive is posted for the second one, so the drain lasts.
            left.ring.post_send(offset=length, length=8, user_data=3)
            left.ring.post_send(offset=length, length=8, user_data=4)
            while right.endpoint.statistics()["packets_sent"] < 50:
                pass
            left.endpoint.drain()
            left.ring.post_send(offset=length, length=8, user_data=5)
            found = {done.user_data: done.status for done in left.completions(3)}
            assert found[5] == "draining", found


def test_a_ring_of_another_region_is_refused() -> None:
    shared = SharedRegion(REGION)
    regions = (shared, shared, SharedRegion(REGION))
    with contextlib.ExitStack() as stack:
        first, same, other = [
            stack.enter_context(contextlib.closing(SessionEndpoint(["127.0.0.1:0"], region)))
            for region in regions
        ]
        ring = stack.enter_context(contextlib.closing(JobRing(*first.take_job_fds())))
        both = JobRing(*same.take_job_fds(), region=ring.region)
        stack.callback(both.close)
        assert both.region is ring.region
        with pytest.raises(OSError, match="another region"):
            JobRing(*other.take_job_fds(), region=ring.region)


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_memory_of_a_closed_session_is_reused_only_once_its_fabric_has_ended_it(
    closes: bool,
) -> None:
    region = SharedRegion(REGION)
    with contextlib.ExitStack() as stack:
        first, other = [
            stack.enter_context(contextlib.closing(SessionEndpoint(["127.0.0.1:0"], region)))
            for _ in range(2)
        ]
        ring = JobRing(*first.take_job_fds())
        live = JobRing(*other.take_job_fds(), region=ring.region)
        stack.callback(live.close)
        whole = live.region.empty([REGION], "uint8")
        ring.post_receive(offset=0, length=REGION, user_data=1)
        ring.hold(1, whole)
        del whole
        if closes:
            ring.close()
        del ring
        # The fabric has not noticed: nothing serves the session yet.
        with pytest.raises(MemoryError):
            live.region.empty([1], "uint8")
        first.close()
        live.region.empty([REGION], "uint8")


def test_memory_of_a_session_whose_fabric_is_gone_is_free() -> None:
    region = SharedRegion(REGION)
    endpoint = SessionEndpoint(["127.0.0.1:0"], region)
    ring = JobRing(*endpoint.take_job_fds())
    shared = ring.region
    ring.hold(1, shared.empty([REGION], "uint8"))
    endpoint.close()
    ring.close()
    shared.empty([REGION], "uint8")
