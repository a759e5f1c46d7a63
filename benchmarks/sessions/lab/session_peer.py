"""Jobs of two fabrics that exchange messages: `receive PART` or `send PART`; PART is JSON.

As users do: through the client, with `Auto()` and without telling the fabrics anything of the path.
The receiver listens for sessions 0, 1, 2 and so on, some at a time; the sender opens them in turn.
"""

import contextlib
import itertools
import json
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.sessions.lab.daemons import FAR, NEAR
from benchmarks.sessions.lab.jobs import SECONDS_MAX, Job, do, jobs

from sealane.client import sync
from sealane.client.messages import Auto
from sealane.errors import Error, SessionError

SLOTS: Final = 8
"""The most receives that are posted at a time."""
LISTENERS: Final = 4


class End:
    """The sending end of a session."""

    def __init__(self, session: sync.Session, message_bytes: int) -> None:
        self._session = session
        self._message = session.empty(message_bytes, "uint8")

    def send(self) -> None:
        """Send a message and wait until it is acknowledged."""
        try:
            operation = self._session.post_send(self._message, reliability=Auto())
            operation.wait(timeout_seconds=SECONDS_MAX)
        except SessionError as error:
            raise ConnectionError(str(error)) from error


def serve(session: sync.Session, message_bytes: int, count: int) -> None:
    """Receive until the session ends, with `count` receives posted at a time."""
    slots = [session.empty(message_bytes, "uint8") for _ in range(count)]
    with contextlib.suppress(SessionError):
        posted = deque((session.post_receive(slot), slot) for slot in slots)
        while True:
            operation, slot = posted.popleft()
            operation.wait()
            posted.append((session.post_receive(slot), slot))


def receive(part: dict[str, Any]) -> None:
    """Listen for sessions until the process is killed."""

    def listen(client: sync.Client, first: int) -> None:
        for number in itertools.count(first, LISTENERS):
            with client.listen_session(
                str(number), region_bytes=part["region_bytes"], peer_nodes=[NEAR], early=True
            ) as session:
                serve(session, part["message_bytes"], part["slots"])

    with sync.connect(part["socket"]) as client:
        threads = [
            threading.Thread(target=listen, args=(client, first)) for first in range(LISTENERS)
        ]
        for thread in threads:
            thread.start()
        print("listening", flush=True)
        for thread in threads:
            thread.join()


def send(part: dict[str, Any]) -> None:
    """Run the jobs on standard input."""
    numbers = itertools.count()
    with sync.connect(part["socket"]) as client:

        @contextlib.contextmanager
        def open_session(message_bytes: int, *, early: bool) -> Iterator[End]:
            opening = client.open_session(
                str(next(numbers)),
                region_bytes=part["region_bytes"],
                peer_node=FAR,
                peer_address=part["peer_address"],
                rate_bits_per_second=part["rate_bits_per_second"],
                wait_seconds=SECONDS_MAX,
                early=early,
            )
            with contextlib.ExitStack() as stack:
                try:
                    session = stack.enter_context(opening)
                except Error as error:
                    raise ConnectionError(str(error)) from error
                yield End(session, message_bytes)

        for job in jobs():

            def connect(job: Job = job) -> contextlib.AbstractContextManager[End]:
                return open_session(job.bytes, early=job.connection == "cold")

            do(job, connect, End.send)


if __name__ == "__main__":
    (receive if sys.argv[1] == "receive" else send)(json.loads(sys.argv[2]))
