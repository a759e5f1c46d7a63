"""TCP listeners that outlive a restart, because the service manager holds them meanwhile.

A listener that a daemon binds goes to systemd's file descriptor store (FDSTORE=1 of sd_notify(3)),
under its configuration key. The next process is passed it (sd_listen_fds(3)), so hosts that connect
in between wait in its backlog. Socket units pass listeners in the same way. A passed descriptor is
used only if it is what the process would have bound itself; all others are ended before the first
address is bound, here and in the store.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Mapping, MutableMapping, Sequence
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
_SO_NETNS_COOKIE: Final = 71
"""Of <asm-generic/socket.h>."""
_DEVICE_BYTES_MAX: Final = 16
"""IFNAMSIZ of <linux/if.h>."""

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

    def __init__(self, notifier: Notifier) -> None:
        """Report what to keep and what to forget to the service manager of `notifier`."""
        self._notifier = notifier
        self._adopted: dict[str, int] = {}

    def adopt(self, passed: Sequence[tuple[str, int]], configured: Mapping[str, str]) -> None:
        """Take the passed descriptors that are configured listeners, and end all others.

        `passed` are names and numbers, `configured` each key's address. To be called before
        anything is bound: a listener that is ended may hold the address of another key.
        """
        refused = set()
        for name, number in passed:
            address = _bound_address(number)
            try:
                check_listener(number, configured.get(name))
            except VerificationError as error:
                get_logger().warning(
                    "listener_refused",
                    reason=error.reason,
                    name=name,
                    address=address,
                    message=error.args[0],
                )
                _end(number)
                refused.add(name)
                continue
            if name in self._adopted:
                # Nothing else can listen there: the same socket, of a socket unit and the store.
                os.close(number)
            else:
                self._adopted[name] = number
        for name in refused:
            # Forgets all descriptors of that name.
            self._notifier.forget(name)
            if name in self._adopted:
                self._notifier.keep(name, self._adopted[name])

    def named(self, key: str) -> Listen:
        """Return what opens the listener of a configuration key: the passed one, or a new one."""
        return partial(self._listen, key)

    def _listen(self, key: str, host: str, port: int) -> socket.socket:
        number = self._adopted.pop(key, None)
        if number is None:
            listening = listen_tcp(host, port)
            self._notifier.keep(key, listening.fileno())
            return listening
        adopted = socket.socket(fileno=number)
        adopted.setblocking(False)
        adopted.listen(BACKLOG)
        return adopted


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


def check_listener(number: int, address: str | None) -> None:
    """Check that a descriptor is the listener that `listen_tcp` would make at address:port.

    Port 0 allows any port; without an address, none is allowed. VerificationError `listen.passed`.
    """
    if address is None:
        raise VerificationError("listen.passed", "the configuration has no listener of that name")
    host, port = split_address(address)
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise _unlike("not a socket", address)
    with socket.socket(fileno=os.dup(number)) as passed, socket.socket(_family(host)) as own:
        if passed.family != own.family:
            raise _unlike("of another address family", address)
        if (passed.type, passed.proto) != (socket.SOCK_STREAM, socket.IPPROTO_TCP):
            raise _unlike("not a TCP socket", address)
        if not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise _unlike("not listening", address)
        # Otherwise any process of this user could listen there, too, and get some of the hosts.
        if passed.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            raise _unlike("shared by SO_REUSEPORT", address)
        # The service's network namespace may have changed: hosts of this one wouldn't reach it.
        if _network_namespace(passed) != _network_namespace(own):
            raise _unlike("of another network namespace", address)
        if passed.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _DEVICE_BYTES_MAX):
            raise _unlike("bound to a network device", address)
        bound = passed.getsockname()
        if _comparable(bound) != _comparable(_resolved(host, port or bound[1])):
            raise _unlike(f"bound to {join_address(*bound[:2])}", address)
        # Bound to one address, every socket is.
        if bound[0] == "::" and _is_ipv6_only(passed) != _is_ipv6_only(own):
            raise _unlike("of another setting of IPV6_V6ONLY", address)


def _network_namespace(of: socket.socket) -> bytes:
    return of.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)


def _is_ipv6_only(of: socket.socket) -> int:
    return of.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def _bound_address(number: int) -> str:
    """Return what an Internet socket is bound to as address:port; otherwise an empty text."""
    if stat.S_ISSOCK(os.fstat(number).st_mode):
        with socket.socket(fileno=os.dup(number)) as passed:
            if passed.family in (socket.AF_INET, socket.AF_INET6):
                return join_address(*passed.getsockname()[:2])
    return ""


def _resolved(host: str, port: int) -> tuple[Any, ...]:
    known = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )
    return known[0][4]


def _comparable(address: tuple[Any, ...]) -> tuple[object, ...]:
    """Return an address of the socket module without what differs in writing only."""
    host, port = address[:2]
    return (ipaddress.ip_address(host.partition("%")[0]), port, *address[3:])


def _unlike(fault: str, address: str) -> VerificationError:
    return VerificationError(
        "listen.passed",
        f"the passed descriptor is {fault}; allowed: a listener at {address}",
    )


def _end(number: int) -> None:
    """Close a refused descriptor; a listener also stops listening, whoever else holds it.

    The store gives it up only when it has read our message, and the address may be needed at once.
    A socket unit never gives it up: its hosts would connect, and wait for nobody.
    """
    if stat.S_ISSOCK(os.fstat(number).st_mode):
        with socket.socket(fileno=os.dup(number)) as refused, contextlib.suppress(OSError):
            if refused.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                refused.shutdown(socket.SHUT_RDWR)
    os.close(number)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
