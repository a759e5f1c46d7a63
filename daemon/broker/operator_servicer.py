"""gRPC service of volumes, keys, leases and snapshots for the broker's operator.

It is served on the broker's Unix socket.
"""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import uuid
from collections.abc import AsyncIterator, Sequence

from google.protobuf import timestamp_pb2

from sealane.crypto.anchors import digest
from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.record_key_rotation import RecordKeyProgress, RecordKeyRotation
from sealane.daemon.broker.records import GrantRecord
from sealane.daemon.broker.refusals import refusals_recorded
from sealane.daemon.broker.rewrapping import Progress, Rewrapping
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.snapshot import Snapshots
from sealane.daemon.broker.succession import AuthoritySuccession, LaggingNode
from sealane.daemon.broker.tenant_key_rotation import TenantKeyProgress, TenantKeyRotation
from sealane.daemon.broker.volume_access import descriptor_of
from sealane.daemon.runtime.authorizers import Context
from sealane.daemon.runtime.calls import PAGE_SIZE_MAX, page_limit, parse_uuid
from sealane.errors import UsageError
from sealane.protocol.kinds import LeaseState
from sealane.protocol.v1 import operator_pb2, operator_pb2_grpc


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """Rotates keys, lists volumes and leases, and takes snapshots."""

    def __init__(
        self,
        broker: BrokerService,
        *,
        rewrapping: Rewrapping,
        record_keys: RecordKeyRotation,
        tenant_keys: TenantKeyRotation,
        succession: AuthoritySuccession,
        snapshots: Snapshots,
    ) -> None:
        self._broker = broker
        self._succession = succession
        self._rewrapping = rewrapping
        self._record_keys = record_keys
        self._tenant_keys = tenant_keys
        self._snapshots = snapshots

    async def RotateEncryptionKey(
        self, request: operator_pb2.RotateEncryptionKeyRequest, context: Context
    ) -> operator_pb2.EncryptionKeys:
        """Begin to wrap all stored keys under the broker's other key encryption key."""
        async with refusals_recorded(
            self._broker.audit, "encryption_key.rotate", subject="operator"
        ):
            await self._rewrapping.begin(gone=frozenset(request.gone_instances))
        return await self._all_keys()

    async def GetEncryptionKeys(
        self, request: operator_pb2.GetEncryptionKeysRequest, context: Context
    ) -> operator_pb2.EncryptionKeys:
        """Return which key encryption keys are in use, and how far a rotation is."""
        return await self._all_keys()

    async def RotateRecordKey(
        self, request: operator_pb2.RotateRecordKeyRequest, context: Context
    ) -> operator_pb2.EncryptionKeys:
        """Begin to replace the key for the MACs of records."""
        async with refusals_recorded(self._broker.audit, "record_key.rotate", subject="operator"):
            await self._record_keys.begin(request.number)
        return await self._all_keys()

    async def _all_keys(self) -> operator_pb2.EncryptionKeys:
        return _keys(await self._rewrapping.progress(), await self._record_keys.progress())

    async def PrepareTenantKey(
        self, request: operator_pb2.PrepareTenantKeyRequest, context: Context
    ) -> operator_pb2.TenantKey:
        """Make a tenant's next key, for which brokers make its volumes ready."""
        async with refusals_recorded(
            self._broker.audit, "tenant_key.prepare", subject="operator", tenant=request.tenant
        ):
            await self._tenant_keys.prepare(request.tenant, request.number)
        return _tenant_key(await self._tenant_keys.progress(request.tenant))

    async def RotateTenantKey(
        self, request: operator_pb2.RotateTenantKeyRequest, context: Context
    ) -> operator_pb2.TenantKey:
        """Have all volumes of a tenant begin a key epoch of its prepared key."""
        async with refusals_recorded(
            self._broker.audit, "tenant_key.rotate", subject="operator", tenant=request.tenant
        ):
            await self._tenant_keys.rotate(request.tenant, request.number)
        return _tenant_key(await self._tenant_keys.progress(request.tenant))

    async def GetTenantKey(
        self, request: operator_pb2.GetTenantKeyRequest, context: Context
    ) -> operator_pb2.TenantKey:
        """Return which key a tenant has, and how far its rotation is."""
        return _tenant_key(await self._tenant_keys.progress(request.tenant))

    async def ListTenantKeys(
        self, request: operator_pb2.ListTenantKeysRequest, context: Context
    ) -> operator_pb2.ListTenantKeysResponse:
        """Return a page of the tenants whose key was ever replaced."""
        page, token = await self._tenant_keys.page(
            after=request.page_token, limit=page_limit(request.page_size)
        )
        return operator_pb2.ListTenantKeysResponse(
            tenant_keys=[_tenant_key(each) for each in page], next_page_token=token
        )

    async def ReplaceAuthority(
        self, request: operator_pb2.ReplaceAuthorityRequest, context: Context
    ) -> operator_pb2.Authorities:
        """Take the next step of a replacement of the authority."""
        async with refusals_recorded(self._broker.audit, "authority.replace", subject="operator"):
            match request.step:
                case operator_pb2.ReplaceAuthorityRequest.ANNOUNCE:
                    await self._succession.announce(request.authority)
                case operator_pb2.ReplaceAuthorityRequest.SWITCH:
                    await self._succession.switch()
                case operator_pb2.ReplaceAuthorityRequest.RETIRE:
                    await self._succession.retire(gone=frozenset(request.gone_nodes))
                case _:
                    raise UsageError("authority.stage", f"there is no step {request.step}")
        return _authorities(*await self._succession.progress())

    async def GetAuthorities(
        self, request: operator_pb2.GetAuthoritiesRequest, context: Context
    ) -> operator_pb2.Authorities:
        """Return the authorities, and which nodes lag behind a replacement."""
        return _authorities(*await self._succession.progress())

    async def RotateVolumeKey(
        self, request: operator_pb2.RotateVolumeKeyRequest, context: Context
    ) -> operator_pb2.VolumeKeyEpochs:
        """Begin a volume's next key epoch."""
        async with refusals_recorded(
            self._broker.audit, "key.rotate", subject="operator", volume_id=request.volume_id
        ):
            volume = await self._broker.rotate_key(_volume_id(request.volume_id))
        return operator_pb2.VolumeKeyEpochs(
            volume_id=str(volume.volume_id),
            oldest_key_epoch=volume.oldest_key_epoch,
            key_epoch=volume.key_epoch,
        )

    async def ListRegisteredVolumes(
        self, request: operator_pb2.ListRegisteredVolumesRequest, context: Context
    ) -> operator_pb2.ListRegisteredVolumesResponse:
        """Return a page of the volumes of all tenants."""
        page, token = await self._broker.volumes(
            page_size=request.page_size, page_token=request.page_token
        )
        return operator_pb2.ListRegisteredVolumesResponse(
            volumes=[descriptor_of(record, record.shares) for record in page],
            next_page_token=token,
        )

    async def TakeSnapshot(
        self, request: operator_pb2.TakeSnapshotRequest, context: Context
    ) -> AsyncIterator[operator_pb2.SnapshotPart]:
        """Stream a snapshot of the store."""
        async with refusals_recorded(self._broker.audit, "broker.snapshot", subject="operator"):
            async for content in self._snapshots.take(request.recipient):
                yield operator_pb2.SnapshotPart(content=content)

    async def ListLeases(
        self, request: operator_pb2.ListLeasesRequest, context: Context
    ) -> operator_pb2.ListLeasesResponse:
        """Return a page of leases; a page of a single volume's leases may be short."""
        limit = page_limit(request.page_size)
        wanted = _volume_id(request.volume_id) if request.volume_id else None
        page, has_more = await self._broker.registry.grants.page(
            after=request.page_token, limit=limit
        )
        served = {
            (int(stored.name), stored.record.start_epoch)
            for stored in (await self._broker.registry.instances.page(limit=PAGE_SIZE_MAX))[0]
        }
        return operator_pb2.ListLeasesResponse(
            leases=[
                _entry(stored.record, served)
                for stored in page
                if wanted in {None, stored.record.volume_id}
            ],
            next_page_token=page[-1].name if has_more else "",
        )


def _authorities(
    authorities: Authorities, lagging: Sequence[LaggingNode]
) -> operator_pb2.Authorities:
    answer = operator_pb2.Authorities(
        authority=digest(authorities.signing.certificate),
        other=authorities.other,
        stage=authorities.stage or "",
        nodes=[
            operator_pb2.AuthorityNode(
                node=each.node, role=each.role, state=each.lag, is_active=each.is_active
            )
            for each in lagging
        ],
        trust_anchors_pem=authorities.anchors.pem,
    )
    if authorities.began_at is not None:
        answer.change_time.FromDatetime(authorities.began_at)
    return answer


def _keys(progress: Progress, record_key: RecordKeyProgress) -> operator_pb2.EncryptionKeys:
    return operator_pb2.EncryptionKeys(
        key_id=progress.key_id,
        previous_key_id=progress.previous_key_id,
        own_key_ids=progress.own,
        retired_key_ids=progress.retired,
        records=progress.records,
        left=progress.left,
        brokers=[
            operator_pb2.BrokerKeys(instance=int(name), node=node, key_ids=ids)
            for name, (node, ids) in progress.held.items()
        ],
        failure=progress.failure,
        record_key_number=record_key.number,
        is_record_key_rotating=record_key.is_replacing,
        left_under_previous_record_key=record_key.left,
        record_key_failure=record_key.failure,
    )


def _tenant_key(progress: TenantKeyProgress) -> operator_pb2.TenantKey:
    return operator_pb2.TenantKey(
        tenant=progress.tenant,
        number=progress.number,
        stage=progress.stage or "",
        volumes=progress.volumes,
        ready=progress.ready,
        rotated=progress.rotated,
        exhausted_volumes=progress.exhausted_volumes,
        exhausted_volume_ids=map(str, progress.exhausted),
        former_numbers=progress.former,
        failure=progress.failure,
    )


def _entry(record: GrantRecord, served: set[tuple[int, int]]) -> operator_pb2.LeaseEntry:
    granted = timestamp_pb2.Timestamp()
    granted.FromDatetime(record.granted_at)
    if record.touched is not None:
        state = LeaseState.RETURNED
    elif (record.broker_instance, record.start_epoch) in served:
        state = LeaseState.OUT
    else:
        state = LeaseState.BURNED
    return operator_pb2.LeaseEntry(
        broker_instance=record.broker_instance,
        start_epoch=record.start_epoch,
        lease_id=record.lease_id,
        volume_id=str(record.volume_id),
        key_epoch=record.key_epoch,
        recipient=record.recipient,
        incarnation=record.incarnation,
        grant_time=granted,
        counters=record.counters,
        returned=record.returned,
        state=state,
    )


def _volume_id(name: str) -> uuid.UUID:
    return parse_uuid(name.removeprefix("volumes/"), what="volume")
