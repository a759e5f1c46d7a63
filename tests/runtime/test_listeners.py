"""Listeners that the service manager holds: adopted if they are the configured ones, else ended."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sealane.daemon.runtime import listeners
from sealane.daemon.runtime.listeners import Listeners, listen_tcp, take_passed
from sealane.daemon.runtime.notify import Notifier
from service_manager import ServiceManager

KEY = "target.listen"
HOST = "127.0.0.1"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    made = ServiceManager(tmp_path)
    yield made
    made.close()


def held_by(manager: ServiceManager, *passed: tuple[str, int]) -> Listeners:
    return Listeners(Notifier({"NOTIFY_SOCKET": manager.address}), passed)


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def test_listener_is_stored_once_and_adopted_by_the_next_process(manager: ServiceManager) -> None:
    with held_by(manager).named(KEY)(HOST, 0) as first:
        port = first.getsockname()[1]
        before = inode(first.fileno())
    ((name, number),) = manager.stored()
    assert (name, inode(number)) == (KEY, before)
    # Nobody serves it now, and nobody is refused.
    with socket.create_connection((HOST, port)) as waiting:
        passed = held_by(manager, (KEY, os.dup(number)))
        with passed.named(KEY)(HOST, port) as second, capture_logs() as logs:
            passed.end_unclaimed()
            assert inode(second.fileno()) == before
            assert not second.getblocking()
            accepted, _ = second.accept()
            with accepted:
                assert accepted.getpeername() == waiting.getsockname()
    assert manager.names == [KEY]
    assert [each for each in manager.messages if "FDSTORE" in each] == [f"FDSTORE=1\nFDNAME={KEY}"]
    assert not logs


@pytest.mark.parametrize(
    ("host", "written"),
    [("::1", "0:0::1"), ("127.0.0.1", "127.0.0.1"), ("::", "0::0"), ("0.0.0.0", "0.0.0.0")],  # noqa: S104
)
def test_an_address_is_compared_by_value(manager: ServiceManager, host: str, written: str) -> None:
    with listen_tcp(host, 0) as given:
        port, before = given.getsockname()[1], inode(given.fileno())
        passed = held_by(manager, (KEY, os.dup(given.fileno())))
    with passed.named(KEY)(written, port) as adopted:
        assert inode(adopted.fileno()) == before


def bound(
    family: int, kind: int, host: str = HOST, *, port: int = 0, protocol: int = 0
) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, port))
    return made


def connected(_port: int) -> socket.socket:
    with listen_tcp(HOST, 0) as to:
        return socket.create_connection(to.getsockname())


def shared(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((HOST, port))
    made.listen()
    return made


def several_paths(port: int) -> socket.socket:
    try:
        made = bound(socket.AF_INET, socket.SOCK_STREAM, port=port, protocol=socket.IPPROTO_MPTCP)
    except OSError:
        pytest.skip("the kernel has no MPTCP")
    made.listen()
    return made


def local(_port: int) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(b"")  # the kernel chooses a name
    made.listen()
    return made


WRONG: dict[str, tuple[Callable[[int], socket.socket], str]] = {
    "UDP": (lambda port: bound(socket.AF_INET, socket.SOCK_DGRAM, port=port), "not a TCP socket"),
    "MPTCP": (several_paths, "not a TCP socket"),
    "Unix": (local, "of another address family"),
    "IPv6": (lambda _: listen_tcp("::1", 0), "of another address family"),
    "silent": (
        lambda port: bound(socket.AF_INET, socket.SOCK_STREAM, port=port),
        "not listening",
    ),
    "connected": (connected, "not listening"),
    "shared": (shared, "shared by SO_REUSEPORT"),
    "elsewhere": (lambda _: listen_tcp("127.0.0.2", 0), "bound to 127.0.0.2:"),
    "another port": (lambda _: listen_tcp(HOST, 0), f"bound to {HOST}:"),
    "everywhere": (lambda port: listen_tcp("0.0.0.0", port), "bound to 0.0.0.0:"),  # noqa: S104
}


def free_port() -> int:
    with listen_tcp(HOST, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_not_the_configured_listener_is_refused_and_ended(
    manager: ServiceManager, fault: str
) -> None:
    make, expected = WRONG[fault]
    port = free_port()
    given = make(port)
    manager.add(KEY, os.dup(given.fileno()))
    before = inode(given.fileno())
    passed = held_by(manager, (KEY, given.detach()))
    with capture_logs() as logs, passed.named(KEY)(HOST, port) as listening:
        passed.end_unclaimed()
        (line,) = logs
        assert (line["event"], line["reason"]) == ("listener_refused", "listen.passed")
        assert expected in line["message"]
        # The configured address is served, by a listener of our own, which alone is stored now.
        assert listening.getsockname() == (HOST, port)
        ((name, stored),) = manager.stored()
        assert (name, inode(stored)) == (KEY, inode(listening.fileno()))
        assert inode(stored) != before


def test_a_file_is_no_listener(manager: ServiceManager) -> None:
    with tempfile.TemporaryFile() as file:
        passed = held_by(manager, (KEY, os.dup(file.fileno())))
    with capture_logs() as logs, passed.named(KEY)(HOST, 0):
        (line,) = logs
        assert "not a socket" in line["message"]


def test_a_refused_listener_serves_nobody(manager: ServiceManager) -> None:
    given = listen_tcp(HOST, 0)
    address = given.getsockname()
    # The store holds it, too, until it has read our message.
    with socket.socket(fileno=os.dup(given.fileno())):
        passed = held_by(manager, (KEY, given.detach()))
        with passed.named(KEY)(HOST, free_port()), pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_one_socket_that_is_passed_twice_is_one_listener(manager: ServiceManager) -> None:
    given = listen_tcp(HOST, 0)
    port, again = given.getsockname()[1], os.dup(given.fileno())
    passed = held_by(manager, (KEY, given.detach()), (KEY, again))
    with capture_logs() as logs, passed.named(KEY)(HOST, port):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again)
    assert not logs


def test_what_nothing_claims_is_closed_and_forgotten(manager: ServiceManager) -> None:
    given = listen_tcp(HOST, 0)
    address, number = given.getsockname(), given.detach()
    manager.add("gateway.listen", os.dup(number))
    with tempfile.TemporaryFile() as file:
        secret = os.dup(file.fileno())
    manager.add("x", os.dup(secret))
    passed = held_by(manager, ("gateway.listen", number), ("x", secret), ("", os.dup(0)))
    with capture_logs() as logs:
        passed.end_unclaimed()
    assert [line["name"] for line in logs] == ["gateway.listen", "x", ""]
    assert manager.names == []
    for closed in (number, secret):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_a_name_is_no_message(manager: ServiceManager) -> None:
    manager.add("kept", os.dup(0))
    for name in ("a\nFDNAME=kept", "", "a:b", "é", "a" * 256):
        held_by(manager).named(KEY)  # no message
        Notifier({"NOTIFY_SOCKET": manager.address}).forget(name)
    assert (manager.names, manager.messages) == (["kept"], [])


def announced(count: object, names: str = "", pid: int | None = None) -> dict[str, str]:
    process = os.getpid() if pid is None else pid
    return {"LISTEN_FDS": str(count), "LISTEN_FDNAMES": names, "LISTEN_PID": str(process)}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Let passed descriptors begin at a number that is free here."""
    with tempfile.TemporaryFile() as file:
        first = os.dup2(file.fileno(), 500, inheritable=True)
    monkeypatch.setattr(listeners, "FIRST_DESCRIPTOR", first)
    yield first
    os.close(first)


def test_passed_descriptors_are_taken_once_and_not_inherited(place: int) -> None:
    environment = announced(1, KEY) | {"HOME": "/"}
    assert take_passed(environment) == [(KEY, place)]
    assert environment == {"HOME": "/"}
    assert not os.get_inheritable(place)
    assert take_passed(environment) == []


def test_names_that_do_not_count_up_name_nothing(place: int) -> None:
    assert take_passed(announced(1, f"{KEY}:{KEY}")) == [("", place)]


@pytest.mark.parametrize("count", ["", "0x1", "-1", "65", "9999999", "²", "1 "])
def test_a_count_that_is_none_passes_nothing(place: int, count: str) -> None:
    with capture_logs() as logs:
        assert take_passed(announced(count, KEY)) == []
    (line,) = logs
    assert line["reason"] == "listen.passed"
    assert line["message"] == f"LISTEN_FDS={count!r}; allowed: 0 to 64"
    os.fstat(place)


def test_what_was_passed_to_another_process_is_not_taken(place: int) -> None:
    assert take_passed(announced(1, KEY, os.getppid())) == []
    os.fstat(place)


def test_descriptors_of_our_own_are_not_taken_for_passed_ones(place: int) -> None:
    os.set_inheritable(place, False)
    with capture_logs() as logs:
        assert take_passed(announced(1, KEY)) == []
        assert take_passed(announced(2, KEY)) == []
    assert ["was not passed" in line["message"] for line in logs] == [True, True]
    os.set_inheritable(place, True)
    with capture_logs() as logs:
        assert take_passed(announced(2, KEY)) == []
    assert "501 is not open" in logs[0]["message"]
