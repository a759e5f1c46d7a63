"""Calls to brokers about a device, by its target or gateway; every answer is verified."""

import asyncio
import hashlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from sealane.crypto.hpke import REQUEST_ID_BYTES, Context, SignedSecret, open_signed
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.device.anchors.anchor import Anchored, Change
from sealane.daemon.node.brokers import Brokers
from sealane.daemon.node.identity import OUTDATED, SUPERSEDED, Identity
from sealane.daemon.node.peers import ServedDevice
from sealane.daemon.volume.jobs import REASONS_MAX, Job
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind
from sealane.protocol.v1 import devices_pb2
from sealane.protocol.v1.devices_pb2_grpc import DevicesStub

_CALL_SECONDS: Final = 10.0
# Shorter than `advance` waits for its anchor, so there is time to try the next broker.
_ADVANCE_SECONDS: Final = 3.0
_CLOSE_SECONDS: Final = 2.0
# A process that another one has superseded has lost its device.
_ATTEST_AGAIN: Final = OUTDATED - {SUPERSEDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDevice:
    """The broker's answer to the device's owner. The receiver wipes `secret` (32 bytes)."""

    served: ServedDevice
    is_initial: bool
    records: Mapping[str, Anchored]
    floor: int
    secret: bytearray


class DeviceClient:
    """Client of the brokers for this node's target, or its gateway's third-party volumes."""

    def __init__(self, config: EnrolmentConfig, identity: Identity) -> None:
        self._brokers = Brokers(config, identity)
        self._identity = identity

    async def open(
        self, device_id: uuid.UUID, *, anchor: AnchorKind, found: Sequence[bytes]
    ) -> OpenedDevice:
        """Become the only process that serves the device.

        VerificationError `device.…`: the broker refused, or the answer is not from it, not for this
        request, or for another device. UnavailableError: try again.
        """
        request = devices_pb2.OpenDeviceRequest(
            device_id=str(device_id),
            anchor=anchor,
            found=found,
            request_id=secrets.token_bytes(REQUEST_ID_BYTES),
        )
        answer = await self._brokers.call(
            lambda channel: DevicesStub(channel).OpenDevice(request, timeout=_CALL_SECONDS)
        )
        try:
            state = devices_pb2.DeviceState.FromString(answer.state)
        except DecodeError as error:
            raise VerificationError(
                "device.state.malformed", "the device's state can't be parsed"
            ) from error
        if state.device_id != str(device_id):
            raise VerificationError(
                "device.state.mismatch", "the broker answered for another device"
            )
        records = _records(state)
        secret = await asyncio.to_thread(
            open_signed,
            SignedSecret(sealed=answer.sealed, signature=answer.signature),
            private_key=self._identity.keys.kem,
            context=Context(
                purpose="device secret",
                recipient=self._identity.subject.spiffe_id,
                incarnation=self._identity.keys.incarnation,
                request_id=request.request_id,
                volume_id=str(device_id),
                key_epoch=state.fencing_epoch,
                beside=hashlib.sha256(answer.state).digest(),
            ),
            signer=self._identity.broker_key,
        )
        return OpenedDevice(
            served=ServedDevice(device_id=device_id, fencing_epoch=state.fencing_epoch),
            is_initial=state.is_initial,
            records=records,
            floor=state.floor,
            secret=secret,
        )

    async def confirm(self, served: ServedDevice) -> None:
        """Report that the device's state is anchored."""
        request = devices_pb2.ConfirmDeviceRequest(
            device_id=str(served.device_id), fencing_epoch=served.fencing_epoch
        )
        await self._brokers.call(
            lambda channel: DevicesStub(channel).ConfirmDevice(request, timeout=_CALL_SECONDS)
        )

    async def advance(self, served: ServedDevice, changes: Sequence[Change]) -> None:
        """Change records of the anchor; errors as `Anchor.advance`.

        UnavailableError `anchor.unattested` if brokers want this process to attest again first:
        that says nothing about the device.
        """
        request = devices_pb2.AdvanceAnchorRequest(
            device_id=str(served.device_id),
            fencing_epoch=served.fencing_epoch,
            changes=[_message(change) for change in changes],
        )
        try:
            await self._brokers.call(
                lambda channel: DevicesStub(channel).AdvanceAnchor(
                    request, timeout=_ADVANCE_SECONDS
                )
            )
        except VerificationError as error:
            if error.reason in _ATTEST_AGAIN:
                raise UnavailableError(
                    "anchor.unattested", f"the anchor waits for a new certificate: {error}"
                ) from error
            raise

    async def report_findings(self, served: ServedDevice, volume_id: uuid.UUID, job: Job) -> None:
        """Have the broker record what a job found wrong on the device."""
        request = devices_pb2.ReportFindingsRequest(
            device_id=str(served.device_id),
            fencing_epoch=served.fencing_epoch,
            volume_id=str(volume_id),
            job=job.kind,
            found=job.found,
            repaired=job.repaired,
            reasons=sorted({found.reason for found in job.findings})[:REASONS_MAX],
        )
        await self._brokers.call(
            lambda channel: DevicesStub(channel).ReportFindings(request, timeout=_CALL_SECONDS)
        )

    async def report_take_over(
        self, served: ServedDevice, volume_id: uuid.UUID, take_over: TakeOver
    ) -> None:
        """Have the broker record that a gateway took over."""
        request = devices_pb2.ReportTakeOverRequest(
            device_id=str(served.device_id),
            fencing_epoch=served.fencing_epoch,
            volume_id=str(volume_id),
            tenant=take_over.tenant,
            group=take_over.group,
            host_nqn=take_over.host_nqn,
            fenced=take_over.fenced,
            term=take_over.term,
            cause=take_over.cause,
            accepts_loss=take_over.accepts_loss,
        )
        await self._brokers.call(
            lambda channel: DevicesStub(channel).ReportTakeOver(request, timeout=_CALL_SECONDS)
        )

    async def close(self, served: ServedDevice) -> None:
        """Report that this process no longer serves the device."""
        request = devices_pb2.CloseDeviceRequest(
            device_id=str(served.device_id), fencing_epoch=served.fencing_epoch
        )
        await self._brokers.call(
            lambda channel: DevicesStub(channel).CloseDevice(request, timeout=_CLOSE_SECONDS)
        )


def _records(state: devices_pb2.DeviceState) -> dict[str, Anchored]:
    try:
        return {r.name: Anchored(number=r.number, blob=r.blob, mac=r.mac) for r in state.records}
    except UsageError as error:
        raise VerificationError(
            "device.state.malformed", "the broker's records are not valid anchor records"
        ) from error


def _message(change: Change) -> devices_pb2.AnchorChange:
    message = devices_pb2.AnchorChange(name=change.name, expected_number=change.expected)
    if change.record is not None:
        message.number = change.record.number
        message.blob = change.record.blob
        message.mac = change.record.mac
    return message
