"""One end of a measured session, as a process: `python -m benchmarks.sessions.peer`.

Reads its parameters as a line of JSON, prints its data address, reads the peer's, moves the bytes
and prints the times. Worker and job both run in this process, so its processor time includes both;
the time of the job, which is this thread, is also reported separately.
"""

import json
import select
import sys
import time
from collections.abc import Iterator
from typing import Final

from sealane._native import JobRing, SessionEndpoint, SharedRegion

MESSAGE_BYTES: Final = 1 << 18
SLOTS: Final = 8
IDLE_NANOS: Final = 10_000_000_000


def _end(part: dict[str, object]) -> tuple[SessionEndpoint, JobRing]:
    endpoint = SessionEndpoint(
        [f"{part['address']}:0"],
        SharedRegion(MESSAGE_BYTES * SLOTS),
        unit_bytes=int(str(part["unit_bytes"])),
        slots=SLOTS,
    )
    return endpoint, JobRing(*endpoint.take_job_fds())


def _start(endpoint: SessionEndpoint, part: dict[str, object], peer: str) -> None:
    is_sender = bool(part["is_sender"])
    forward, backward = bytearray([1] * 32), bytearray([2] * 32)
    endpoint.start(
        peer_addresses=[peer],
        connection_id_local=1 if is_sender else 2,
        connection_id_peer=2 if is_sender else 1,
        send_key=forward if is_sender else backward,
        receive_key=backward if is_sender else forward,
        rate_bits_per_second=int(str(part["rate_bits_per_second"])),
        idle_timeout_ns=IDLE_NANOS,
        initiator=is_sender,
        version=6,
    )
    poller = select.poll()
    poller.register(endpoint.fileno(), select.POLLIN)
    while (state := endpoint.state())[0] != "established":
        if state[0] == "closed":
            sys.exit(f"closed: {state[1]}")
        poller.poll(100)


def _completed(ring: JobRing) -> Iterator[int]:
    poller = select.poll()
    poller.register(ring.fileno(), select.POLLIN)
    while True:
        found = ring.completions()
        for completion in found:
            if completion.status != "ok":
                sys.exit(f"{completion.kind} {completion.message}: {completion.status}")
            yield completion.user_data
        if not found:
            poller.poll()


def main() -> int:
    """Move the bytes and print the times."""
    part = json.loads(sys.stdin.readline())
    endpoint, ring = _end(part)
    print(endpoint.local_addresses[0], flush=True)
    _start(endpoint, part, sys.stdin.readline().strip())
    count = part["bytes"] // MESSAGE_BYTES

    def post(index: int) -> None:
        offset = index % SLOTS * MESSAGE_BYTES
        if part["is_sender"]:
            ring.post_send(offset=offset, length=MESSAGE_BYTES, user_data=index)
        else:
            ring.post_receive(offset=offset, length=MESSAGE_BYTES, user_data=index)

    started, processor, job = time.perf_counter(), time.process_time(), time.thread_time()
    for index in range(min(SLOTS, count)):
        post(index)
    for done, completed in enumerate(_completed(ring), start=1):
        if done == 1 and not part["is_sender"]:
            started, processor, job = time.perf_counter(), time.process_time(), time.thread_time()
        if completed + SLOTS < count:
            post(completed + SLOTS)
        if done == count:
            break
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    job = time.thread_time() - job
    # The peer may still wait for the last acknowledgement.
    print(
        json.dumps(
            {
                "bytes": count * MESSAGE_BYTES,
                "seconds": seconds,
                "processor_seconds": processor,
                "job_seconds": job,
                "statistics": endpoint.statistics(),
            }
        ),
        flush=True,
    )
    sys.stdin.readline()
    endpoint.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
