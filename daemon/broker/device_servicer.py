"""gRPC services for devices: `Devices` (mutual TLS) and `DeviceRegistry` (Unix socket)."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import contextlib
import uuid
from typing import TypeAlias

from google.protobuf import empty_pb2, timestamp_pb2

from sealane.crypto.audit import Detail
from sealane.crypto.certificates import Subject
from sealane.daemon.broker.device_books import DeviceBooks, Entry
from sealane.daemon.broker.devices import Devices, Findings
from sealane.daemon.broker.refusals import refusals_recorded
from sealane.daemon.device.anchors.anchor import Anchored, Change
from sealane.daemon.runtime.authorizers import Authorizer, Context
from sealane.daemon.runtime.calls import parse_uuid
from sealane.daemon.volume.jobs import job_kind
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import UsageError
from sealane.protocol.kinds import TakeOverCause
from sealane.protocol.v1 import devices_pb2, devices_pb2_grpc

_Recorded: TypeAlias = contextlib.AbstractAsyncContextManager[None]


class DevicesServicer(devices_pb2_grpc.DevicesServicer):
    """Calls of targets about their devices, and of gateways about volumes that are devices."""

    def __init__(self, devices: Devices, authorizer: Authorizer) -> None:
        self._devices = devices
        self._caller = authorizer.caller

    async def OpenDevice(
        self, request: devices_pb2.OpenDeviceRequest, context: Context
    ) -> devices_pb2.OpenDeviceResponse:
        """Open a device."""
        caller = self._caller(context)
        async with self._recorded("device.open", caller, request.device_id, anchor=request.anchor):
            opened = await self._devices.open(
                caller,
                device_id=_device_id(request.device_id),
                anchor=request.anchor,
                found=[*request.found],
                request_id=request.request_id,
            )
        return devices_pb2.OpenDeviceResponse(
            state=opened.state, sealed=opened.secret.sealed, signature=opened.secret.signature
        )

    async def ConfirmDevice(
        self, request: devices_pb2.ConfirmDeviceRequest, context: Context
    ) -> empty_pb2.Empty:
        """End an initial opening."""
        caller = self._caller(context)
        async with self._recorded("device.confirm", caller, request.device_id):
            await self._devices.confirm(
                caller, device_id=_device_id(request.device_id), fencing_epoch=request.fencing_epoch
            )
        return empty_pb2.Empty()

    async def AdvanceAnchor(
        self, request: devices_pb2.AdvanceAnchorRequest, context: Context
    ) -> empty_pb2.Empty:
        """Change records of an anchor."""
        caller = self._caller(context)
        async with self._recorded("device.advance", caller, request.device_id):
            await self._devices.advance(
                caller,
                device_id=_device_id(request.device_id),
                fencing_epoch=request.fencing_epoch,
                changes=[_change(change) for change in request.changes],
            )
        return empty_pb2.Empty()

    async def CloseDevice(
        self, request: devices_pb2.CloseDeviceRequest, context: Context
    ) -> empty_pb2.Empty:
        """End an opening."""
        caller = self._caller(context)
        async with self._recorded("device.close", caller, request.device_id):
            await self._devices.close(
                caller, device_id=_device_id(request.device_id), fencing_epoch=request.fencing_epoch
            )
        return empty_pb2.Empty()

    async def ReportFindings(
        self, request: devices_pb2.ReportFindingsRequest, context: Context
    ) -> empty_pb2.Empty:
        """Record what a job found wrong."""
        caller = self._caller(context)
        async with self._recorded("device.findings", caller, request.device_id):
            await self._devices.record_findings(
                caller,
                device_id=_device_id(request.device_id),
                fencing_epoch=request.fencing_epoch,
                findings=Findings(
                    volume_id=parse_uuid(request.volume_id, what="volume"),
                    job=job_kind(request.job),
                    found=request.found,
                    repaired=request.repaired,
                    reasons=tuple(request.reasons),
                ),
            )
        return empty_pb2.Empty()

    async def ReportTakeOver(
        self, request: devices_pb2.ReportTakeOverRequest, context: Context
    ) -> empty_pb2.Empty:
        """Record that a gateway took over."""
        caller = self._caller(context)
        async with self._recorded("device.take_over", caller, request.device_id):
            await self._devices.record_take_over(
                caller,
                device_id=_device_id(request.device_id),
                fencing_epoch=request.fencing_epoch,
                volume_id=parse_uuid(request.volume_id, what="volume"),
                take_over=TakeOver(
                    tenant=request.tenant,
                    group=request.group,
                    host_nqn=request.host_nqn,
                    fenced=request.fenced,
                    term=request.term,
                    cause=_cause(request.cause),
                    accepts_loss=request.accepts_loss,
                ),
            )
        return empty_pb2.Empty()

    def _recorded(self, kind: str, caller: Subject, device_id: str, **detail: Detail) -> _Recorded:
        return refusals_recorded(
            self._devices.audit,
            kind,
            subject=caller.spiffe_id,
            device_id=device_id,
            incarnation=caller.incarnation,
            **detail,
        )


class DeviceRegistryServicer(devices_pb2_grpc.DeviceRegistryServicer):
    """Calls of the broker's operator about devices."""

    def __init__(self, books: DeviceBooks) -> None:
        self._books = books

    async def ListDevices(
        self, request: devices_pb2.ListDevicesRequest, context: Context
    ) -> devices_pb2.ListDevicesResponse:
        """Return a page of devices."""
        entries, token = await self._books.entries(
            page_size=request.page_size, page_token=request.page_token
        )
        return devices_pb2.ListDevicesResponse(
            devices=[_message(entry) for entry in entries], next_page_token=token
        )

    async def GetDevice(
        self, request: devices_pb2.GetDeviceRequest, context: Context
    ) -> devices_pb2.DeviceDetails:
        """Return a device with its anchor and its volumes."""
        entry, records, volumes = await self._books.details(_device_id(request.device_id))
        return devices_pb2.DeviceDetails(
            device=_message(entry),
            records=[
                devices_pb2.AnchorRecord(
                    name=name, number=record.number, blob=record.blob, mac=record.mac
                )
                for name, record in records
            ],
            volumes=[str(volume_id) for volume_id in volumes],
        )

    async def InitializeDevice(
        self, request: devices_pb2.InitializeDeviceRequest, context: Context
    ) -> empty_pb2.Empty:
        """Authorize a device, the next one of a node, or a known one again."""
        async with self._recorded(
            "device.init", device_id=request.device_id, node=request.next_node, anew=request.anew
        ):
            if bool(request.device_id) == bool(request.next_node) or (
                request.anew and request.next_node
            ):
                raise UsageError(
                    "device.request",
                    "give either a device id, with or without anew, or next_node without anew",
                )
            if request.next_node:
                await self._books.authorize_next(request.next_node)
            elif request.anew:
                await self._books.believe_anew(_device_id(request.device_id))
            else:
                await self._books.authorize(_device_id(request.device_id))
        return empty_pb2.Empty()

    async def MoveDevice(
        self, request: devices_pb2.MoveDeviceRequest, context: Context
    ) -> empty_pb2.Empty:
        """Give a device to another node."""
        async with self._recorded("device.move", device_id=request.device_id, node=request.node):
            await self._books.move(
                _device_id(request.device_id), request.node, unseen=request.unseen
            )
        return empty_pb2.Empty()

    async def ForgetDevice(
        self, request: devices_pb2.ForgetDeviceRequest, context: Context
    ) -> empty_pb2.Empty:
        """Refuse a device permanently."""
        async with self._recorded("device.forget", device_id=request.device_id):
            await self._books.forget(_device_id(request.device_id))
        return empty_pb2.Empty()

    def _recorded(self, kind: str, **detail: Detail) -> _Recorded:
        return refusals_recorded(self._books.audit, kind, subject="operator", **detail)


def _change(message: devices_pb2.AnchorChange) -> Change:
    record = None
    if message.number:
        record = Anchored(number=message.number, blob=message.blob, mac=message.mac)
    return Change(name=message.name, expected=message.expected_number, record=record)


def _message(entry: Entry) -> devices_pb2.Device:
    message = devices_pb2.Device(
        device_id="" if entry.device_id is None else str(entry.device_id),
        owner=entry.owner,
        fencing_epoch=entry.fencing_epoch,
        anchor=entry.anchor,
        state=entry.state,
        is_volume=entry.is_volume,
    )
    if entry.opened_at is not None:
        opened = timestamp_pb2.Timestamp()
        opened.FromDatetime(entry.opened_at)
        message.open_time.CopyFrom(opened)
    return message


def _cause(text: str) -> TakeOverCause:
    try:
        return TakeOverCause(text)
    except ValueError:
        raise UsageError(
            "device.request", f"cause {text[:80]!r}; allowed: {', '.join(TakeOverCause)}"
        ) from None


def _device_id(text: str) -> uuid.UUID:
    return parse_uuid(text, what="device")
