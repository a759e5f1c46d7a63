"""Listeners that the service manager holds: adopted if they are the configured ones, else ended."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sealane.daemon.runtime import listeners
from sealane.daemon.runtime.listeners import Listeners, join_address, listen_tcp, take_passed
from sealane.daemon.runtime.notify import Notifier
from sealane.lab import kernel
from service_manager import ServiceManager

KEY = "target.listen"
HOST = "127.0.0.1"
IP_FREEBIND = 15  # of <linux/in.h>


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    made = ServiceManager(tmp_path)
    yield made
    made.close()


def held_by(
    manager: ServiceManager, *passed: tuple[str, int], port: int = 0, host: str = HOST
) -> Listeners:
    """Listeners of a process that was passed these, and is configured to listen as KEY only."""
    made = Listeners(Notifier({"NOTIFY_SOCKET": manager.address}))
    made.adopt(passed, {KEY: join_address(host, port)})
    return made


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
        with capture_logs() as logs:
            passed = held_by(manager, (KEY, os.dup(number)), port=port)
        with passed.named(KEY)(HOST, port) as second:
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
        passed = held_by(manager, (KEY, os.dup(given.fileno())), port=port, host=written)
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


def at_device(port: int) -> socket.socket:
    made = bound(socket.AF_INET, socket.SOCK_STREAM, port=port)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    made.listen()
    return made


def in_another_network(port: int) -> socket.socket:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")

    def make() -> socket.socket:
        # Only of this thread.
        kernel.unshare(kernel.CLONE_NEWNET)
        made = socket.socket()
        # The address is not there, as the loopback device is down.
        made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        made.bind((HOST, port))
        made.listen()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


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
    "device": (at_device, "bound to a network device"),
    "namespace": (in_another_network, "of another network namespace"),
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
    with capture_logs() as logs:
        passed = held_by(manager, (KEY, given.detach()), port=port)
    with passed.named(KEY)(HOST, port) as listening:
        (line,) = logs
        assert (line["event"], line["reason"]) == ("listener_refused", "listen.passed")
        assert expected in line["message"]
        # The configured address is served, by a listener of our own, which alone is stored now.
        assert listening.getsockname() == (HOST, port)
        ((name, stored),) = manager.stored()
        assert (name, inode(stored)) == (KEY, inode(listening.fileno()))
        assert inode(stored) != before


def test_a_file_is_no_listener(manager: ServiceManager) -> None:
    with tempfile.TemporaryFile() as file, capture_logs() as logs:
        held_by(manager, (KEY, os.dup(file.fileno())))
    (line,) = logs
    assert "not a socket" in line["message"]


def test_a_listener_with_another_choice_of_ipv6_only_is_refused(manager: ServiceManager) -> None:
    with socket.socket(socket.AF_INET6) as given:
        own = given.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        given.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not own)
        given.bind(("::", 0))
        given.listen()
        with capture_logs() as logs:
            held_by(manager, (KEY, os.dup(given.fileno())), port=given.getsockname()[1], host="::")
    (line,) = logs
    assert "of another setting of IPV6_V6ONLY" in line["message"]


def test_listeners_whose_addresses_change_places_are_ended_before_either_is_bound(
    manager: ServiceManager,
) -> None:
    given = [listen_tcp(HOST, 0) for _ in range(2)]
    before = {inode(each.fileno()) for each in given}
    ports = [each.getsockname()[1] for each in given]
    keys = (KEY, "metrics.listen")
    for key, each in zip(keys, given, strict=True):
        manager.add(key, os.dup(each.fileno()))
    swapped = dict(zip(keys, reversed(ports), strict=True))
    passed = Listeners(Notifier({"NOTIFY_SOCKET": manager.address}))
    with capture_logs() as logs:
        passed.adopt(
            [(key, each.detach()) for key, each in zip(keys, given, strict=True)],
            {key: join_address(HOST, port) for key, port in swapped.items()},
        )
    assert [(line["event"], line["address"]) for line in logs] == [
        ("listener_refused", join_address(HOST, port)) for port in ports
    ]
    with passed.named(keys[0])(HOST, ports[1]), passed.named(keys[1])(HOST, ports[0]):
        stored = dict(manager.stored())
    assert {*stored} == {*keys}
    assert not before & {inode(number) for number in stored.values()}


def test_an_adopted_listener_stays_stored_when_another_of_its_name_is_refused(
    manager: ServiceManager,
) -> None:
    with listen_tcp(HOST, 0) as right, listen_tcp(HOST, 0) as wrong:
        port, before = right.getsockname()[1], inode(right.fileno())
        passed = [(KEY, os.dup(each.fileno())) for each in (right, wrong)]
        for _, number in passed:
            manager.add(KEY, os.dup(number))
    with held_by(manager, *passed, port=port).named(KEY)(HOST, port) as adopted:
        assert inode(adopted.fileno()) == before
        ((name, number),) = manager.stored()
        assert (name, inode(number)) == (KEY, before)


def test_a_refused_listener_serves_nobody(manager: ServiceManager) -> None:
    given = listen_tcp(HOST, 0)
    address = given.getsockname()
    # The store holds it, too, until it has read our message.
    with socket.socket(fileno=os.dup(given.fileno())):
        held_by(manager, (KEY, given.detach()), port=free_port())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_one_socket_that_is_passed_twice_is_one_listener(manager: ServiceManager) -> None:
    given = listen_tcp(HOST, 0)
    port, again = given.getsockname()[1], os.dup(given.fileno())
    with capture_logs() as logs:
        passed = held_by(manager, (KEY, given.detach()), (KEY, again), port=port)
    with passed.named(KEY)(HOST, port), pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again)
    assert not logs


def test_what_the_configuration_does_not_name_is_ended_and_forgotten(
    manager: ServiceManager,
) -> None:
    given = listen_tcp(HOST, 0)
    address, number = given.getsockname(), given.detach()
    # A socket unit holds it, too, and never lets it go.
    unit = os.dup(number)
    manager.add("gateway.listen", os.dup(number))
    with tempfile.TemporaryFile() as file:
        secret = os.dup(file.fileno())
    manager.add("x", os.dup(secret))
    with capture_logs() as logs:
        held_by(manager, ("gateway.listen", number), ("x", secret), ("", os.dup(0)))
    assert [(line["name"], line["address"]) for line in logs] == [
        ("gateway.listen", join_address(*address)),
        ("x", ""),
        ("", ""),
    ]
    assert {line["message"] for line in logs} == {"the configuration has no listener of that name"}
    assert manager.names == []
    for closed in (number, secret):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    os.close(unit)


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
