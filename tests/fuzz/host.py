"""The initiator against a controller with arbitrary answers."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import TypeVar

from fuzz.admin import DISCOVERY, NQN, PLAIN, TRANSFER_MAX
from fuzz.script import Script
from fuzz.sockets import LOOP, finish, pair
from sealane.errors import Error, UsageError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import (
    DYNAMIC_CONTROLLER,
    IDENTIFY_BYTES,
    AdminOpcode,
    FabricsType,
    LogPage,
)
from sealane.protocol.nvme.discovery import DiscoveryRecord, encode_discovery_log
from sealane.protocol.nvme.host_pages import decode_event
from sealane.protocol.nvme.identify import IdentifyRequest, identify
from sealane.protocol.nvme.logs import encode_ana
from sealane.protocol.nvme.nqn import check_nqn
from sealane.transport.nvme import handshake
from sealane.transport.nvme.admin_queue import AdminQueue
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.discovery import DISCOVERY_ENTRIES_MAX, discover
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.handshake import ADMIN_DATA_MAX, Digests
from sealane.transport.nvme.initiator import NAMESPACES_MAX, HostController
from sealane.transport.nvme.stream import PduStream

T = TypeVar("T")
HOST = "nqn.2026-11.dev.sealane:host"
COMMANDS_MAX = 8 * (DISCOVERY_ENTRIES_MAX // 4 + 2)
_CAPABILITIES = 127 | 1 << 24
_LOG = encode_discovery_log(
    [DiscoveryRecord(subsystem_nqn=NQN, traddr="127.0.0.1", trsvcid=4420)] * 6, generation=1
)


def _finished(running: Coroutine[object, object, T]) -> T | None:
    """Run a coroutine that never has to wait; return None if the controller was refused."""
    try:
        running.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except Error:
        return None
    raise AssertionError("it waits for something")


class _Answers:
    """An admin queue with correct answers, changed by the script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._is_discovery = False
        self.commands = 0

    async def submit(
        self,
        entry: bytes,
        *,
        data: bytes = b"",
        room: int = 0,
        is_bounded: bool = True,
        **_: float,
    ) -> tuple[bytes, int]:
        assert len(entry) == 64
        assert is_bounded or not data
        self.commands += 1
        assert self.commands <= COMMANDS_MAX, "asks without end"
        script = self._script
        choice = script.byte()
        if choice == 0xFF:
            raise NvmeStatusError(script.number(2) & 0x7FF)
        page = self._page(entry)[:room].ljust(room, b"\0")
        page = script.patched(page) if choice & 0x40 else page
        page = page[: script.number(2)] if choice & 0xB0 == 0xB0 else page
        return page, self._result(entry) ^ (script.number(8) if choice & 0x30 == 0x20 else 0)

    def _page(self, entry: bytes) -> bytes:
        subsystem = DISCOVERY if self._is_discovery else PLAIN
        if entry[0] == AdminOpcode.IDENTIFY:
            nsid = int.from_bytes(entry[4:8], "little")
            request = IdentifyRequest(
                structure=entry[40], nsid=nsid, command_set=0, controller_id=0
            )
            try:
                return identify(request, subsystem, controller_id=1) or b""
            except (LookupError, ValueError):
                return b""
        offset = int.from_bytes(entry[48:56], "little")
        if entry[0] == AdminOpcode.GET_LOG_PAGE and entry[40] == LogPage.ANA:
            return encode_ana(PLAIN.namespaces, change_count=1, groups_only=False)
        if entry[0] == AdminOpcode.GET_LOG_PAGE and entry[40] == LogPage.DISCOVERY:
            return _LOG[offset:]
        return b""

    @staticmethod
    def _result(entry: bytes) -> int:
        if entry[0] != AdminOpcode.FABRICS or entry[4] != FabricsType.PROPERTY_GET:
            return 0
        return _CAPABILITIES if entry[40] else 1


def _host(script: Script) -> tuple[HostController, _Answers]:
    host = HostController(traddr="127.0.0.1", trsvcid=1, subsystem_nqn=NQN, host_nqn=HOST)
    answers = _Answers(script)
    host._admin = answers  # type: ignore[assignment]
    return host, answers


def host_pages(content: bytes) -> None:
    """A controller's data is understood or refused, and requests come to an end."""
    script = Script(content)
    host, answers = _host(script)
    # Skip waiting for a controller that isn't ready.
    original, asyncio.sleep = asyncio.sleep, _no_sleep  # type: ignore[assignment]
    try:
        _finished(host._enable())
    finally:
        asyncio.sleep = original
    if host._identity is None:
        return
    asks: tuple[Callable[[], Coroutine[object, object, object]], ...] = (
        host.active_namespaces,
        host.ana_states,
        lambda: host.identify_namespace(1),
        lambda: host.namespace_names(1),
        lambda: host.request_queues(4),
        lambda: host._event(decode_event(script.number(3))),
    )
    while not script.is_empty:
        answers.commands = 0
        result = _finished(script.choice(asks)())
        if isinstance(result, list | dict):
            assert len(result) <= NAMESPACES_MAX + IDENTIFY_BYTES // 4


async def _no_sleep(_: float) -> None:
    return


def discovery_log(content: bytes) -> None:
    """A discovery log gives paths with addresses and ports, or is refused."""
    host, answers = _host(Script(content))
    answers._is_discovery = True
    for path in _finished(discover(host)) or ():
        assert 0 < path.address.trsvcid < 1 << 16


def nqn(content: bytes) -> None:
    """An accepted name can be encoded and decodes to the same."""
    text = content.decode(errors="replace")
    try:
        checked = check_nqn(text)
    except UsageError:
        return
    assert checked == text
    assert 0 < len(text.encode()) <= 223
    assert "\0" not in text
    assert " " not in text


def initiator_stream(content: bytes) -> None:
    """Whatever a controller sends, commands end, with one of our errors."""
    LOOP.run_until_complete(_initiator_stream(Script(content)))


async def _initiator_stream(script: Script) -> None:
    shape = script.byte()
    near, far = pair()
    with near, far:
        far.send(script.rest())
        far.shutdown(1)
        stream = PduStream(near, data_max=ADMIN_DATA_MAX)
        if shape & 1:
            stream.use_digests(header=bool(shape & 2), data=bool(shape & 4))
            await _commands(stream)
        else:
            await _handshake(stream, shape)
        finish(far)


async def _handshake(stream: PduStream, shape: int) -> None:
    connect = Connect(
        command_id=0,
        queue_id=0,
        queue_size=32,
        host_id=uuid.UUID(int=1),
        controller_id=DYNAMIC_CONTROLLER,
        subsystem_nqn=NQN,
        host_nqn=HOST,
    )
    credentials = Credentials(secret=HostSecret(bytes(32))) if shape & 8 else None
    offered = Digests(header=bool(shape & 2), data=bool(shape & 4))
    try:
        opened = await handshake._open(stream, connect, credentials, offered)
    except Error:
        return
    assert opened.h2c_data_max >= IDENTIFY_BYTES
    await _commands(stream)


async def _commands(stream: PduStream) -> None:
    ended: list[Error] = []
    queue = AdminQueue(stream, timeout_seconds=60, lost=ended.append)
    entry = bytes([AdminOpcode.IDENTIFY, 0x40]).ljust(64, b"\0")
    rooms = (0, IDENTIFY_BYTES, TRANSFER_MAX)
    answers = await asyncio.gather(
        *(queue.submit(entry, room=room) for room in rooms), return_exceptions=True
    )
    for room, answer in zip(rooms, answers, strict=True):
        if isinstance(answer, BaseException):
            assert isinstance(answer, Error), answer
        else:
            assert len(answer[0]) <= room
    await queue.close()
    assert len(ended) <= 1
