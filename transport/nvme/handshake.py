"""Opens a queue at an address: connection, ICReq, Connect and, if required, authentication."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from sealane import _native
from sealane.errors import ProtocolError, UnavailableError, VerificationError
from sealane.protocol.nvme.authentication import AUTHENTICATION_REQUIRED, CHANNEL_REQUIRED
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import IDENTIFY_BYTES, PduKind
from sealane.transport.nvme.authenticate import Credentials, authenticate
from sealane.transport.nvme.exchange import exchange
from sealane.transport.nvme.stream import PduFaultError, PduStream

# The longest data PDU of an admin queue: a log page that a controller sends in one piece.
ADMIN_DATA_MAX = 65_536
_HEADER_DIGEST = 0x01
_DATA_DIGEST = 0x02


@dataclass(frozen=True, slots=True)
class Address:
    """Address that a controller listens on."""

    traddr: str
    trsvcid: int

    def __str__(self) -> str:
        host = f"[{self.traddr}]" if ":" in self.traddr else self.traddr
        return f"{host}:{self.trsvcid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests (CRC-32C) that a host offers; a controller grants some of them."""

    header: bool = False
    data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedQueue:
    """A queue whose Connect succeeded and that is authenticated if required."""

    stream: PduStream
    h2c_data_max: int
    controller_id: int


async def open_queue(
    address: Address,
    connect: Connect,
    *,
    credentials: Credentials | None,
    digests: Digests,
    timeout_seconds: float,
) -> OpenedQueue:
    """Connect a queue. UnavailableError, NvmeStatusError, ProtocolError or AuthenticationError."""
    family = socket.AF_INET6 if ":" in address.traddr else socket.AF_INET
    try:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            async with asyncio.timeout(timeout_seconds):
                loop = asyncio.get_running_loop()
                await loop.sock_connect(connection, (address.traddr, address.trsvcid))
                stream = PduStream(connection, data_max=ADMIN_DATA_MAX)
                try:
                    opened = await _open(stream, connect, credentials, digests)
                except ProtocolError as error:
                    fault = error if isinstance(error, PduFaultError) else None
                    if fault is not None or error.reason == "pdu.malformed":
                        await stream.farewell(from_host=True, fault=fault)
                    raise
            undo.pop_all()
            return opened
    except OSError as error:
        if isinstance(error, TimeoutError):
            text = f"no answer from {address} in {timeout_seconds:g} s"
            raise UnavailableError("connection.timeout", text) from error
        raise UnavailableError(
            "connection.refused", f"can't connect to {address}: {error.strerror}"
        ) from error


async def _open(
    stream: PduStream, connect: Connect, credentials: Credentials | None, offered: Digests
) -> OpenedQueue:
    await stream.send(_native.encode_ic_req(header_digest=offered.header, data_digest=offered.data))
    response, _ = await stream.receive()
    usable = response.kind == PduKind.IC_RESP and response.version == response.alignment == 0
    refused = response.digests & ~(offered.header * _HEADER_DIGEST | offered.data * _DATA_DIGEST)
    if not usable or refused or response.limit < IDENTIFY_BYTES:
        raise ProtocolError("pdu.malformed", "ICResp has unusable values")
    stream.use_digests(
        header=bool(response.digests & _HEADER_DIGEST), data=bool(response.digests & _DATA_DIGEST)
    )
    entry, data = connect.encode()
    _, result = await exchange(stream, entry, data=data)
    if result & CHANNEL_REQUIRED:
        raise UnavailableError(
            "authentication.channel",
            "the controller requires a secure channel, which is not supported",
        )
    is_asked = bool(result & AUTHENTICATION_REQUIRED)
    # A host that can authenticate the controller insists on that, once per association.
    is_wanted = credentials is not None and credentials.controller_secret is not None
    if is_asked or (is_wanted and connect.queue_id == 0):
        if credentials is None:
            raise VerificationError(
                "authentication.required",
                f"{connect.subsystem_nqn} requires {connect.host_nqn} to authenticate: a secret "
                "is needed",
            )
        await authenticate(
            lambda entry, data, room: exchange(stream, entry, data=data, room=room),
            host_nqn=connect.host_nqn,
            subsystem_nqn=connect.subsystem_nqn,
            credentials=credentials,
        )
    return OpenedQueue(stream=stream, h2c_data_max=response.limit, controller_id=result & 0xFFFF)
