"""A controller's admin queue against a host that may send any command at any time."""

import struct
import uuid
from dataclasses import replace

from fuzz.script import Script
from sealane.errors import ProtocolError
from sealane.protocol.nvme.admin import AdminController
from sealane.protocol.nvme.command import Answer, decode_completion
from sealane.protocol.nvme.connect import decode_connect
from sealane.protocol.nvme.constants import (
    EVENT_REQUESTS_MAX,
    AdminOpcode,
    AnaState,
    FabricsType,
    Feature,
    IdentifyStructure,
    LogPage,
    Property,
)
from sealane.protocol.nvme.discovery import DiscoveryRecord, encode_discovery_log
from sealane.protocol.nvme.logs import Notification
from sealane.protocol.nvme.properties import Transition
from sealane.protocol.nvme.subsystem import (
    ALL_COMMANDS,
    CommandFailure,
    Health,
    Namespace,
    Subsystem,
    volume_subsystem,
)

NQN = "nqn.2026-11.dev.sealane:fuzz"
ENABLE = 0x0046_0001
SGL = 0x40
IN_CAPSULE, TRANSPORT = 0x01, 0x5A
ENTRY = struct.Struct("<BBHI16xQI3xB6I")
TRANSFER_MAX = 131_072

VOLUME = volume_subsystem(
    nqn=NQN,
    volume_id=uuid.UUID(int=1),
    serial="1",
    block_count=64,
    metadata_bytes=64,
    transfer_max=TRANSFER_MAX,
)
PLAIN = Subsystem(
    nqn=NQN,
    serial="2",
    transfer_max=TRANSFER_MAX,
    namespaces=tuple(
        Namespace(nsid=nsid, namespace_uuid=uuid.UUID(int=nsid), block_count=64, eui64=bytes(8))
        for nsid in (1, 3)
    ),
    commands=ALL_COMMANDS,
    fused_blocks=1,
    nsid_max=1024,
    is_multipath=True,
)
DISCOVERY = Subsystem(nqn=NQN, serial="3", transfer_max=TRANSFER_MAX, is_discovery=True)
SUBSYSTEMS = (VOLUME, PLAIN, DISCOVERY)
SELECTORS = {
    AdminOpcode.GET_LOG_PAGE: tuple(LogPage),
    AdminOpcode.IDENTIFY: tuple(IdentifyStructure),
    AdminOpcode.SET_FEATURES: tuple(Feature),
    AdminOpcode.GET_FEATURES: tuple(Feature),
}
NSIDS = (0, 1, 2, 3, 1024, 0xFFFF_FFFE, 0xFFFF_FFFF)
LENGTHS = (0, 4, 16, 512, 4096, TRANSFER_MAX, TRANSFER_MAX + 4, 0xFFFF_FFFF)


class Resources:
    """A data path with figures as large as they can be."""

    def __init__(self, script: Script) -> None:
        self._failures = [
            CommandFailure(queue_id=1, command_id=2, status=0x80, lba=1 << 63, nsid=1, count=count)
            for count in range(script.byte(), 0, -1)
        ][:64]
        self._is_aborted = bool(script.byte() & 1)

    def health(self, nsid: int | None) -> Health:
        assert nsid is None or nsid > 0
        return Health(*[], sectors_read=(1 << 64) - 1, busy_ms=(1 << 64) - 1)

    def failures(self) -> list[CommandFailure]:
        return self._failures

    def abort(self, *, queue_id: int, command_id: int) -> bool:
        assert 0 < queue_id < 1 << 16 > command_id
        return self._is_aborted


def property_set(value: int, *, offset: int = Property.CONFIGURATION) -> bytes:
    """Property Set of a host."""
    entry = bytearray(64)
    entry[0], entry[1], entry[4] = AdminOpcode.FABRICS, SGL, FabricsType.PROPERTY_SET
    struct.pack_into("<IQ", entry, 44, offset, value)
    return bytes(entry)


class _Run:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.subsystem = script.choice(SUBSYSTEMS)
        self.controller = AdminController(
            self.subsystem,
            controller_id=1,
            keep_alive_ms=script.number(2),
            queue_size=32,
            flow_control=bool(script.byte() & 1),
        )
        self.parked: set[int] = set()
        self.generation = 0

    def handle(self, entry: bytes, data: bytes) -> None:
        answer = self.controller.handle(entry, data)
        command_id = int.from_bytes(entry[2:4], "little")
        if self.controller.take_transition() is Transition.RESET:
            self.parked.clear()
        # Reuse of a parked request's id abandons that request.
        self.parked.discard(command_id)
        if answer is None:
            assert entry[0] == AdminOpcode.ASYNC_EVENT_REQUEST
            self.parked.add(command_id)
            assert len(self.parked) <= EVENT_REQUESTS_MAX
            return
        self.check(answer, command_id, room=int.from_bytes(entry[32:36], "little"))
        assert not answer.data or entry[39] == TRANSPORT

    def check(self, answer: Answer, command_id: int, *, room: int = 0) -> None:
        assert answer.command_id == command_id
        answered, status, _ = decode_completion(answer.completion)
        assert answered == command_id
        assert len(answer.data) <= room
        assert not (status and answer.data)

    def drain(self) -> None:
        while (answer := self.controller.next_answer()) is not None:
            assert answer.command_id in self.parked, "one answer for each"
            self.parked.discard(answer.command_id)
            self.check(answer, answer.command_id)

    def command(self) -> None:
        script = self.script
        opcode = script.choice((*AdminOpcode, 0x55))
        selectors = SELECTORS.get(opcode, ())
        shape = script.byte()
        words = [script.number(4) for _ in range(2)] + [0] * 4
        if selectors and shape & 1:
            words[0] = words[0] & ~0xFF | script.choice(selectors)
        if shape & 2:
            words[2:] = [script.number(4) for _ in range(4)]
        length = script.choice(LENGTHS)
        if opcode == AdminOpcode.GET_LOG_PAGE and shape & 4:
            words[0], words[1], words[4] = words[0] & 0x01FF_80FF, 0, 0
            length = (words[0] >> 16) * 4 + 4
        kind = TRANSPORT if shape & 8 else IN_CAPSULE
        data = script.patched(bytes(min(length, 4096))) if kind == IN_CAPSULE else b""
        entry = bytearray(
            ENTRY.pack(opcode, SGL, script.byte(), script.choice(NSIDS), 0, length, kind, *words)
        )
        if opcode == AdminOpcode.FABRICS:
            entry[4] = script.choice((*FabricsType, 0x33))
        self.handle(bytes(entry), data)

    def change(self) -> None:
        script = self.script
        self.generation += 1
        if self.subsystem.is_discovery:
            record = DiscoveryRecord(subsystem_nqn=NQN, traddr="127.0.0.1", trsvcid=4420)
            page = encode_discovery_log([record] * (script.byte() % 4), generation=self.generation)
            self.controller.set_discovery_log(page)
            return
        kept = script.byte()
        namespaces = tuple(
            replace(each, ana_state=script.choice(tuple(AnaState)), block_count=64 + script.byte())
            for each in self.subsystem.namespaces
            if kept >> each.nsid & 1
        )
        self.controller.update(replace(self.subsystem, namespaces=namespaces))

    def turn(self) -> None:
        script = self.script
        choice = script.byte() % 16
        if choice == 0:
            self.handle(script.take(64).ljust(64, b"\0"), script.take(script.number(2)))
        elif choice == 1:
            self.change()
        elif choice == 2:
            nsid, kind = script.byte(), script.choice(tuple(Notification))
            if self.subsystem.has_reservations:
                self.controller.notify_reservation(nsid, kind)
        elif choice == 3:
            self.controller.set_resources(Resources(script))
            self.controller.set_io_queues(connected=bool(script.byte() & 1))
        elif choice == 4:
            self.check(self.controller.refuse(bytes(64)), 0)
        elif choice == 5:
            self.handle(property_set(script.number(4)), b"")
        elif choice == 6:
            self.handle(property_set(ENABLE), b"")
        else:
            self.command()
        self.drain()


def admin_controller(content: bytes) -> None:
    """Every command has one answer within its buffer; requests stay bounded."""
    script = Script(content)
    run = _Run(script)
    while not script.is_empty:
        run.turn()


def connect(content: bytes) -> None:
    """A decoded Connect, encoded again, decodes to the same."""
    script = Script(content)
    entry, data = script.take(64).ljust(64, b"\0"), script.rest()
    try:
        decoded = decode_connect(entry, data)
    except ProtocolError:
        return
    assert 1 <= decoded.queue_size <= 1 << 16
    assert decode_connect(*decoded.encode()) == decoded
