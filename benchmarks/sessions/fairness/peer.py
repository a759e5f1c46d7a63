"""Jobs of two fabrics: `receive PART`, `share PART` or `overtake PART`; PART is JSON.

The receiver takes any number of sessions and posts receives as their names say. `share` sends
messages back to back on several sessions and prints the bytes of each. `overtake` sends short
messages behind a long one and prints how long each took.
"""

import json
import sys
import threading
import time
from collections import deque
from typing import Any, Final

from benchmarks.sessions.lab.daemons import FAR

from sealane.client import sync
from sealane.client.operations import SendOperation
from sealane.errors import Error, SessionError

NAME: Final = "fairness"
SHORT: Final = 1024
WAIT_SECONDS: Final = 60.0
IN_FLIGHT: Final = 4
GAP_SECONDS: Final = 0.02


def receive(part: dict[str, Any]) -> None:
    """Take sessions until the process is killed; each is told its messages by the first one."""

    def serve(session: sync.Session) -> None:
        try:
            order = session.empty(1 << 12, "uint8")
            told = session.receive(order)
            sizes: list[int] = json.loads(bytes(memoryview(order))[: told.length])
            slots = deque(session.empty(size, "uint8") for size in sizes)
            posted = deque((session.post_receive(slot), slot) for slot in slots)
            while True:
                operation, slot = posted.popleft()
                operation.wait()
                posted.append((session.post_receive(slot), slot))
        except Error:
            session.close()  # the sender has left

    with (
        sync.connect(part["socket"]) as client,
        client.listen_sessions(NAME, region_bytes=part["region_bytes"], backlog=2) as listener,
    ):
        print("listening", flush=True)
        while True:
            threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()


class Sender:
    """A session of the sending job."""

    def __init__(self, client: sync.Client, part: dict[str, Any], sizes: list[int]) -> None:
        self._opened = client.open_session(
            NAME,
            region_bytes=part["region_bytes"],
            peer_node=FAR,
            peer_address=part["peer_address"],
            rate_bits_per_second=part["rate_bits_per_second"],
            wait_seconds=WAIT_SECONDS,
        )
        # It stays open until the process ends.
        self.session = self._opened.__enter__()
        order = self.session.empty(1 << 12, "uint8")
        text = json.dumps(sizes).encode()
        memoryview(order)[: len(text)] = text
        self.session.send(memoryview(order)[: len(text)])
        self.messages = {size: self.session.empty(size, "uint8") for size in set(sizes)}

    def post(self, size: int, priority: int = 0) -> SendOperation:
        """Post a message of this size."""
        return self.session.post_send(self.messages[size], priority=priority)


def share(client: sync.Client, part: dict[str, Any]) -> dict[str, Any]:
    """Send on all sessions at once, from one time to another; return the bytes that arrived."""
    size = part["message_bytes"]
    senders = [Sender(client, part, [size] * IN_FLIGHT) for _ in range(part["sessions"])]
    print("ready", flush=True)
    sys.stdin.readline()
    arrived = [0] * len(senders)
    begin = time.monotonic() + part["settle_seconds"]
    end = begin + part["seconds"]

    def send(number: int) -> None:
        posted: deque[Any] = deque(senders[number].post(size) for _ in range(IN_FLIGHT))
        while time.monotonic() < end:
            posted.popleft().wait(timeout_seconds=WAIT_SECONDS)
            arrived[number] += size if begin <= time.monotonic() < end else 0
            posted.append(senders[number].post(size))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(senders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"bytes": arrived}


def overtake(client: sync.Client, part: dict[str, Any]) -> dict[str, Any]:
    """Send short messages while long ones are under way; return the seconds that each took."""
    long, count, priority = part["message_bytes"], part["count"], part["priority"]
    is_behind = part["where"] == "same session"
    bulk = Sender(client, part, [long] + [SHORT] * count * is_behind)
    short = bulk if is_behind else Sender(client, part, [SHORT] * count)
    seconds: list[float] = []
    for _ in range(part["repeats"]):
        under_way = bulk.post(long) if part["where"] != "alone" else None
        time.sleep(0.3)
        for _ in range(count):
            started = time.perf_counter()
            short.post(SHORT, priority).wait(timeout_seconds=WAIT_SECONDS)
            seconds.append(time.perf_counter() - started)
            time.sleep(GAP_SECONDS)
        if under_way is not None:
            is_late = under_way.done()
            under_way.wait(timeout_seconds=WAIT_SECONDS)
            if is_late and priority:
                raise SystemExit("the long message ended before the short ones")
    return {"seconds": seconds}


def main() -> None:
    """Run one job."""
    what, part = sys.argv[1], json.loads(sys.argv[2])
    if what == "receive":
        receive(part)
        return
    with sync.connect(part["socket"]) as client:
        try:
            found = (share if what == "share" else overtake)(client, part)
        except SessionError as error:
            raise SystemExit(str(error)) from error
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
