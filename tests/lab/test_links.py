"""Effects of links on packets of real hosts, by their counters and by arrivals."""

import contextlib
import hashlib
import itertools
import socket
import statistics
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute
from pyroute2.netns import create_socket

from labs import CLEAN, RunningLab, drain, needs_root, running, wan
from patience import PATIENCE_SECONDS

pytestmark = needs_root

ECN_CAPABLE, CONGESTION_EXPERIENCED = 2, 3
SO_TIMESTAMPNS = 35
UDP_SEGMENT = 103
FLOWS = 80
RUNS = 20
FAST = CLEAN.replace("50_000_000", "200_000_000")
MARKS = "low_bytes = 15_000, high_bytes = 30_000"
# 20 packets of 1500 bytes fit.
ACCESS = """
[wan.access]
rate_bits_per_second = 10_000_000
delay_micros = 1_000
buffer_bytes = 30_000
"""
TOPOLOGY = "\n".join(
    [
        "seed = 11\nslip_micros_max = 20_000",
        wan("clean"),
        wan("lossy", "loss = 0.01", link=FAST),
        wan("lossier", "loss = 0.1", link=FAST),
        wan("bursty", "burst = { p = 0.005, r = 0.125 }", link=FAST),
        wan("slow", link=CLEAN.replace("50_000_000", "10_000_000")),
        wan("red", f"red = {{ {MARKS} }}"),
        wan("phantom", f"phantom = {{ {MARKS}, cap_bytes = 1_000_000 }}"),
        wan("paths", "paths = 4"),
        wan("broken", "outages = [{ start_seconds = 0.0, end_seconds = 0.25 }]"),
        wan(
            "detour",
            "detours = [{ start_seconds = 0.0, end_seconds = 0.25, more_micros = 60_000 }]",
        ),
        wan("corrupt", "corrupt = 1.0\ncorruption_passes_checksum = true"),
        wan("wide"),
        wan("narrow"),
        wan("sided").replace('["a"]', '["a", "c"]'),
        wan("erased", f"red = {{ {MARKS} }}\nstrip_ce = true"),
        wan("access", ACCESS, link=FAST).replace('["a"]', '["a", "c"]'),
    ]
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLab]:
    """Run a lab with an independent link for each fault."""
    with running(Path(tmp_path_factory.mktemp("lab")), TOPOLOGY) as started:
        yield started


def send_numbered(lab: RunningLab, link: str, *, count: int, size: int = 100) -> list[int]:
    """Send numbered packets in batches that the kernel splits; return those that arrive."""
    with lab.receiver("b", link) as receiver, lab.open_socket("a") as sender:
        sender.connect(receiver.getsockname())
        sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, size)
        before = lab.path(link)["offered_packets"]
        for start in range(0, count, 40):
            numbers = range(start, min(start + 40, count))
            sender.send(b"".join(struct.pack("<I", n).ljust(size, b"\0") for n in numbers))
        path = lab.wait_settled(link, before + count)
        arrived = [struct.unpack_from("<I", packet)[0] for packet in drain(receiver)]
    assert path["offered_packets"] == before + count
    return arrived


def runs_of_losses(arrived: list[int], count: int) -> list[int]:
    """Return the lengths of runs of missing packets."""
    present = set(arrived)
    groups = itertools.groupby(range(count), key=present.__contains__)
    return [len(list(group)) for is_there, group in groups if not is_there]


def internet_checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def test_a_ping_takes_the_configured_round_trip(lab: RunningLab) -> None:
    trips = [PATIENCE_SECONDS]
    with lab.open_socket("a", socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        # Twice 5 ms and 28 bytes at 50 Mbit/s. A machine with other work adds to most of them.
        while min(trips) >= 0.0115:
            sequence = len(trips)
            blank = struct.pack("!BBHHH", 8, 0, 0, 1, sequence)
            echo = struct.pack("!BBHHH", 8, 0, internet_checksum(blank), 1, sequence)
            started = time.perf_counter()
            raw.sendto(echo, (lab.address("b", "clean"), 0))
            while struct.unpack_from("!BxxxxxH", raw.recv(100), 20) != (0, sequence):
                pass
            trips.append(time.perf_counter() - started)
            assert trips[-1] >= 0.010_008


def test_interfaces_send_nothing_by_themselves(lab: RunningLab) -> None:
    with IPRoute(netns=lab.namespace("a"), flags=0) as route:
        found = [address.get("address") for address in route.get_addr(family=socket.AF_INET6)]

    # A link-local address would have solicitations and reports sent from it.
    assert "::1" in found
    assert not [address for address in found if address.startswith("fe80")]
    assert lab.report("clean")["foreign_packets"] == 0


def test_hosts_have_ipv6_too(lab: RunningLab) -> None:
    with (
        create_socket(lab.namespace("b"), socket.AF_INET6, socket.SOCK_DGRAM, flags=0) as receiver,
        create_socket(lab.namespace("a"), socket.AF_INET6, socket.SOCK_DGRAM, flags=0) as sender,
    ):
        receiver.settimeout(PATIENCE_SECONDS)
        receiver.bind((lab.status["hosts"]["b"]["clean"][1], 0))
        sender.sendto(b"six", receiver.getsockname())
        payload, peer = receiver.recvfrom(10)

    assert (payload, peer[0]) == (b"six", lab.status["hosts"]["a"]["clean"][1])


def test_loss_has_its_rate(lab: RunningLab) -> None:
    lost = 30_000 - len(send_numbered(lab, "lossy", count=30_000))

    # Binomial: 300, within five standard deviations of 17.2.
    assert 214 <= lost <= 386


def test_losses_come_packet_by_packet_from_lists_of_segments(lab: RunningLab) -> None:
    count = 20_000
    runs = runs_of_losses(send_numbered(lab, "lossier", count=count), count)

    # Geometric: a tenth of the runs continues at each step. Batches of 40 don't matter.
    assert 1788 <= sum(runs) <= 2212
    lengths = Counter(runs)
    for length, share in ((1, 0.9), (2, 0.09), (3, 0.009)):
        spread = 5 * (len(runs) * share * (1 - share)) ** 0.5
        assert abs(lengths[length] - len(runs) * share) <= spread, lengths
    assert max(runs) <= 8


def test_bursts_have_the_length_of_gilbert_and_elliott(lab: RunningLab) -> None:
    count = 40_000
    runs = runs_of_losses(send_numbered(lab, "bursty", count=count), count)

    # 1/r = 8 on average, some 192 bursts; p/(p+r) = 0.0385 of all packets.
    assert 6 <= statistics.mean(runs) <= 10
    assert 0.028 <= sum(runs) / count <= 0.049


def test_rate_is_kept(lab: RunningLab) -> None:
    seconds = 0.0
    with lab.receiver("b", "slow") as receiver, lab.open_socket("a") as sender:
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sender.connect(receiver.getsockname())
        # 200 packets of 1500 bytes at 10 Mbit/s: 240 ms between first and last. A loaded machine
        # sometimes sends one of those late.
        while not 0.235 < seconds < 0.260:
            for _ in range(201):
                sender.send(bytes(1472))
            stamps = []
            for _ in range(201):
                _, ((_, _, stamp),), _, _ = receiver.recvmsg(1472, 100)
                whole, nanos = struct.unpack("2q", stamp)
                stamps.append(whole * 10**9 + nanos)
            seconds = (stamps[-1] - stamps[0]) / 1e9


@pytest.mark.parametrize("link", ["red", "phantom", "erased"])
def test_marks_reach_the_hosts_that_can_take_them(lab: RunningLab, link: str) -> None:
    before = lab.path(link)
    with lab.receiver("b", link) as receiver, lab.open_socket("a") as sender:
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, ECN_CAPABLE)
        sender.connect(receiver.getsockname())
        for _ in range(100):
            sender.send(bytes(1472))
        after = lab.wait_settled(link, before["offered_packets"] + 100)
        fields = [receiver.recvmsg(1472, 100)[1][0][2][0] for _ in range(100)]

    marked = after["marked_packets"] - before["marked_packets"]
    assert marked > 20
    assert 100 - marked > 5
    arrived = 0 if link == "erased" else marked
    assert fields.count(CONGESTION_EXPERIENCED) == arrived
    assert fields.count(ECN_CAPABLE) == 100 - arrived


@pytest.mark.parametrize(("link", "drops"), [("red", True), ("phantom", False)])
def test_packets_without_ecn_are_dropped_early_or_not(
    lab: RunningLab, link: str, drops: bool
) -> None:
    before = lab.path(link)
    with lab.receiver("b", link) as receiver, lab.open_socket("a") as sender:
        sender.connect(receiver.getsockname())
        for _ in range(100):
            sender.send(bytes(1472))
        after = lab.wait_settled(link, before["offered_packets"] + 100)

    assert after["marked_packets"] == before["marked_packets"]
    assert (after["dropped_early_packets"] > before["dropped_early_packets"]) is drops


def test_a_flow_keeps_its_path_and_flows_use_all(lab: RunningLab) -> None:
    def offered() -> list[int]:
        paths = lab.report("paths")["forward"]["paths"]
        return [path["offered_packets"] for path in paths]

    def settled(count: int) -> list[int]:
        while sum(offered()) < count:
            pass
        return offered()

    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(lab.receiver("b", "paths"))
        senders = [stack.enter_context(lab.open_socket("a")) for _ in range(FLOWS)]
        for sender in senders:
            sender.connect(receiver.getsockname())
            for _ in range(5):
                sender.send(b"x")
        first = settled(FLOWS * 5)
        for sender in senders:
            for _ in range(5):
                sender.send(b"x")
        second = settled(FLOWS * 10)

    # One of four paths misses all flows with a probability of 4e-10.
    assert all(first)
    assert all(count % 5 == 0 for count in first)
    assert second == [2 * count for count in first]


def test_a_link_is_down_exactly_as_scheduled(lab: RunningLab) -> None:
    sent_at: list[float] = []
    received_at: dict[int, float] = {}
    with lab.receiver("b", "broken") as receiver, lab.open_socket("a") as sender:
        receiver.settimeout(0.002)
        sender.connect(receiver.getsockname())
        asked_at = time.monotonic()
        lab.connection.ask("schedule")
        started_at = time.monotonic()
        while not sent_at or sent_at[-1] < started_at + 0.4:
            sent_at.append(time.monotonic())
            sender.send(struct.pack("<I", len(sent_at) - 1))
            # Waiting for arrivals paces the sender.
            with contextlib.suppress(TimeoutError):
                number = struct.unpack("<I", receiver.recv(10))[0]
                received_at[number] = time.monotonic()
        lab.wait_settled("broken", lab.path("broken")["offered_packets"])
        for packet in drain(receiver):
            received_at[struct.unpack("<I", packet)[0]] = time.monotonic()

    # The link was asked to begin after `asked_at` and had begun before `started_at`. The time when
    # a packet reached it isn't known: after it was sent, and at least 5 ms before it was received.
    assert all(at >= asked_at + 0.25 + 0.005 for at in received_at.values())
    assert all(number in received_at for number, at in enumerate(sent_at) if at > started_at + 0.25)
    assert len(received_at) > 0


def test_packets_behind_a_detour_overtake_those_on_it(lab: RunningLab) -> None:
    for _ in range(RUNS):
        order = over_the_detour(lab)
        assert sorted(order) == list(range(len(order)))
        later = list(itertools.accumulate(reversed(order), min))[::-1]
        overtaken = [number for number, least in zip(order, later, strict=True) if least < number]
        if overtaken:
            break
    # In one run there may be none, if the sender paused when the detour ended.
    assert overtaken, f"no packet was overtaken in {RUNS} runs"
    first = min(overtaken)
    assert [number for number in order if number < first] == list(range(first))
    assert [number for number in order if number >= first] == list(range(first, len(order)))


def over_the_detour(lab: RunningLab) -> list[int]:
    """Send numbered packets while the detour ends; return the numbers as they arrive."""
    with lab.receiver("b", "detour") as receiver, lab.open_socket("a") as sender:
        sender.connect(receiver.getsockname())
        lab.connection.ask("schedule")
        end = time.monotonic() + 0.4
        for count in itertools.count():
            if time.monotonic() >= end:
                break
            sender.send(struct.pack("<I", count))
            time.sleep(0.002)
        lab.wait_settled("detour", lab.path("detour")["offered_packets"])
        time.sleep(0.1)
        order = [struct.unpack("<I", packet)[0] for packet in drain(receiver)]
    assert len(order) == count
    return order


def test_corruption_can_pass_the_checksum(lab: RunningLab) -> None:
    with lab.receiver("b", "corrupt") as receiver, lab.open_socket("a") as sender:
        sender.connect(receiver.getsockname())
        sender.send(bytes(100))
        received = receiver.recv(1000)

    assert int.from_bytes(received, "big").bit_count() == 1


@pytest.mark.parametrize("congestion_control", [b"cubic", b"bbr"])
def test_tcp_sends_wire_packets(lab: RunningLab, congestion_control: bytes) -> None:
    payload = hashlib.shake_256(b"payload").digest(3_000_000)
    before = lab.path("clean")
    with (
        lab.open_socket("b", socket.SOCK_STREAM) as listener,
        lab.open_socket("a", socket.SOCK_STREAM) as sender,
    ):
        listener.bind((lab.address("b", "clean"), 0))
        listener.listen()
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control)
        sender.connect(listener.getsockname())
        accepted, _ = listener.accept()
        thread = threading.Thread(target=_send_all, args=[sender, payload])
        started = time.monotonic()
        thread.start()
        with accepted, accepted.makefile("rb") as stream:
            received = stream.read()
        elapsed = time.monotonic() - started
        thread.join()

    assert received == payload
    # 3 MB at 50 Mbit/s take 0.48 s; both find the rate within some round trips of 10 ms.
    assert 0.48 < elapsed < PATIENCE_SECONDS
    after, report = lab.path("clean"), lab.report("clean")
    packets = after["offered_packets"] - before["offered_packets"]
    assert packets >= 3_000_000 / 1448
    assert after["offered_bytes"] - before["offered_bytes"] <= 1500 * packets
    assert (report["oversized_packets"], report["missed_packets"]) == (0, 0)


def _send_all(sender: socket.socket, payload: bytes) -> None:
    sender.sendall(payload)
    sender.shutdown(socket.SHUT_WR)


def test_no_packet_exceeds_the_mtu(lab: RunningLab) -> None:
    with IPRoute(netns=lab.namespace("a"), flags=0) as route:
        (index,) = route.link_lookup(ifname="wide")
        route.link("set", index=index, mtu=2000)
    with lab.receiver("b", "wide") as receiver, lab.open_socket("a") as sender:
        sender.connect(receiver.getsockname())
        sender.send(bytes(1473))
        sender.send(bytes(1472))
        assert len(receiver.recv(2000)) == 1472

    assert lab.report("wide")["oversized_packets"] == 1


def test_packets_that_a_host_has_no_room_for_are_counted(lab: RunningLab) -> None:
    with IPRoute(netns=lab.namespace("b"), flags=0) as route:
        (index,) = route.link_lookup(ifname="narrow")
        route.link("set", index=index, mtu=1280)
    with lab.receiver("b", "narrow") as receiver, lab.open_socket("a") as sender:
        sender.connect(receiver.getsockname())
        sender.send(bytes(1472))
        sender.send(b"short")
        assert receiver.recv(2000) == b"short"

    assert lab.report("narrow")["missed_packets"] == 1


def test_hosts_of_one_side_meet_before_the_link(lab: RunningLab) -> None:
    with lab.receiver("c", "sided") as receiver, lab.open_socket("a") as sender:
        sender.connect(receiver.getsockname())
        sender.send(b"near")
        assert receiver.recv(10) == b"near"

    report = lab.report("sided")
    assert (report["local_packets"], report["forward"]["paths"][0]["offered_packets"]) == (1, 0)


def _access_offered(lab: RunningLab) -> dict[str, int]:
    """Return the packets offered to the access links from a and b, and to c."""
    a, c, b = lab.report("access")["access"]
    offered = {"a": a["up"], "b": b["up"], "c": c["down"]}
    return {host: counters["offered_packets"] for host, counters in offered.items()}


def test_near_and_far_packets_meet_at_an_access_link(lab: RunningLab) -> None:
    before, first = _access_offered(lab), lab.report("access")
    with lab.receiver("c", "access") as receiver, contextlib.ExitStack() as stack:
        senders = [stack.enter_context(lab.open_socket(host)) for host in ("a", "b")]
        for sender in senders:
            sender.connect(receiver.getsockname())
            for _ in range(15):
                sender.send(bytes(1472))
        for _ in range(30):
            assert len(receiver.recv(1500)) == 1472
    after, last = _access_offered(lab), lab.report("access")
    assert {host: after[host] - before[host] for host in after} == {"a": 15, "b": 15, "c": 30}
    # In the order of the ports: a, c, b.
    arrived = [report["access"][1]["arrived_bytes"] for report in (first, last)]
    grown = [later - earlier for earlier, later in zip(*arrived, strict=True)]
    assert grown == [15 * 1500, 0, 15 * 1500]

    def crossed(direction: str) -> int:
        grown = [report[direction]["paths"][0]["offered_packets"] for report in (first, last)]
        return grown[1] - grown[0]

    assert (crossed("forward"), crossed("backward"), last["local_packets"]) == (0, 15, 0)


def test_a_far_packet_takes_the_time_of_both_access_links_and_the_path(lab: RunningLab) -> None:
    with lab.receiver("b", "access") as receiver, lab.open_socket("a") as sender:
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sender.connect(receiver.getsockname())
        sent = time.time()
        sender.send(bytes(1472))
        _, ((_, _, stamp),), _, _ = receiver.recvmsg(1472, 100)
    whole, nanos = struct.unpack("2q", stamp)
    # 1.2 and 1 ms on each access link, 0.06 and 5 ms on the path.
    assert whole + nanos / 1e9 - sent > 0.00945
