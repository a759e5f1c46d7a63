"""The listener, from the first byte of a connection, against a host that may send anything."""

import asyncio
import uuid
from collections.abc import Iterable

from fuzz.admin import ENABLE, NQN, PLAIN, property_set
from fuzz.script import Script
from fuzz.sockets import LOOP, finish, pair
from sealane import _native
from sealane.daemon.nvme.exported import Admission, Association, Exported, Provider
from sealane.daemon.nvme.listener import Listener
from sealane.errors import Error
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import DYNAMIC_CONTROLLER, PduKind
from sealane.protocol.nvme.subsystem import Subsystem
from sealane.transport.nvme.stream import PduStream

HOST = "nqn.2026-11.dev.sealane:host"
ANSWERED = {
    PduKind.IC_RESP,
    PduKind.CAPSULE_RESP,
    PduKind.C2H_DATA,
    PduKind.C2H_TERM,
}

# The longest first PDU: a termination request that quotes a header of 128 bytes.
_FIRST_BYTES_MAX = 152


class _Handed:
    def start(self, descriptor: int) -> None:
        assert descriptor >= 0

    def close(self) -> None:
        """Nothing was prepared."""


class _Fuzzed(Exported, Provider):
    def __init__(self, *, is_secret: bool) -> None:
        self._is_secret = is_secret

    @property
    def subsystem(self) -> Subsystem:
        return PLAIN

    def exported(self) -> Iterable[Exported]:
        return (self,)

    def find(self, subsystem_nqn: str) -> Exported | None:
        return self if subsystem_nqn == NQN else None

    def allows(self, host_nqn: str) -> bool:
        return host_nqn == HOST

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:
        assert host_nqn == HOST
        return (HostSecret(bytes(32)), None) if self._is_secret else None

    async def admit(self, association: Association, connect: Connect) -> Admission:
        assert connect.controller_id == association.controller_id
        return _Handed()

    async def association_closed(self, association_id: int) -> None:
        assert association_id > 0

    def refused(self, error: Exception, connect: Connect) -> None:
        """Nobody listens."""


def connect_capsule(*, queue_id: int = 0, controller_id: int = DYNAMIC_CONTROLLER) -> bytes:
    """Return the Connect of the permitted host."""
    made = Connect(
        command_id=1,
        queue_id=queue_id,
        queue_size=32,
        host_id=uuid.UUID(int=1),
        controller_id=controller_id,
        subsystem_nqn=NQN,
        host_nqn=HOST,
    )
    return _native.encode_capsule_cmd(*made.encode())


def admin_bytes() -> bytes:
    """Return the bytes of a host that connects and enables its controller."""
    enable = _native.encode_capsule_cmd(property_set(ENABLE), b"")
    return _native.encode_ic_req() + connect_capsule() + enable


def listener(content: bytes) -> None:
    """Every connection ends with its host, and everything sent to it is well formed."""
    LOOP.run_until_complete(_listener(Script(content)))


async def _listener(script: Script) -> None:
    shape = script.byte()
    provider = _Fuzzed(is_secret=bool(shape & 1))
    fuzzed = Listener(provider, traddr="127.0.0.1", trsvcid=0, offers_digests=bool(shape & 2))
    faults: list[str] = []
    fuzzed.observe(faults.append)
    first_near, first_far = pair()
    near, far = pair()
    with first_near, first_far, near, far:
        first = None
        if shape & 4:
            first_far.send(admin_bytes())
            first = asyncio.ensure_future(fuzzed._serve(first_near, "first"))
            for _ in range(20):
                await asyncio.sleep(0)
        far.send(script.rest())
        far.shutdown(1)
        await fuzzed._serve(near, "fuzzed")
        near.close()
        await _check(finish(far))
        assert len(faults) <= 1, faults
        if first is not None:
            first_far.close()
            await first
    assert not fuzzed.associations


async def _check(sent: bytes) -> None:
    """Check the answers; the first PDU has no digests, whatever was negotiated."""
    near, far = pair()
    with near, far:
        far.send(sent[:_FIRST_BYTES_MAX])
        far.shutdown(1)
        if sent:
            header, _ = await PduStream(near, data_max=1 << 20).receive()
            assert header.kind in ANSWERED


def pdu_stream(content: bytes) -> None:
    """PDUs of either role are complete and within bounds, or the stream fails."""
    LOOP.run_until_complete(_pdu_stream(Script(content)))


async def _pdu_stream(script: Script) -> None:
    shape, data_max = script.byte(), script.number(2)
    near, far = pair()
    with near, far:
        content = script.rest()
        far.send(content)
        far.shutdown(1)
        stream = PduStream(near, data_max=data_max)
        stream.use_digests(header=bool(shape & 1), data=bool(shape & 2))
        count = 0
        while True:
            try:
                header, data = await stream.receive()
            except Error:
                break
            count += 1
            assert len(data) <= data_max
            assert header.kind in set(PduKind)
        assert count * 8 <= len(content)
