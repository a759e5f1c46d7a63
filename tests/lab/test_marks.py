"""Congestion marks from a link's queues, reported back to the sender of a session."""

import secrets
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyroute2.netns import setns

from labs import CLEAN, RunningLab, needs_root, running, wan
from patience import PATIENCE_SECONDS
from sealane._native import JobRing, SessionEndpoint, SharedRegion

pytestmark = needs_root

MESSAGE_BYTES = 400_000
MARKS = "low_bytes = 15_000, high_bytes = 60_000"
TOPOLOGY = "\n".join(
    [
        "slip_micros_max = 20_000",
        wan("red", f"red = {{ {MARKS} }}"),
        wan("phantom", f"phantom = {{ {MARKS}, cap_bytes = 1_000_000, drain = 0.8 }}"),
        wan("clean", link=CLEAN),
    ]
)
# The rates of sessions: RED marks a queue, a phantom queue is there before one.
RATES = {"red": 60_000_000, "phantom": 48_000_000, "clean": 48_000_000}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLab]:
    with running(Path(tmp_path_factory.mktemp("lab")), TOPOLOGY) as started:
        yield started


def open_endpoint(lab: RunningLab, host: str, link: str) -> SessionEndpoint:
    """Open an endpoint in a host's namespace, on a thread that stays there until it ends."""

    def make() -> SessionEndpoint:
        setns(lab.namespace(host), flags=0)
        return SessionEndpoint([f"{lab.address(host, link)}:0"], SharedRegion(MESSAGE_BYTES))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def send(sender: JobRing, receiver: JobRing) -> None:
    """Send a message and wait for its acknowledgement."""
    content = secrets.token_bytes(MESSAGE_BYTES)
    memoryview(sender.region)[:] = content
    receiver.post_receive(offset=0, length=MESSAGE_BYTES, user_data=1)
    sender.post_send(offset=0, length=MESSAGE_BYTES, user_data=1)
    for ring in (receiver, sender):
        assert select.select([ring.fileno()], [], [], PATIENCE_SECONDS)[0]
        assert [found.status for found in ring.completions()] == ["ok"]
    assert memoryview(receiver.region) == content


def settled(lab: RunningLab, link: str, sender: SessionEndpoint) -> tuple[int, dict[str, int]]:
    """Return the link's marks and the sender's counters once they agree, or after a timeout."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        marked = lab.path(link)["marked_packets"]
        counters = sender.statistics()
        if counters["ce_echoed"] >= marked or time.monotonic() > deadline:
            return marked, counters
        time.sleep(0.01)


@pytest.mark.parametrize("link", ["red", "phantom", "clean"])
def test_a_sender_counts_the_marks_of_its_path(lab: RunningLab, link: str) -> None:
    with ExitStack() as stack:
        left, right = (open_endpoint(lab, host, link) for host in ("a", "b"))
        rings = []
        for endpoint, peer, own_id in ((left, right, 1), (right, left, 2)):
            stack.callback(endpoint.close)
            ring = JobRing(*endpoint.take_job_fds())
            stack.callback(ring.close)
            rings.append(ring)
            forward, backward = bytearray(b"\1" * 32), bytearray(b"\2" * 32)
            endpoint.start(
                peer_addresses=peer.local_addresses,
                connection_id_local=own_id,
                connection_id_peer=3 - own_id,
                send_key=forward if own_id == 1 else backward,
                receive_key=backward if own_id == 1 else forward,
                rate_bits_per_second=RATES[link],
                idle_timeout_ns=30 * 10**9,
                initiator=own_id == 1,
                version=6,
            )
        send(*rings)
        marked, counters = settled(lab, link, left)

    assert counters["is_ecn_capable"] == 1
    assert counters["ce_echoed"] == marked
    assert (marked > 20) is (link != "clean")
    # Packets are marked instead of dropped.
    path = lab.path(link)
    assert path["overflowed_packets"] == path["dropped_early_packets"] == path["lost_packets"] == 0
