"""A connection from ICReq to Connect, and the checks of Connect (NVMe Base 2.0 §6.3)."""

from collections.abc import Mapping
from dataclasses import replace

from sealane import _native
from sealane.daemon.nvme.authenticating import SEQUENCE_ERROR, respond
from sealane.daemon.nvme.exported import Association, ConnectRefusedError, Exported
from sealane.errors import ProtocolError
from sealane.protocol.nvme.connect import Connect, decode_connect
from sealane.protocol.nvme.constants import (
    DYNAMIC_CONTROLLER,
    H2C_DATA_BYTES,
    QUEUE_DEPTH_MAX,
    PduKind,
    Status,
)
from sealane.transport.nvme.stream import PduFaultError, PduStream

_DIGESTS = 0x03
_UNSUPPORTED_PARAMETER = 6

# Offsets of fields: in the command, or with this bit in its data.
_IN_DATA = 1 << 16
_SUBSYSTEM = 256 | _IN_DATA
_HOST = 512 | _IN_DATA
_CONTROLLER = 16 | _IN_DATA
_RECORD_FORMAT = 40
_QUEUE_ID = 42
_QUEUE_SIZE = 44


async def handshake(stream: PduStream, *, offers_digests: bool) -> Connect:
    """Exchange ICReq and ICResp; return the Connect command with the negotiated digests.

    ConnectRefusedError, which is already answered, or PduFaultError if the host sends other PDUs.
    """
    request, _ = await stream.receive()
    if request.kind != PduKind.IC_REQ:
        raise PduFaultError(
            f"a connection starts with ICReq, not with PDU type {request.kind:#04x}",
            fatal_status=SEQUENCE_ERROR,
        )
    for name, value, offset in (
        ("format version", request.version, 8),
        ("data alignment", request.alignment, 10),
        ("digests", request.digests & ~_DIGESTS, 11),
    ):
        if value:
            raise PduFaultError(
                f"ICReq with {name} {value}",
                fatal_status=_UNSUPPORTED_PARAMETER,
                offset=offset,
            )
    asked = request.digests if offers_digests else 0
    header_digest, data_digest = bool(asked & 1), bool(asked & 2)
    await stream.send(
        _native.encode_ic_resp(H2C_DATA_BYTES, header_digest=header_digest, data_digest=data_digest)
    )
    stream.use_digests(header=header_digest, data=data_digest)
    capsule, data = await stream.receive()
    if capsule.kind != PduKind.CAPSULE_CMD:
        raise PduFaultError("the first capsule must be Connect", fatal_status=SEQUENCE_ERROR)
    try:
        connect = decode_connect(capsule.entry, data)
    except ProtocolError as error:
        status = (
            Status.SEQUENCE_ERROR
            if error.reason == "connect.expected"
            else Status.CONNECT_PARAMETERS
        )
        command_id = int.from_bytes(capsule.entry[2:4], "little")
        await respond(stream, command_id, status=status)
        raise ConnectRefusedError(error.reason, str(error.args[0]), status=status) from error
    return replace(connect, header_digest=header_digest, data_digest=data_digest)


def check_connect(exported: Exported | None, connect: Connect) -> Exported:
    """Return `exported` if `connect` may use it; ConnectRefusedError otherwise."""
    if exported is None:
        raise ConnectRefusedError(
            "connect.subsystem",
            f"no subsystem {connect.subsystem_nqn!r} here",
            status=Status.CONNECT_PARAMETERS,
            result=_SUBSYSTEM,
        )
    if not exported.allows(connect.host_nqn):
        raise ConnectRefusedError(
            "connect.host",
            f"host {connect.host_nqn!r} may not use {connect.subsystem_nqn}",
            status=Status.CONNECT_HOST,
        )
    if connect.record_format != 0:
        raise ConnectRefusedError(
            "connect.format",
            f"record format {connect.record_format}; allowed: 0",
            status=Status.CONNECT_FORMAT,
            result=_RECORD_FORMAT,
        )
    if connect.queue_id == 0 and connect.controller_id != DYNAMIC_CONTROLLER:
        raise _bad_field("controller id", connect.controller_id, offset=_CONTROLLER)
    if not 2 <= connect.queue_size <= QUEUE_DEPTH_MAX:
        raise _bad_field("queue size", connect.queue_size, offset=_QUEUE_SIZE)
    return exported


def find_association(
    associations: Mapping[int, Association], exported: Exported, connect: Connect
) -> Association:
    """Return the association of an I/O queue's Connect; ConnectRefusedError if there is none.

    Doesn't check whether the queue id is already in use.
    """
    association = associations.get(connect.controller_id)
    if association is None:
        raise _bad_field("controller id", connect.controller_id, offset=_CONTROLLER)
    if association.exported is not exported:
        raise _not_the_controllers(connect, "subsystem", connect.subsystem_nqn, offset=_SUBSYSTEM)
    # Only the NQN is proved (by DH-HMAC-CHAP or a queue ticket). The host id isn't checked: only
    # reservations use it, and they take the admin queue's. So a host may send another one here, as
    # some do, although NVMe Base 2.0 requires the same one.
    if association.host_nqn != connect.host_nqn:
        raise _not_the_controllers(connect, "host", connect.host_nqn, offset=_HOST)
    if not association.admin.is_authenticated:
        raise ConnectRefusedError(
            "connect.authentication",
            "the host hasn't authenticated on its admin queue",
            status=Status.AUTHENTICATION_REQUIRED,
        )
    if not 1 <= connect.queue_id <= association.admin.queue_count:
        raise _bad_field("queue id", connect.queue_id, offset=_QUEUE_ID)
    if not association.admin.is_ready:
        raise ConnectRefusedError(
            "connect.sequence", "the controller isn't enabled", status=Status.SEQUENCE_ERROR
        )
    return association


def _not_the_controllers(
    connect: Connect, field: str, name: str, *, offset: int
) -> ConnectRefusedError:
    return ConnectRefusedError(
        "connect.parameter",
        f"{field} {name!r} is not that of controller {connect.controller_id}",
        status=Status.CONNECT_PARAMETERS,
        result=offset,
    )


def _bad_field(name: str, value: int, *, offset: int) -> ConnectRefusedError:
    return ConnectRefusedError(
        "connect.parameter",
        f"{name} {value} is not allowed here",
        status=Status.CONNECT_PARAMETERS,
        result=offset,
    )
