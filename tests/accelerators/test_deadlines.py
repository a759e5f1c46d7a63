"""How long a card may take to answer, whatever signals the daemon gets meanwhile."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import short_directory
from sealane import _native


@pytest.fixture
def silent() -> Iterator[Path]:
    """Return the socket of a card that takes connections and never answers."""
    with short_directory() as root:
        path = root / "card"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as card:
            card.bind(str(path))
            card.listen(0)
            yield path


@pytest.fixture
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


def failure(path: Path) -> tuple[float, OSError]:
    """Connect while signals arrive; return how long it took, and the error."""
    outcome: list[OSError] = []

    def connect() -> None:
        try:
            _native.Accelerator(str(path))
        except OSError as error:
            outcome.append(error)

    began = time.monotonic()
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    while asking.is_alive() and time.monotonic() < began + 8:
        assert asking.ident is not None
        signal.pthread_kill(asking.ident, signal.SIGUSR1)
        asking.join(0.2)
    took = time.monotonic() - began
    assert outcome, "still waiting"
    return took, outcome[0]


@pytest.mark.usefixtures("_handled")
def test_signals_do_not_extend_the_time_that_a_card_has_for_an_answer(silent: Path) -> None:
    took, error = failure(silent)
    assert "the card did not answer within 1 s" in str(error)
    assert 0.9 < took < 4


@pytest.mark.usefixtures("_handled")
def test_signals_do_not_end_or_extend_the_time_to_connect(silent: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        # It takes the only place that the card has for a connection.
        first.connect(str(silent))
        took, error = failure(silent)
    assert "the card did not answer within 1 s" in str(error)
    assert 0.9 < took < 4
