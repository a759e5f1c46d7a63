"""Host and controller of DH-HMAC-CHAP with test secrets."""

import random
from collections.abc import Callable

from sealane.protocol.nvme.authentication import (
    ControllerAuthentication,
    DhGroup,
    HashFunction,
    HostAuthentication,
    HostSecret,
)

HOST = "nqn.2014-08.org.example:host"
SUBSYSTEM = "nqn.2014-08.org.example:subsystem"
SPECIFICATION_SECRET = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
SECRET = HostSecret(bytes(range(32)), transform=HashFunction.SHA256)
CONTROLLER_SECRET = HostSecret(bytes(range(100, 148)), transform=HashFunction.SHA384)
OTHER_SECRET = HostSecret(bytes(32), transform=HashFunction.SHA256)
ROOM = 4096
# A one-bit change of any field that a role has to check is refused by one side.
PROOF_BITS = (0, 7)


def source(seed: int = 0) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def controller(**changes: object) -> ControllerAuthentication:
    fields: dict[str, object] = {
        "host_nqn": HOST,
        "subsystem_nqn": SUBSYSTEM,
        "secret": SECRET,
        "controller_secret": CONTROLLER_SECRET,
        "random": source(1),
        "hashes": (HashFunction.SHA256,),
        "groups": (DhGroup.NULL,),
    }
    return ControllerAuthentication(**(fields | changes))  # type: ignore[arg-type]


def host(**changes: object) -> HostAuthentication:
    fields: dict[str, object] = {
        "host_nqn": HOST,
        "subsystem_nqn": SUBSYSTEM,
        "secret": SECRET,
        "controller_secret": CONTROLLER_SECRET,
        "random": source(2),
    }
    return HostAuthentication(**(fields | changes))  # type: ignore[arg-type]


Mutation = Callable[[int, bytes], bytes]


def run(
    one: HostAuthentication, other: ControllerAuthentication, mutate: Mutation | None = None
) -> list[bytes]:
    """Exchange messages until a side has succeeded or failed; return all messages."""
    sent: list[bytes] = []

    def carry(message: bytes) -> bytes:
        sent.append(message)
        return message if mutate is None else mutate(len(sent) - 1, message)

    while not one.is_authenticated:
        if one.has_message:
            other.send(carry(one.take()))
        else:
            one.receive(carry(other.receive(ROOM)))
    return sent
