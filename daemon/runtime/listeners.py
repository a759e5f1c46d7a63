"""TCP listeners that outlive a restart, because the service manager holds them meanwhile.

A listener that a daemon binds goes to systemd's file descriptor store (FDSTORE=1 of sd_notify(3)),
under its configuration key. The next process is passed it (sd_listen_fds(3)), so hosts that connect
in between wait in its backlog. Socket units pass listeners in the same way. A passed descriptor is
used only if it is what the process would have bound itself; what isn't used is closed, here and in
the store.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, Final

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.notify import Notifier
from sealane.errors import VerificationError

FIRST_DESCRIPTOR: Final = 3
"""SD_LISTEN_FDS_START of <systemd/sd-daemon.h>."""
PASSED_MAX: Final = 64
"""Most descriptors that are looked at; the shipped unit's store holds eight."""
BACKLOG: Final = 256
"""Connections that wait to be accepted; the kernel grants no more than net.core.somaxconn."""

Listen = Callable[[str, int], socket.socket]
"""Returns a non-blocking listener at an address and port; OSError if there can't be one."""


def split_address(address: str) -> tuple[str, int]:
    """Split an address:port that the configuration has already checked."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return address:port as in configurations, with […] around IPv6 addresses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a new non-blocking listener; OSError if the address can't be bound."""
    listening = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


class Listeners:
    """The listeners of one process, by configuration key."""

    def __init__(self, notifier: Notifier, passed: Sequence[tuple[str, int]] = ()) -> None:
        """Take names and numbers of `passed` descriptors; they are closed by `end_unclaimed`."""
        self._notifier = notifier
        self._passed = list(passed)

    def named(self, key: str) -> Listen:
        """Return what opens the listener of a configuration key: the passed one, or a new one."""
        return partial(self._listen, key)

    def end_unclaimed(self) -> None:
        """Close passed descriptors that no listener used, and have the store forget them."""
        for name, number in self._passed:
            os.close(number)
            self._notifier.forget(name)
            get_logger().warning("listener_dropped", name=name)
        self._passed.clear()

    def _listen(self, key: str, host: str, port: int) -> socket.socket:
        mine = [number for name, number in self._passed if name == key]
        self._passed = [each for each in self._passed if each[0] != key]
        adopted: socket.socket | None = None
        was_refused = False
        for number in mine:
            try:
                check_listener(number, host, port)
            except VerificationError as error:
                get_logger().warning(
                    "listener_refused", reason=error.reason, name=key, message=error.args[0]
                )
                _end(number)
                was_refused = True
                continue
            if adopted is None:
                adopted = socket.socket(fileno=number)
            else:
                # Nothing else can listen there: the same socket, of a socket unit and the store.
                os.close(number)
        if was_refused:
            # Forgets all descriptors of that name.
            self._notifier.forget(key)
        listening = listen_tcp(host, port) if adopted is None else adopted
        if adopted is not None:
            adopted.setblocking(False)
            adopted.listen(BACKLOG)
        if adopted is None or was_refused:
            self._notifier.keep(key, listening)
        return listening


def take_passed(environment: MutableMapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """Return names and numbers of the descriptors passed to this process (sd_listen_fds(3)).

    Removes the variables that announce them, and has no child inherit them. What is not for this
    process, or malformed, passes nothing.
    """
    count, names, pid = (
        environment.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID")
    )
    if pid != str(os.getpid()):
        return []
    try:
        numbers = _numbers(count)
    except VerificationError as error:
        get_logger().warning("listener_refused", reason=error.reason, message=error.args[0])
        return []
    for number in numbers:
        os.set_inheritable(number, False)
    split = names.split(":")
    if len(split) != len(numbers):
        split = [""] * len(numbers)
    return list(zip(split, numbers, strict=True))


def _numbers(count: str) -> range:
    if not (count.isascii() and count.isdigit() and len(count) <= 3 and int(count) <= PASSED_MAX):
        raise VerificationError(
            "listen.passed", f"LISTEN_FDS={count!r}; allowed: 0 to {PASSED_MAX}"
        )
    numbers = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count))
    for number in numbers:
        try:
            flags = fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError as error:
            raise VerificationError(
                "listen.passed", f"LISTEN_FDS={count}, but descriptor {number} is not open"
            ) from error
        if flags & fcntl.FD_CLOEXEC:
            # Opened by this process, so it can't have been passed, and isn't ours to close.
            raise VerificationError(
                "listen.passed", f"LISTEN_FDS={count}, but descriptor {number} was not passed"
            )
    return numbers


def check_listener(number: int, host: str, port: int) -> None:
    """Check that a descriptor is the listener that `listen_tcp` would make.

    Port 0 allows any port. VerificationError `listen.passed`.
    """
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise _unlike("not a socket", host, port)
    with socket.socket(fileno=os.dup(number)) as passed:
        if passed.family != _family(host):
            raise _unlike("of another address family", host, port)
        if (passed.type, passed.proto) != (socket.SOCK_STREAM, socket.IPPROTO_TCP):
            raise _unlike("not a TCP socket", host, port)
        if not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise _unlike("not listening", host, port)
        # Otherwise any process of this user could listen there, too, and get some of the hosts.
        if passed.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            raise _unlike("shared by SO_REUSEPORT", host, port)
        bound = passed.getsockname()
        if _comparable(bound) != _comparable(_resolved(host, port or bound[1])):
            raise _unlike(f"bound to {join_address(*bound[:2])}", host, port)


def _resolved(host: str, port: int) -> tuple[Any, ...]:
    known = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )
    return known[0][4]


def _comparable(address: tuple[Any, ...]) -> tuple[object, ...]:
    """Return an address of the socket module without what differs in writing only."""
    host, port = address[:2]
    return (ipaddress.ip_address(host.partition("%")[0]), port, *address[3:])


def _unlike(fault: str, host: str, port: int) -> VerificationError:
    return VerificationError(
        "listen.passed",
        f"the passed descriptor is {fault}; allowed: a listener at {join_address(host, port)}",
    )


def _end(number: int) -> None:
    """Close a refused descriptor; a listener also stops listening, whoever else holds it.

    The store gives it up only when it has read our message, and the address may be needed at once.
    """
    if stat.S_ISSOCK(os.fstat(number).st_mode):
        with socket.socket(fileno=os.dup(number)) as refused, contextlib.suppress(OSError):
            if refused.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                refused.shutdown(socket.SHUT_RDWR)
    os.close(number)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
