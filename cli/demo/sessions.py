"""The demo's long haul: the input over the emulated link, then timed messages one by one."""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

import sealane.client
from sealane.cli.demo.cluster import Cluster
from sealane.cli.demo.link import LinkParameters, linked
from sealane.cli.demo.results import SessionRun
from sealane.cli.demo.source import Source
from sealane.client.grants import listen_session, open_session
from sealane.client.messages import ErasureCoded, Received, Reliability, SelectiveRepeat
from sealane.client.session import Session
from sealane.daemon.config import UNIT_BYTES
from sealane.errors import UnavailableError
from sealane.planning import model
from sealane.planning.packet import PACKET_OVERHEAD_BYTES
from sealane.protocol.v1 import sessions_pb2

MESSAGE_BYTES: Final = 1 << 20
# Messages in flight: several times the link's bandwidth-delay product of 625 kB.
SENDS_AHEAD: Final = 8
RECEIVES_AHEAD: Final = 16
MODEL_SAMPLES: Final = 20_000
LISTEN_POLL_SECONDS: Final = 0.02
LISTEN_SECONDS: Final = 60.0

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The sending job's measurements."""

    transfer_seconds: float
    completion_seconds: tuple[float, ...]
    statistics: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Haul:
    """One transfer: the daemons, the input, the link and the scheme."""

    cluster: Cluster
    source: Source
    link: LinkParameters
    reliability: Reliability
    messages: int
    seed: int

    @property
    def display_name(self) -> str:
        """The session's name at both fabrics."""
        return f"demo {scheme_name(self.reliability)}"

    @property
    def input_messages(self) -> int:
        """Messages that carry the input; the last one may be short."""
        return -(-self.source.size_bytes // MESSAGE_BYTES)


def scheme_name(reliability: Reliability) -> str:
    """Return a scheme's name for people."""
    if isinstance(reliability, ErasureCoded):
        return f"erasure coded ({reliability.k}, {reliability.m})"
    return "selective repeat"


async def run_haul(haul: Haul, advance: Advance) -> SessionRun:
    """Carry the input and the timed messages; call `advance` as messages are acknowledged."""
    near_socket, far_socket = haul.cluster.fabric_near.socket, haul.cluster.fabric_far.socket
    async with (
        sealane.client.connect(str(near_socket)) as near,
        sealane.client.connect(str(far_socket)) as far,
        asyncio.TaskGroup() as tasks,
    ):
        receiving = tasks.create_task(receive_all(haul, far), name="demo-receiver")
        far_address = await listening_address(haul.display_name, far)
        async with (
            linked(haul.link, forward_to=far_address, seed=haul.seed) as link,
            open_session(
                near.sessions,
                haul.display_name,
                region_bytes=SENDS_AHEAD * MESSAGE_BYTES,
                peer_node=haul.cluster.fabric_far.name,
                peer_address=haul.cluster.fabric_far.addresses["fabric_control"],
                rate_bits_per_second=haul.link.rate_bits_per_second,
                via_addresses=[link.address],
            ) as session,
        ):
            sent = await send_all(haul, session, advance)
            sha256_received, received = await receiving
            lost_packets = await link.lost_packets()
    return make_run(haul, sent, sha256_received, received, lost_packets)


async def send_all(haul: Haul, session: Session, advance: Advance) -> Sent:
    """Send the input with several messages in flight, then the timed messages one by one."""
    started = asyncio.get_running_loop().time()
    await send_input(haul, session, advance)
    transfer_seconds = asyncio.get_running_loop().time() - started
    durations = []
    for _ in range(haul.messages):
        sent = await session.send(offset=0, length=MESSAGE_BYTES, reliability=haul.reliability)
        durations.append(sent.duration_seconds)
        advance(1)
    return Sent(
        transfer_seconds=transfer_seconds,
        completion_seconds=tuple(durations),
        statistics=session.statistics(),
    )


async def send_input(haul: Haul, session: Session, advance: Advance) -> None:
    """Send the input; a slot of the region is reused once its message is acknowledged."""
    ahead: deque[asyncio.Task[object]] = deque()
    with haul.source.path.open("rb") as file:
        async with asyncio.TaskGroup() as tasks:
            for number in range(haul.input_messages):
                if len(ahead) == SENDS_AHEAD:
                    await ahead.popleft()
                    advance(1)
                offset = number % SENDS_AHEAD * MESSAGE_BYTES
                # The region is memory shared with the fabric: the file is read straight into it.
                length = file.readinto(session.region[offset : offset + MESSAGE_BYTES])
                send = session.send(offset=offset, length=length, reliability=haul.reliability)
                ahead.append(tasks.create_task(send))
    advance(len(ahead))


async def receive_all(haul: Haul, far: sealane.client.Client) -> tuple[str, dict[str, int]]:
    """Receive every message; return the input's SHA-256 and the receiver's statistics."""
    region_bytes = RECEIVES_AHEAD * MESSAGE_BYTES
    async with listen_session(
        far.sessions, haul.display_name, region_bytes=region_bytes
    ) as session:
        receiver = Receiver(session, haul.input_messages)
        async with asyncio.TaskGroup() as tasks:
            for number in range(haul.input_messages + haul.messages):
                if len(receiver.ahead) == RECEIVES_AHEAD:
                    await receiver.take()
                offset = number % RECEIVES_AHEAD * MESSAGE_BYTES
                receive = session.receive(offset=offset, length=MESSAGE_BYTES)
                receiver.ahead.append(tasks.create_task(receive))
            while receiver.ahead:
                await receiver.take()
        return receiver.digest.hexdigest(), session.statistics()


class Receiver:
    """Receives posted ahead and taken in order; hashes the messages that carry the input."""

    def __init__(self, session: Session, input_messages: int) -> None:
        self._session = session
        self._input_left = input_messages
        self.ahead: deque[asyncio.Task[Received]] = deque()
        self.digest = hashlib.sha256()

    async def take(self) -> None:
        """Wait for the oldest receive; its part of the region is free afterwards."""
        received = await self.ahead.popleft()
        if self._input_left > 0:
            self._input_left -= 1
            end = received.offset + received.length
            self.digest.update(self._session.region[received.offset : end])


async def listening_address(display_name: str, far: sealane.client.Client) -> str:
    """Wait until a fabric listens for the session; return its data address.

    UnavailableError `demo.session.listen` after LISTEN_SECONDS.
    """
    deadline = asyncio.get_running_loop().time() + LISTEN_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        page = await far.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
        for session in page.sessions:
            is_listening = session.state == sessions_pb2.Session.LISTENING
            if is_listening and session.display_name == display_name:
                return str(session.data_addresses[0])
        await asyncio.sleep(LISTEN_POLL_SECONDS)
    raise UnavailableError(
        "demo.session.listen",
        f"the far fabric does not listen for session {display_name!r} after {LISTEN_SECONDS:.0f} s",
    )


def link_path(link: LinkParameters) -> model.Path:
    """Return the link as a path of the model."""
    return model.Path(
        rate_bits_per_second=link.rate_bits_per_second,
        round_trip_seconds=link.rtt_seconds,
        loss=model.Loss(rate=link.loss),
        unit_bytes=UNIT_BYTES,
        overhead_bytes=PACKET_OVERHEAD_BYTES,
    )


def make_run(
    haul: Haul,
    sent: Sent,
    sha256_received: str,
    received: dict[str, int],
    link_packets_lost: int,
) -> SessionRun:
    """Return the measurements together with the model's predictions."""
    path = link_path(haul.link)
    scheme: model.Scheme = model.SelectiveRepeat()
    if isinstance(haul.reliability, ErasureCoded):
        scheme = model.ErasureCoded(k=haul.reliability.k, m=haul.reliability.m)
    random = np.random.default_rng(haul.seed)
    samples = model.sample(path, MESSAGE_BYTES, scheme, MODEL_SAMPLES, random)
    return SessionRun(
        scheme=scheme_name(haul.reliability),
        input_bytes=haul.source.size_bytes,
        transfer_seconds=sent.transfer_seconds,
        sha256_sent=haul.source.sha256,
        sha256_received=sha256_received,
        message_bytes=MESSAGE_BYTES,
        completion_seconds=sent.completion_seconds,
        model_seconds=tuple(samples.tolist()),
        ideal_seconds=model.ideal(path, MESSAGE_BYTES),
        packets_sent=sent.statistics["packets_sent"],
        packets_retransmitted=sent.statistics["retransmitted_packets"],
        packets_parity=sent.statistics["parity_packets_sent"],
        units_decoded=received["decoded_units"],
        link_packets_lost=link_packets_lost,
    )


SCHEMES: Final[tuple[Reliability, ...]] = (SelectiveRepeat(), ErasureCoded(k=32, m=8))
