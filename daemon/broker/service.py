"""What the broker does: registers volumes, releases keys, grants leases (DESIGN §6).

The store is blocking and runs on one thread of its own; the arena belongs to the event loop.
"""

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, ParamSpec, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.certificates import NAME_PATTERN, CertificateAuthority, Subject
from sealane.crypto.exchange import wipe
from sealane.crypto.hpke import Context, SignedSecret, seal_signed
from sealane.crypto.keys import WrappingKey, derive_volume_key, new_key
from sealane.crypto.lease import Arena, Lease
from sealane.daemon.broker.store import BrokerStore, VolumeRecord
from sealane.daemon.clock import utc_now
from sealane.daemon.logs import get_logger
from sealane.daemon.metrics import Metrics
from sealane.errors import LeaseError, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2

SECTOR_BYTES: Final = 4096
SECTOR_COUNT_MAX: Final = 1 << 40
DISPLAY_NAME_CHARACTERS_MAX: Final = 128
PAGE_SIZE_MAX: Final = 1000
MODES: Final = {"", "local", "off"}

# Answers kept for retries; one that fell out costs a retry a fresh lease, which is burned.
_ANSWERS_MAX: Final = 1024

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedLease:
    """A sealed lease and the arena its context names."""

    secret: SignedSecret
    lease_id: int
    broker_instance: int
    start_epoch: int


class BrokerService:
    """One start of the broker. `close` ends its thread and its store."""

    def __init__(
        self,
        store: BrokerStore,
        wrapping: WrappingKey,
        *,
        node: str,
        instance: int,
        metrics: Metrics,
    ) -> None:
        """Open the authority, making it at the very first start, and a fresh arena. Blocking."""
        self._store = store
        self._wrapping = wrapping
        self._metrics = metrics
        self.authority = _open_authority(store, wrapping, node)
        self.arena = Arena(broker_instance=instance, start_epoch=store.next_start_epoch())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broker-store")
        self._answers: OrderedDict[tuple[bytes, bytes], tuple[bytes, SignedLease]] = OrderedDict()

    def close(self) -> None:
        """Wait for the store's thread and close the store."""
        self._thread.shutdown(wait=True)
        self._store.close()

    async def register_volume(
        self,
        caller: Subject,
        *,
        request_id: str,
        display_name: str,
        size_bytes: int,
        target_node: str,
        mode: str = "",
        third_party: str = "",
        fully_sealed: bool = False,
    ) -> broker_pb2.RegisterVolumeResponse:
        """Register a volume of the caller's tenant; the same request id gives the same volume.

        A volume on a third party belongs to one gateway: the caller, which alone ever gets its key
        and leases. The caller also fills a volume that is fully sealed, as all of mode "off" are.
        """
        sector_count, rest = divmod(size_bytes, SECTOR_BYTES)
        if rest or not 1 <= sector_count <= SECTOR_COUNT_MAX:
            raise UsageError(
                "volume.size",
                f"volume size {size_bytes} bytes; allowed: a multiple of {SECTOR_BYTES} from "
                f"{SECTOR_BYTES} to {SECTOR_COUNT_MAX * SECTOR_BYTES}",
            )
        if len(display_name) > DISPLAY_NAME_CHARACTERS_MAX or not display_name.isprintable():
            raise UsageError(
                "volume.display_name",
                f"display name of {len(display_name)} characters; allowed: at most "
                f"{DISPLAY_NAME_CHARACTERS_MAX} printable ones",
            )
        if NAME_PATTERN.fullmatch(target_node) is None:
            raise UsageError(
                "volume.target", f"target {target_node[:80]!r}; allowed: the name of a node"
            )
        if mode not in MODES or bool(third_party) not in {mode != "", mode == "local"}:
            raise UsageError(
                "volume.mode",
                f"volume mode {mode[:80]!r} on third party {third_party[:80]!r}; allowed: "
                "no mode on a target, local on a third party, off on either",
            )
        if third_party and (
            NAME_PATTERN.fullmatch(third_party) is None or target_node != caller.node
        ):
            raise UsageError(
                "volume.third_party",
                f"third party {third_party[:80]!r} of node {target_node!r}; allowed: a name that "
                "the caller's own configuration gives one",
            )
        is_sealed = fully_sealed or mode == "off"
        record = VolumeRecord(
            volume_id=uuid.uuid4(),
            tenant=caller.tenant,
            display_name=display_name,
            sector_count=sector_count,
            target_node=target_node,
            generation=1,
            key_epoch=1,
            mode=mode,
            third_party=third_party,
            fully_sealed=is_sealed,
            filling_gateway=caller.node if is_sealed else "",
        )
        request = str(_uuid(request_id, what="request id"))
        stored, is_new = await self._run(self._store.register, record, request_id=request)
        return broker_pb2.RegisterVolumeResponse(volume=self._signed(stored), is_new=is_new)

    async def descriptor(
        self, caller: Subject, volume_id: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Return a volume's signed descriptor to its tenant's gateways or its target."""
        return self._signed(await self._volume(caller, volume_id))

    async def descriptors(
        self, caller: Subject, *, page_size: int, page_token: str
    ) -> tuple[list[broker_pb2.SignedVolumeDescriptor], str]:
        """Return a page of descriptors and the token of the next one (empty: no more)."""
        after = str(_uuid(page_token, what="page token")) if page_token else ""
        limit = min(page_size, PAGE_SIZE_MAX) if page_size > 0 else PAGE_SIZE_MAX
        is_target = caller.role == "target"
        records = await self._run(
            self._store.volumes,
            tenant=None if is_target else caller.tenant,
            target_node=caller.node if is_target else None,
            after=after,
            limit=limit + 1,
        )
        more = len(records) > limit
        page = records[:limit]
        return [self._signed(r) for r in page], str(page[-1].volume_id) if more else ""

    async def finish_filling(
        self, caller: Subject, volume_id: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Let gateways attach a volume that the caller, and nobody else, has filled."""
        record = await self._volume(caller, volume_id)
        if record.filling_gateway not in {"", caller.node}:
            raise VerificationError(
                "volume.filling.refused",
                f"volume {record.volume_id} is filled by gateway {record.filling_gateway!r}",
            )
        await self._run(self._store.finish_filling, record.volume_id)
        return self._signed(await self._volume(caller, volume_id))

    async def unregister_volume(self, caller: Subject, volume_id: str) -> None:
        """Forget a volume: no key of it is released again."""
        record = await self._volume(caller, volume_id)
        await self._run(self._store.unregister, record.volume_id)

    async def release_key(
        self, caller: Subject, *, volume_id: str, key_epoch: int, request_id: bytes
    ) -> SignedSecret:
        """Seal one key epoch of a volume to the caller's attested KEM key."""
        record = await self._volume(caller, volume_id)
        _check_epoch(record, key_epoch)
        _check_owner(record, caller)
        fresh = new_key()
        wrapped_new = self._wrapping.wrap(fresh, purpose="tenant key", owner=record.tenant)
        wipe(fresh)
        wrapped = await self._run(self._store.tenant_key, record.tenant, wrapped_new=wrapped_new)
        tenant_key = self._wrapping.unwrap(wrapped, purpose="tenant key", owner=record.tenant)
        volume_key = derive_volume_key(tenant_key, volume_id=record.volume_id, key_epoch=key_epoch)
        try:
            secret = seal_signed(
                volume_key,
                recipient_key=caller.kem_public_key,
                kem_algorithm=caller.kem_algorithm,
                context=_context("volume key", caller, record, key_epoch, request_id=request_id),
                signing_key=self.authority.signing_key,
            )
        finally:
            wipe(tenant_key)
            wipe(volume_key)
        self._metrics.keys_released.inc()
        get_logger().info(
            "key_released",
            volume_id=volume_id,
            key_epoch=key_epoch,
            recipient=caller.spiffe_id,
            incarnation=caller.incarnation.hex(),
        )
        return secret

    async def grant_lease(
        self, caller: Subject, *, volume_id: str, key_epoch: int, request_id: bytes
    ) -> SignedLease:
        """Grant the next counters of this start's arena, sealed to the caller.

        A retry with the same request id from the same incarnation gets the same counters.
        """
        record = await self._volume(caller, volume_id)
        _check_epoch(record, key_epoch)
        _check_owner(record, caller)
        context = _context(
            "lease", caller, record, key_epoch, request_id=request_id, arena=self.arena
        )
        asked = hashlib.sha256(context.info()).digest()
        known = self._answers.get((caller.incarnation, request_id))
        if known is not None:
            if known[0] != asked:
                raise UsageError(
                    "lease.request.exists", "this request id was used for another lease"
                )
            return known[1]
        granted = self.arena.grant(incarnation=caller.incarnation)
        await self._run(
            self._store.record_grant,
            granted,
            volume_id=record.volume_id,
            key_epoch=key_epoch,
            recipient=caller.spiffe_id,
            incarnation=caller.incarnation,
        )
        lease = SignedLease(
            secret=seal_signed(
                _lease_message(record, key_epoch, granted),
                recipient_key=caller.kem_public_key,
                kem_algorithm=caller.kem_algorithm,
                context=context,
                signing_key=self.authority.signing_key,
            ),
            lease_id=granted.lease_id,
            broker_instance=self.arena.broker_instance,
            start_epoch=self.arena.start_epoch,
        )
        self._answers[caller.incarnation, request_id] = (asked, lease)
        if len(self._answers) > _ANSWERS_MAX:
            self._answers.popitem(last=False)
        self._metrics.leases_granted.inc()
        get_logger().info(
            "lease_granted",
            volume_id=volume_id,
            start_epoch=self.arena.start_epoch,
            lease_id=granted.lease_id,
            counters=granted.count,
            recipient=caller.spiffe_id,
        )
        return lease

    async def return_lease(
        self,
        caller: Subject,
        *,
        volume_id: str,
        arena: tuple[int, int],
        lease_id: int,
        touched: Sequence[int],
    ) -> int:
        """Take back what the caller never touched of a lease; returns how many counters.

        LeaseError `lease.return.…`; a lease of another start of a broker stays burned.
        """
        if arena != (self.arena.broker_instance, self.arena.start_epoch):
            raise LeaseError(
                "lease.return.arena", f"lease {lease_id} is of another start of a broker"
            )
        counters = self.arena.give_back(lease_id, touched, incarnation=caller.incarnation)
        # A late retry must not be told counters that may by now be somebody else's.
        for asked in [a for a, (_, lease) in self._answers.items() if lease.lease_id == lease_id]:
            del self._answers[asked]
        self._metrics.leases_returned.inc()
        get_logger().info(
            "lease_returned",
            volume_id=volume_id,
            lease_id=lease_id,
            counters=counters,
            recipient=caller.spiffe_id,
        )
        return counters

    async def _volume(self, caller: Subject, volume_id: str) -> VolumeRecord:
        record = await self._run(self._store.volume, _uuid(volume_id, what="volume id"))
        is_owner = caller.role == "gateway" and caller.tenant == record.tenant
        is_target = caller.role == "target" and caller.node == record.target_node
        if not is_owner and not is_target:
            # The same answer as for a volume that isn't there: ids of other tenants stay unknown.
            raise UsageError("volume.not_found", f"there is no volume {record.volume_id}")
        return record

    def _signed(self, record: VolumeRecord) -> broker_pb2.SignedVolumeDescriptor:
        descriptor = broker_pb2.VolumeDescriptor(
            volume_id=str(record.volume_id),
            generation=record.generation,
            sector_count=record.sector_count,
            tenant=record.tenant,
            target_node=record.target_node,
            key_epoch=record.key_epoch,
            display_name=record.display_name,
            mode=record.mode,
            third_party=record.third_party,
            fully_sealed=record.fully_sealed,
            filling_gateway=record.filling_gateway,
        ).SerializeToString(deterministic=True)
        return broker_pb2.SignedVolumeDescriptor(
            descriptor=descriptor, signature=self.authority.sign_descriptor(descriptor)
        )

    async def _run(
        self,
        function: Callable[_Parameters, _Result],
        *args: _Parameters.args,
        **kwargs: _Parameters.kwargs,
    ) -> _Result:
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _open_authority(store: BrokerStore, wrapping: WrappingKey, node: str) -> CertificateAuthority:
    stored = store.authority()
    if stored is None:
        made = CertificateAuthority.create(broker=node, now=utc_now())
        key = made.private_bytes()
        store.set_authority(
            wrapped_key=wrapping.wrap(key, purpose="broker key", owner="broker"),
            certificate=made.certificate.public_bytes(serialization.Encoding.DER),
        )
        wipe(key)
        return made
    encoded = wrapping.unwrap(stored[0], purpose="broker key", owner="broker")
    key_object = serialization.load_der_private_key(bytes(encoded), password=None)
    wipe(encoded)
    if not isinstance(key_object, ec.EllipticCurvePrivateKey):
        raise VerificationError("broker.store.malformed", "the stored broker key is not on P-256")
    return CertificateAuthority(key_object, x509.load_der_x509_certificate(stored[1]))


def _check_owner(record: VolumeRecord, caller: Subject) -> None:
    """Only one gateway can ever seal for a volume whose store that gateway alone keeps."""
    if record.third_party and caller.node != record.target_node:
        raise VerificationError(
            "volume.owner.refused",
            f"volume {record.volume_id} of mode {record.mode} belongs to gateway "
            f"{record.target_node!r}",
        )
    if record.filling_gateway not in {"", caller.node}:
        raise UnavailableError(
            "volume.filling",
            f"volume {record.volume_id} is being filled by gateway {record.filling_gateway!r}",
        )


def _check_epoch(record: VolumeRecord, key_epoch: int) -> None:
    if key_epoch != record.key_epoch:
        raise UsageError(
            "volume.key_epoch",
            f"key epoch {key_epoch} of volume {record.volume_id}; allowed: {record.key_epoch}",
        )


def _context(
    purpose: str,
    caller: Subject,
    record: VolumeRecord,
    key_epoch: int,
    *,
    request_id: bytes,
    arena: Arena | None = None,
) -> Context:
    return Context(
        purpose=purpose,
        recipient=caller.spiffe_id,
        incarnation=caller.incarnation,
        request_id=request_id,
        volume_id=str(record.volume_id),
        key_epoch=key_epoch,
        arena=None if arena is None else (arena.broker_instance, arena.start_epoch),
    )


def _lease_message(record: VolumeRecord, key_epoch: int, granted: Lease) -> bytes:
    broker_instance, start_epoch = granted.arena
    return broker_pb2.Lease(
        volume_id=str(record.volume_id),
        key_epoch=key_epoch,
        broker_instance=broker_instance,
        start_epoch=start_epoch,
        ranges=[
            broker_pb2.CounterRange(counter_start=r.counter_start, counter_end=r.counter_end)
            for r in granted.ranges
        ],
        lease_id=granted.lease_id,
    ).SerializeToString()


def _uuid(text: str, *, what: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError as error:
        raise UsageError("request.malformed", f"{what} {text[:80]!r}; allowed: a UUID") from error
