"""Messages over sessions: `receive PART` or `send PART ADDRESS`; PART is a JSON object.

Sessions are opened over an existing TCP connection, as daemons do: one round trip to exchange
addresses and lengths; then the session validates its path and is established.
"""

import contextlib
import json
import select
import socket
import sys
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.sessions.lab.jobs import SECONDS_MAX, Job, do, jobs

from sealane._native import JobRing, SessionEndpoint

SLOTS: Final = 8
IDLE_NANOS: Final = 30_000_000_000
LINE_BYTES_MAX: Final = 256


class End:
    """One end of one session."""

    def __init__(self, part: dict[str, Any], message_bytes: int) -> None:
        self._part = part
        self.message_bytes = message_bytes
        self.endpoint = SessionEndpoint(
            [f"{part['address']}:0"],
            message_bytes * SLOTS,
            unit_bytes=part["unit_bytes"],
            slots=SLOTS,
        )
        self.ring = JobRing(*self.endpoint.take_job_fds())
        self._poller = select.poll()
        self._poller.register(self.ring.fileno(), select.POLLIN)

    def start(self, peer: str) -> None:
        """Start to establish the session."""
        is_sender = self._part["is_sender"]
        forward, backward = bytearray([1] * 32), bytearray([2] * 32)
        self.endpoint.start(
            peer_addresses=[peer],
            connection_id_local=1 if is_sender else 2,
            connection_id_peer=2 if is_sender else 1,
            send_key=forward if is_sender else backward,
            receive_key=backward if is_sender else forward,
            rate_bits_per_second=self._part["rate_bits_per_second"],
            idle_timeout_ns=IDLE_NANOS,
            initiator=is_sender,
        )
        if rows := self._part["plan"]:
            self.endpoint.install_plan([tuple(row) for row in rows])

    def send(self) -> None:
        """Send a message and wait until it is acknowledged."""
        self.ring.post_send(offset=0, length=self.message_bytes, user_data=0, auto=True)
        while not (found := self.ring.completions()):
            if not self._poller.poll(SECONDS_MAX * 1000):
                raise TimeoutError
        if found[0].status != "ok":
            raise ConnectionError(found[0].status)

    def receive(self, index: int) -> None:
        """Post a receive."""
        offset = index % SLOTS * self.message_bytes
        self.ring.post_receive(offset=offset, length=self.message_bytes, user_data=index)

    def close(self) -> None:
        """End the session and release its resources."""
        self.endpoint.close()
        self.ring.close()


def _serve(end: End, control: socket.socket) -> str:
    """Receive until the peer sends a request or disconnects; return the request, or ''."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(end.ring.fileno(), select.POLLIN)
    for index in range(SLOTS):
        end.receive(index)
    while True:
        ready = [number for number, _ in poller.poll()]
        if control.fileno() in ready:
            return control.recv(LINE_BYTES_MAX).decode()
        try:
            found = end.ring.completions()
        except BrokenPipeError:
            poller.unregister(end.ring.fileno())
            continue
        for completion in found:
            if completion.status == "ok":
                end.receive(completion.user_data)


def receive(part: dict[str, Any]) -> None:
    """Open a session for each request."""
    with socket.create_server((part["address"], 0)) as server:
        print("{}:{}".format(*server.getsockname()), flush=True)
        control, _ = server.accept()
    with control:
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = control.recv(LINE_BYTES_MAX).decode()
        while request:
            length, peer = request.split()
            end = End(part, int(length))
            end.start(peer)
            control.sendall(end.endpoint.local_addresses[0].encode())
            request = _serve(end, control)
            end.close()


@contextlib.contextmanager
def _session(part: dict[str, Any], control: socket.socket, job: Job) -> Iterator[End]:
    end = End(part, job.bytes)
    try:
        control.sendall(f"{job.bytes} {end.endpoint.local_addresses[0]}".encode())
        end.start(control.recv(LINE_BYTES_MAX).decode())
        yield end
    finally:
        end.close()


def send(part: dict[str, Any], address: str) -> None:
    """Run the jobs on standard input."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as control:
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for job in jobs():

            def open_session(job: Job = job) -> contextlib.AbstractContextManager[End]:
                return _session(part, control, job)

            do(job, open_session, End.send)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(json.loads(sys.argv[2]))
    else:
        send(json.loads(sys.argv[2]), sys.argv[3])
