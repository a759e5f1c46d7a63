"""Admin controllers, command entries for them, and parsing of their answers."""

import struct
import uuid

from sealane.protocol.nvme.admin import AdminController
from sealane.protocol.nvme.command import Answer, decode_completion
from sealane.protocol.nvme.constants import (
    DISCOVERY_NQN,
)
from sealane.protocol.nvme.properties import Transition
from sealane.protocol.nvme.subsystem import (
    ALL_COMMANDS,
    ControllerResources,
    Namespace,
    Subsystem,
    volume_subsystem,
)

ENABLE = 0x0046_0001
HOST_ID = uuid.UUID(int=77).bytes
VOLUME = volume_subsystem(
    nqn="nqn.2026-11.dev.sealane:volume:1",
    volume_id=uuid.UUID(int=0x1234),
    serial="0123456789",
    block_count=1000,
    metadata_bytes=64,
    transfer_max=262_144,
)
FIRST = Namespace(
    nsid=1, namespace_uuid=uuid.UUID(int=1), block_count=1000, eui64=bytes(range(1, 9))
)
THIRD = Namespace(nsid=3, namespace_uuid=uuid.UUID(int=3), block_count=3000)
PLAIN = Subsystem(
    nqn="nqn.2026-11.dev.sealane:plain",
    serial="S1",
    transfer_max=131_072,
    namespaces=(FIRST, THIRD),
    commands=ALL_COMMANDS,
    fused_blocks=8,
    nsid_max=16,
    is_multipath=True,
)
DISCOVERY = Subsystem(nqn=DISCOVERY_NQN, serial="D", transfer_max=131_072, is_discovery=True)


def entry(
    opcode: int,
    *words: int,
    nsid: int = 0,
    length: int = 4096,
    cid: int = 1,
    flags: int = 0x40,
    sgl: int = 0x5A,
) -> bytes:
    padded = (*words, 0, 0, 0, 0, 0, 0)[:6]
    return struct.pack("<BBHI16xQI3xB6I", opcode, flags, cid, nsid, 0, length, sgl, *padded)


def set_property(offset: int, value: int) -> bytes:
    made = bytearray(entry(0x7F, length=0))
    struct.pack_into("<IQ", made, 44, offset, value)
    return bytes(made)


def get_property(offset: int, size: int) -> bytes:
    made = bytearray(entry(0x7F, length=0, nsid=4))
    made[40] = size
    struct.pack_into("<I", made, 44, offset)
    return bytes(made)


def get_log(page: int, length: int, *, offset: int = 0, retain: bool = False, **more: int) -> bytes:
    dwords = length // 4 - 1
    first = page | more.pop("specific", 0) << 8 | retain << 15 | (dwords & 0xFFFF) << 16
    second = dwords >> 16 | more.pop("identifier", 0) << 16
    words = (first, second, offset & 0xFFFF_FFFF, offset >> 32, more.pop("last", 0))
    return entry(0x02, *words, length=length, **more)


def enabled(
    subsystem: Subsystem, resources: ControllerResources | None = None, **options: object
) -> AdminController:
    controller = AdminController(
        subsystem,
        controller_id=1,
        keep_alive_ms=1500,
        host_id=HOST_ID,
        **options,  # type: ignore[arg-type]
    )
    if resources is not None:
        controller.set_resources(resources)
    assert status(controller.handle(set_property(0x14, ENABLE))) == 0
    assert controller.take_transition() is Transition.ENABLED
    return controller


def status(answer: Answer | None) -> int:
    assert answer is not None
    return decode_completion(answer.completion)[1]


def result(answer: Answer | None) -> int:
    assert answer is not None
    assert status(answer) == 0
    return decode_completion(answer.completion)[2]


def data(answer: Answer | None) -> bytes:
    assert answer is not None
    assert status(answer) == 0
    return answer.data


# Properties


def set_feature(feature: int, value: int = 0, *, nsid: int = 0) -> bytes:
    return entry(0x09, feature, value, nsid=nsid, length=0)


def listening(plain: AdminController, *cids: int, configuration: int = 0x900) -> AdminController:
    assert status(plain.handle(set_feature(0x0B, configuration))) == 0
    for cid in cids:
        assert plain.handle(entry(0x0C, cid=cid, length=0)) is None
    return plain
