"""Checks of a Connect command against what is there (NVMe Base 2.0 §6.3)."""

from collections.abc import Mapping

from sealane.daemon.storage.exported import Association, ConnectRefusedError, Exported
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import DYNAMIC_CONTROLLER, QUEUE_DEPTH_MAX, Status

# Offsets of fields, in the command or (with this bit) in its data.
_IN_DATA = 1 << 16
_SUBSYSTEM = 256 | _IN_DATA
_CONTROLLER = 16 | _IN_DATA
_RECORD_FORMAT = 40
_QUEUE_ID = 42
_QUEUE_SIZE = 44


def check_connect(exported: Exported | None, connect: Connect) -> Exported:
    """Return the subsystem that `connect` may use; ConnectRefusedError otherwise."""
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
    """Return the association an I/O queue belongs to; ConnectRefusedError if it may not start."""
    association = associations.get(connect.controller_id)
    same = association is not None and (
        association.exported is exported
        and association.host_nqn == connect.host_nqn
        and association.host_id == connect.host_id
    )
    if association is None or not same:
        raise _bad_field("controller id", connect.controller_id, offset=_CONTROLLER)
    if not association.admin.is_authenticated:
        raise ConnectRefusedError(
            "connect.authentication",
            "the host hasn't authenticated on its admin queue",
            status=Status.AUTHENTICATION_REQUIRED,
        )
    allowed = 1 <= connect.queue_id <= association.admin.queue_count
    if not allowed or connect.queue_id in association.queue_ids:
        raise _bad_field("queue id", connect.queue_id, offset=_QUEUE_ID)
    if not association.admin.is_ready:
        raise ConnectRefusedError(
            "connect.sequence", "the controller isn't enabled", status=Status.SEQUENCE_ERROR
        )
    return association


def _bad_field(name: str, value: int, *, offset: int) -> ConnectRefusedError:
    return ConnectRefusedError(
        "connect.parameter",
        f"{name} {value} can't be used",
        status=Status.CONNECT_PARAMETERS,
        result=offset,
    )
