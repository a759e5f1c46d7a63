"""Relays between two ends of a session: an emulated link, a forger, a changing route."""

import contextlib
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator

from sealane._native import Emulator, LinkSettings


@contextlib.contextmanager
def emulator(to: str, *, loss_ppb: int = 10_000_000, reorder_ppb: int = 0) -> Iterator[str]:
    """Relay at 400 Mbit/s and 6 ms; reordered packets arrive up to 3 ms late."""
    settings = LinkSettings(
        rate_bits_per_second=400_000_000,
        delay_nanos=3_000_000,
        buffer_bytes=1 << 24,
        loss_parts_per_billion=loss_ppb,
        reorder_parts_per_billion=reorder_ppb,
        reorder_nanos_max=3_000_000,
    )
    link = Emulator.relay([settings], [settings], seed=5, forward_to=to)
    try:
        yield link.address or ""
    finally:
        link.stop()


@contextlib.contextmanager
def phantom_queue(to: str) -> Iterator[str]:
    """Relay at 50 Mbit/s and 6 ms that marks by a phantom queue."""
    rate, cap = 50_000_000, 1 << 19
    settings = LinkSettings(
        rate_bits_per_second=rate,
        delay_nanos=3_000_000,
        buffer_bytes=rate // 80,
        phantom=(952_380_952, cap, cap // 50, cap // 5 * 3, 10**9),
    )
    link = Emulator.relay([settings], [settings], seed=5, forward_to=to)
    try:
        yield link.address or ""
    finally:
        link.stop()


@contextlib.contextmanager
def forger(to: str) -> Iterator[str]:
    """A relay that sends a forged copy before, and a replay after, each packet.

    The responder gets them also from another address, to which it must not answer.
    """
    host, port = to.rsplit(":", 1)
    generator = random.Random(11)
    near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    wake, stop = socket.socketpair()
    with near, far, stranger, wake, stop:
        near.bind(("127.0.0.1", 0))
        far.connect((host, int(port)))
        stranger.connect((host, int(port)))

        def run() -> None:
            client = None
            while True:
                ready, _, _ = select.select([near, far, wake], [], [])
                if wake in ready:
                    return
                for end in ready:
                    packet, sender = end.recvfrom(65_536)
                    forged = bytearray(packet)
                    forged[generator.randrange(len(forged))] ^= 1 << generator.randrange(8)
                    if end is near:
                        client = sender
                        for way, copy in (
                            (stranger, forged),
                            (far, forged),
                            (far, packet),
                            (far, packet),
                            (stranger, packet),
                        ):
                            way.send(copy)
                    elif client is not None:
                        for copy in (forged, packet, packet):
                            near.sendto(copy, client)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{near.getsockname()[1]}"
        finally:
            stop.send(b"x")
            thread.join()


@contextlib.contextmanager
def switch() -> Iterator[
    tuple[Callable[[str], contextlib.AbstractContextManager[str]], Callable[[], None]]
]:
    """Return a relay that sends from one of two addresses, and a function to switch them."""
    ways = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]

    @contextlib.contextmanager
    def lay(to: str) -> Iterator[str]:
        host, port = to.rsplit(":", 1)
        near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        wake, stop = socket.socketpair()
        with near, wake, stop:
            near.bind(("127.0.0.1", 0))
            for way in ways:
                way.connect((host, int(port)))
            client = None

            def run() -> None:
                nonlocal client
                while True:
                    ready, _, _ = select.select([near, wake, *ways], [], [])
                    if wake in ready:
                        return
                    for end in ready:
                        packet, sender = end.recvfrom(65_536)
                        if end is near:
                            client = sender
                            ways[0].send(packet)
                        elif client is not None:
                            near.sendto(packet, client)

            thread = threading.Thread(target=run)
            thread.start()
            try:
                yield f"127.0.0.1:{near.getsockname()[1]}"
            finally:
                stop.send(b"x")
                thread.join()

    with ways[0], ways[1]:
        yield lay, ways.reverse
