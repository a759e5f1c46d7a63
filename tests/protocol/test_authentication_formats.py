"""Secrets, commands and messages of DH-HMAC-CHAP as text and bytes.

The transformed keys come from `nvme gen-dhchap-key` of nvme-cli 2.3; the first secret is the
example of NVMe Base 2.0 §8.13.5.8.
"""

import base64

import pytest

from authentication_roles import (
    HOST,
    ROOM,
    SPECIFICATION_SECRET,
    controller,
    host,
    source,
)
from sealane.errors import ProtocolError, UsageError
from sealane.protocol.nvme.authentication import (
    AuthenticationCommand,
    DhGroup,
    HashFunction,
    HostSecret,
    decode_authentication,
)
from sealane.protocol.nvme.authentication.messages import (
    Challenge,
    Failure,
    Negotiate,
    Reply,
    Success2,
)


def test_a_challenge_is_numbered_from_1() -> None:
    other = controller(random=bytes)  # nothing but zeros
    other.send(host().take())
    assert Challenge.decode(other.receive(ROOM)).sequence == 1


def test_messages_survive_the_wire() -> None:
    value = bytes(256)
    for message in (
        Negotiate(transaction=1, hashes=(1, 2), groups=(0,)),
        Success2(transaction=0xFFFF),
        Failure(kind=Failure.OF_HOST, transaction=2, explanation=7),
        Challenge(
            transaction=3,
            hash_function=HashFunction.SHA384,
            group=DhGroup.FFDHE2048,
            sequence=0xFFFF_FFFF,
            challenge=bytes(48),
            public_value=value,
        ),
    ):
        assert type(message).decode(message.encode()) == message
    reply = Reply(
        transaction=4, response=b"r" * 64, challenge=b"c" * 64, sequence=9, public_value=value
    )
    assert Reply.decode(reply.encode(), HashFunction.SHA512) == reply


@pytest.mark.parametrize(
    ("length", "transform", "transformed"),
    [
        (32, 1, "eGOjOSJAEO/H5bDhWMzHdMAz5kyhHZlbqU1HWBl05iU="),
        (48, 2, "OSFRps5xBlJdGYl/2Q2ky5ZJh7qP0Jm4ohTgY1XEoBTafULsd2tno2kh2U1D6F9M"),
        (
            64,
            3,
            "8F8lKumik69AkegfLCoXtKLOoohOebSUeYCrZ8OPiUBcjUK/ucQbSbOuYIao01rK4fDtbsyIE0OrKDbtGAOh2A==",
        ),
    ],
)
def test_keys_are_transformed_as_others_do(length: int, transform: int, transformed: str) -> None:
    secret = HostSecret(bytes(range(length)), transform=HashFunction(transform))
    assert base64.b64encode(secret.transformed(HOST)).decode() == transformed


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (32, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:"),
        (
            48,
            "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:",
        ),
    ],
)
def test_secrets_are_written_as_others_do(length: int, text: str) -> None:
    secret = HostSecret(bytes(range(length)))
    assert str(secret) == text
    assert HostSecret.parse(text) == secret
    assert secret.transformed(HOST) == bytes(range(length))


def test_the_specifications_example_is_read() -> None:
    assert str(HostSecret.parse(SPECIFICATION_SECRET)) == SPECIFICATION_SECRET


@pytest.mark.parametrize("transform", [None, *HashFunction])
def test_made_secrets_survive_their_text(transform: HashFunction | None) -> None:
    secret = HostSecret.generate(source(), transform=transform)
    assert HostSecret.parse(str(secret)) == secret
    assert secret != HostSecret.generate(source(1), transform=transform)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "secret.format"),
        (SPECIFICATION_SECRET[:-1], "secret.format"),
        (SPECIFICATION_SECRET + "x", "secret.format"),
        (SPECIFICATION_SECRET.replace("DHHC-1", "DHHC-2"), "secret.format"),
        (SPECIFICATION_SECRET.replace(":00:", ":04:"), "secret.hash"),
        (SPECIFICATION_SECRET.replace(":00:", ":0:"), "secret.hash"),
        (SPECIFICATION_SECRET.replace("ia6z", "ia6!"), "secret.format"),
        (SPECIFICATION_SECRET.replace("ia6z", "ia7z"), "secret.checksum"),
        ("DHHC-1:00:AAAA:", "secret.length"),
        ("DHHC-1:00:é:", "secret.format"),
    ],
)
def test_bad_secrets_are_refused_without_being_shown(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        HostSecret.parse(text)
    assert caught.value.reason == reason
    assert "ia6" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_secret_does_not_show_itself() -> None:
    secret = HostSecret.parse(SPECIFICATION_SECRET)
    shown = f"{secret} {secret!r} {[secret]} {secret:>40}"
    assert "ia6z" not in shown
    assert "HostSecret(32 bytes)" in shown


@pytest.mark.parametrize("kind", [AuthenticationCommand.SEND, AuthenticationCommand.RECEIVE])
def test_commands_survive_the_wire(kind: int) -> None:
    command = AuthenticationCommand(command_id=77, kind=kind, length=1168)
    entry = command.encode()
    assert decode_authentication(entry) == command
    assert (entry[0], entry[4], entry[41:48]) == (0x7F, kind, b"\1\1\xe9\x90\4\0\0")


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 2), (4, 0), (41, 0), (42, 2), (43, 0), (44, 0), (47, 1)]
)
def test_bad_commands_are_refused(offset: int, value: int) -> None:
    entry = bytearray(AuthenticationCommand(command_id=1, kind=5, length=72).encode())
    entry[offset] = value
    with pytest.raises(ProtocolError):
        decode_authentication(bytes(entry))
