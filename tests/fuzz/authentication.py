"""DH-HMAC-CHAP, each side against a peer with arbitrary messages, with or without the secret."""

import contextlib
from collections.abc import Callable

from fuzz.admin import IN_CAPSULE, TRANSPORT
from fuzz.script import Script
from sealane.errors import UsageError
from sealane.protocol.nvme.authentication import (
    MESSAGE_BYTES_MAX,
    AuthenticationCommand,
    AuthenticationError,
    ControllerAuthentication,
    DhGroup,
    HashFunction,
    HostAuthentication,
    HostSecret,
)
from sealane.protocol.nvme.in_band import QueueAuthentication

HOST, SUBSYSTEM = "nqn.2026-11.dev.sealane:host", "nqn.2026-11.dev.sealane:subsystem"
HASHES = tuple(HashFunction)
GROUPS = ((DhGroup.NULL,), (DhGroup.FFDHE2048,), (DhGroup.NULL, DhGroup.FFDHE2048))
RIGHT, WRONG = HostSecret(b"r" * 32, transform=HashFunction.SHA256), HostSecret(b"w" * 32)
TURNS_MAX = 64


def _random(seed: int) -> Callable[[int], bytes]:
    state = [seed]

    def take(count: int) -> bytes:
        state[0] += 1
        return state[0].to_bytes(8, "little").ljust(count, b"\x5a")[:count]

    return take


def _pair(
    script: Script,
) -> tuple[HostAuthentication, ControllerAuthentication, bool, bool]:
    shape = script.byte()
    host_lies, controller_lies = bool(shape & 1), bool(shape & 2)
    host_checks, controller_proves = bool(shape & 4), bool(shape & 8)
    groups = script.choice(GROUPS)
    host = HostAuthentication(
        host_nqn=HOST,
        subsystem_nqn=SUBSYSTEM,
        secret=WRONG if host_lies else RIGHT,
        controller_secret=RIGHT if host_checks else None,
        random=_random(1),
        hashes=HASHES,
        groups=groups,
    )
    proof = WRONG if controller_lies else RIGHT
    controller = ControllerAuthentication(
        host_nqn=HOST,
        subsystem_nqn=SUBSYSTEM,
        secret=RIGHT,
        controller_secret=proof if controller_proves else None,
        random=_random(1 << 32),
        hashes=(script.choice(HASHES),),
        groups=groups,
    )
    return host, controller, host_lies, host_checks and (controller_lies or not controller_proves)


def _changed(script: Script, message: bytes) -> bytes:
    choice = script.byte()
    if choice < 0x80:
        return message
    if choice < 0xC0:
        return script.patched(message)
    if choice < 0xE0:
        return message[: script.number(2)]
    return script.patched(bytes([script.byte(), script.byte()]).ljust(script.number(2), b"\0"))


def authentication_controller(content: bytes) -> None:
    """A host without the secret is never authenticated; every command has one answer."""
    script = Script(content)
    host, controller, host_lies, _ = _pair(script)
    queue = QueueAuthentication(controller)
    for _ in range(TURNS_MAX):
        if script.is_empty or queue.is_ending:
            break
        is_send = host.has_message and not host.has_failed
        message = _changed(script, host.take() if is_send else b"")
        if message:
            command = AuthenticationCommand(
                command_id=1, kind=AuthenticationCommand.SEND, length=len(message)
            )
        else:
            command = AuthenticationCommand(
                command_id=1, kind=AuthenticationCommand.RECEIVE, length=MESSAGE_BYTES_MAX
            )
        entry = command.encode()
        entry = script.patched(entry) if script.byte() & 0xE0 == 0xE0 else entry
        answer = queue.handle(entry, message)
        assert answer.command_id == int.from_bytes(entry[2:4], "little")
        assert len(answer.data) <= int.from_bytes(entry[32:36], "little")
        assert not answer.data or entry[39] == TRANSPORT != IN_CAPSULE
        if answer.data and not host.has_failed and not host.is_authenticated:
            with contextlib.suppress(AuthenticationError):
                host.receive(answer.data)
    assert not (controller.is_authenticated and host_lies)
    assert not (controller.has_failed and queue.is_open and not controller.is_authenticated)


def authentication_host(content: bytes) -> None:
    """A controller without the secret, or without a requested proof, is never trusted."""
    script = Script(content)
    host, controller, host_lies, controller_lies = _pair(script)
    for _ in range(TURNS_MAX):
        if script.is_empty or host.is_authenticated or host.has_failed:
            break
        if host.has_message:
            with contextlib.suppress(AuthenticationError):
                controller.send(host.take())
            continue
        message = _changed(script, controller.receive(MESSAGE_BYTES_MAX))
        try:
            host.receive(message)
        except AuthenticationError:
            assert host.has_failed
    if host.has_failed and host.has_message:
        assert len(host.take()) <= MESSAGE_BYTES_MAX
    assert not (host.is_authenticated and controller_lies)
    assert not (controller.is_authenticated and host_lies)


def secret(content: bytes) -> None:
    """A secret that parses has a standard form that parses to the same; no error shows it."""
    text = content.decode(errors="replace")
    told = ""
    try:
        parsed = HostSecret.parse(text)
    except UsageError as error:
        told = str(error)
    if told:
        parts = text.split(":")
        assert len(parts) < 3 or len(parts[2]) < 16 or parts[2] not in told
    else:
        assert HostSecret.parse(str(parsed)) == parsed
