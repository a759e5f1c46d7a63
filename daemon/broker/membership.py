"""Nodes that have attested, their certificates, and their revocations (attestation.md).

One record per role of a node holds all of this, so that a concurrent attestation and revocation
can't miss each other. Every answer reads the store: a broker that can't reach it, or that another
broker has replaced, authorizes nobody.
"""

import asyncio
import datetime as dt
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.attestation.ear import AttestationResult
from sealane.crypto.certificates import NAME_PATTERN, SKEW, Subject, parse_spiffe_id, spiffe_id
from sealane.crypto.roles import NODE_ROLES, Role
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.authority import same_authority
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.policy_keeper import CHANGED
from sealane.daemon.broker.records import (
    AuthorityRecord,
    NodeRecord,
    Revocation,
    StatedRecord,
    Stored,
    WhereaboutsRecord,
)
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.stated import Stated, stated_by
from sealane.daemon.broker.succession import issued_by, should_attest_again
from sealane.daemon.node.authorizations import NO_VOLUME, peer_message, peer_of
from sealane.daemon.node.channels import UNATTESTED
from sealane.daemon.node.peers import PeerIncarnation, ServedDevice
from sealane.daemon.runtime.calls import page_limit
from sealane.daemon.runtime.clock import monotonic_ns, utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import AuthorityStage, NodeState
from sealane.protocol.v1 import trust_pb2

REVOKED: Final = "node.revoked"
SUPERSEDED: Final = "node.superseded"
EXPIRED: Final = "node.expired"
UNKNOWN: Final = "node.unknown"
# For each role, the role of the peers that it may ask about: those that connect to it.
PEER_ROLES: Final[dict[str, Role]] = {
    Role.GATEWAY: Role.TARGET,
    Role.TARGET: Role.GATEWAY,
    Role.FABRIC: Role.FABRIC,
}
PEERS_PER_CALL_MAX: Final = 1024
NONCE_BYTES: Final = 32
REASON_CHARACTERS_MAX: Final = 200
# A superseded process must not come back; more than these don't run at the same time.
_SUPERSEDED_MAX: Final = 16


class CheckDevice(Protocol):
    """Raises VerificationError unless the caller's opening of a device is still valid."""

    async def __call__(self, caller: Subject, *, device_id: uuid.UUID, fencing_epoch: int) -> None:
        """Check it."""


class CheckPolicy(Protocol):
    """Raises VerificationError `attestation.policy.changed` if a policy version is too old."""

    def __call__(self, version: int, *, now_ns: int) -> bool:
        """Check it; True if it will soon be too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One role of a node, with its current state."""

    record: NodeRecord
    state: NodeState
    stated: Stated
    call_address: str = ""
    """From which it last attested; empty: not known."""


class Membership:
    """The nodes of one authority, for one of its brokers.

    `cover` returns once a rollback to before a revision would be detected; `check_policy` knows
    which policy versions are still accepted, `check_device` which openings of devices; `lost` is
    called with the SPIFFE id of each role that is revoked.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        cover: Cover,
        check_policy: CheckPolicy,
        check_device: CheckDevice,
        lost: Callable[[str], Awaitable[None]],
        audit: Audit,
        metrics: Metrics,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        self._registry = registry
        self._cover = cover
        self._check_policy = check_policy
        self._check_device = check_device
        self._lost = lost
        self._audit = audit
        self._metrics = metrics
        self._now = now

    async def admit(
        self, caller: Subject, leaf: x509.Certificate, result: AttestationResult
    ) -> bool:
        """Raise VerificationError unless the caller may act: it attested, and under this policy.

        `node.revoked` since `leaf`, `node.superseded` by a later process, `node.unknown` to the
        store, `attestation.policy.changed`. Return True if the caller should attest again.
        """
        is_outdated = self._check_policy(result.policy_version, now_ns=monotonic_ns())
        stored = await self._stored(caller.node, caller.role)
        record = stored.record if stored else None
        _check_not_revoked(record, issued=leaf.not_valid_before_utc + SKEW)
        if stored is None or record is None:
            raise VerificationError(UNKNOWN, f"no attestation of {caller.spiffe_id} is known")
        if record.incarnation != caller.incarnation:
            raise VerificationError(
                SUPERSEDED, f"another process has since attested as {caller.spiffe_id}"
            )
        _check_not_refused(record, result.policy_version)
        if self._registry.authorities.stage == AuthorityStage.ANNOUNCED:
            # Another broker may have switched, and nodes refuse what the predecessor signs then.
            await self._registry.refresh_authorities()
        return is_outdated or await self._is_lagging(stored)

    async def attested(
        self,
        subject: Subject,
        leaf: x509.Certificate,
        *,
        policy_version: int,
        hardware_sha256: bytes,
        stated: Stated,
        call_address: str = "",
    ) -> None:
        """Record the leaf issued to a node; from then on only this incarnation is authorized.

        VerificationError if it must not have the leaf: `node.revoked`, or `node.superseded` by an
        incarnation that attested later.
        """
        der = leaf.public_bytes(Encoding.DER)
        name = _name(subject.node, subject.role)

        async def attempt() -> int | None:
            known = await self._stored(subject.node, subject.role)
            before = known.record if known else NodeRecord(node=subject.node, role=subject.role)
            _check_not_revoked(before, issued=leaf.not_valid_before_utc + SKEW)
            if subject.incarnation in before.superseded:
                raise VerificationError(
                    SUPERSEDED,
                    f"another process has since attested as {subject.spiffe_id}: a node runs one "
                    "process per role",
                )
            is_renewal = before.incarnation == subject.incarnation
            superseded = (before.incarnation, *before.superseded) if before.incarnation else ()
            update: dict[str, object] = {
                "tenant": subject.tenant,
                "incarnation": subject.incarnation,
                "leaf": der,
                "policy_version": policy_version,
                "refused_version": 0,
                "hardware_sha256": hardware_sha256,
                # A server may show it until it receives this answer; another process never will.
                "previous_leaf": before.leaf if is_renewal else b"",
                "superseded": before.superseded if is_renewal else superseded[:_SUPERSEDED_MAX],
                "attested_at": self._now(),
            }
            record = before.model_copy(update=update)
            authority = await self._registry.authority_record()
            _check_signing(authority.record, leaf)
            said = StatedRecord(
                incarnation=subject.incarnation,
                version=stated.version,
                clock_skew_ms=stated.clock_skew_ms,
            )
            # Brokers of earlier versions, which can't read a succession, can't read these either.
            if authority.record.succession is not None:
                said = said.model_copy(
                    update={"trusted": stated.trusted, "certified_by": stated.certified_by}
                )
            where = WhereaboutsRecord(
                incarnation=subject.incarnation,
                call_address=call_address,
                addresses=dict(stated.addresses),
            )
            registry = self._registry
            return await registry.commit(
                [registry.nodes.unchanged(name, known), same_authority(authority)],
                {
                    **registry.nodes.sealed(name, record),
                    **registry.stated.sealed(name, said),
                    **registry.whereabouts.sealed(name, where),
                },
            )

        await self._registry.settle(attempt)

    async def refused(
        self,
        node: str,
        role: str,
        *,
        incarnation: bytes,
        policy_version: int,
        hardware_sha256: bytes,
    ) -> None:
        """Record that a policy refused genuine evidence of a process that attested before.

        Its results under older policies end now. Evidence of other hardware changes nothing for it.
        """
        nodes, name = self._registry.nodes, _name(node, role)

        async def attempt() -> int | None:
            stored = await self._stored(node, role)
            if (
                stored is None
                or (stored.record.incarnation, stored.record.hardware_sha256)
                != (incarnation, hardware_sha256)
                or stored.record.policy_version >= policy_version
            ):
                return 0
            record = stored.record.model_copy(update={"refused_version": policy_version})
            return await self._registry.commit(
                [nodes.unchanged(name, stored)], nodes.sealed(name, record)
            )

        await self._registry.settle(attempt)

    async def leaves(self, name: str, *, caller: Subject) -> list[x509.Certificate]:
        """Return the leaves that the peer with SPIFFE id `name` may show, newest first.

        UnavailableError `peer.unattested` if it is unknown, expired or revoked, or the caller may
        not ask about it.
        """
        node, role = parse_spiffe_id(name)
        stored = await self._stored(node, role)
        if (
            role != PEER_ROLES.get(caller.role)
            or stored is None
            or _state(stored.record, self._now()) != NodeState.ACTIVE
        ):
            raise UnavailableError(UNATTESTED, f"no attested peer {name} is known")
        kept = (stored.record.leaf, stored.record.previous_leaf)
        leaves = [x509.load_der_x509_certificate(der) for der in kept if der]
        return [leaf for leaf in leaves if leaf.not_valid_after_utc > self._now()]

    async def authorize(
        self,
        caller: Subject,
        *,
        nonce: bytes,
        peers: Sequence[PeerIncarnation],
        device: ServedDevice | None = None,
    ) -> bytes:
        """Return the serialized Authorization for these peers of the caller.

        VerificationError `device.…` if the caller lost the device that it serves them from.
        """
        if len(nonce) != NONCE_BYTES or len(peers) > PEERS_PER_CALL_MAX:
            raise UsageError(
                "authorization.request",
                f"a nonce of {len(nonce)} bytes for {len(peers)} peers; allowed: {NONCE_BYTES} "
                f"bytes, at most {PEERS_PER_CALL_MAX} peers",
            )
        if device is not None:
            await self._check_device(
                caller, device_id=device.device_id, fencing_epoch=device.fencing_epoch
            )
        refusals = await asyncio.gather(*(self._refusal(caller, peer) for peer in peers))
        for reason in filter(None, refusals):
            self._metrics.broker.authorizations_refused.labels(reason).inc()
        return trust_pb2.Authorization(
            subject=peer_message(peer_of(caller)),
            nonce=nonce,
            verdicts=[
                trust_pb2.Verdict(peer=peer_message(peer), refusal=reason)
                for peer, reason in zip(peers, refusals, strict=True)
            ],
        ).SerializeToString(deterministic=True)

    async def revoke(self, node: str, role: str, *, reason: str, unseen: bool = False) -> None:
        """Revoke one role of a node, or all ("").

        UsageError `node.not_found` if it never attested in any of these roles, unless `unseen`.
        """
        if len(reason) > REASON_CHARACTERS_MAX or not reason.isprintable():
            raise UsageError(
                "node.revocation.reason",
                f"the reason has {len(reason)} characters; allowed: at most "
                f"{REASON_CHARACTERS_MAX}, all printable",
            )
        roles = _roles(node, role)
        if not unseen and not any([await self._stored(node, each) for each in roles]):
            raise unseen_node(node, roles)
        revocation = Revocation(reason=reason, revoked_at=self._now())
        for each in roles:
            await self._change(node, each, {"revocation": revocation, "restored_at": None})
            await self._audit.record(
                "node.revoked",
                subject="operator",
                outcome="done",
                node=node,
                role=each,
                text=reason,
            )
            self._metrics.broker.revocations.labels("revoked").inc()
            await self._lost(spiffe_id(node, each))
            get_logger().warning("node_revoked", node_revoked=node, role=each, text=reason)

    async def restore(self, node: str, role: str) -> None:
        """Let a node attest again; certificates issued before stay refused.

        UsageError `node.not_found` if it isn't revoked.
        """
        roles = [each for each in _roles(node, role) if await self._is_revoked(node, each)]
        if not roles:
            raise UsageError("node.not_found", f"{role or 'node'} {node} is not revoked")
        for each in roles:
            await self._change(node, each, {"revocation": None, "restored_at": self._now()})
            await self._audit.record(
                "node.restored", subject="operator", outcome="done", node=node, role=each
            )
            self._metrics.broker.revocations.labels("restored").inc()
            get_logger().warning("node_restored", node_restored=node, role=each)

    async def members(self, *, page_size: int, page_token: str) -> tuple[list[Member], str]:
        """Return a page of nodes by role and name, and the next page's token (empty: last page)."""
        limit = page_limit(page_size)
        page, has_more = await self._registry.nodes.page(after=page_token, limit=limit)
        now = self._now()
        stated = await asyncio.gather(*(self._registry.stated.get(each.name) for each in page))
        found = await asyncio.gather(*(self._registry.whereabouts.get(each.name) for each in page))
        members = [
            _member(each.record, said, where, now)
            for each, said, where in zip(page, stated, found, strict=True)
        ]
        return members, page[-1].name if page and has_more else ""

    async def _refusal(self, caller: Subject, peer: PeerIncarnation) -> str:
        """Return the reason why `peer` may not act at `caller`; empty: it may."""
        try:
            node, role = parse_spiffe_id(peer.spiffe_id)
            stored = await self._stored(node, role)
            # Everyone may ask about itself: a gateway does where no Sealane target checks it.
            is_self = peer.spiffe_id == caller.spiffe_id
            if stored is None or not (is_self or PEER_ROLES.get(role) == caller.role):
                return UNKNOWN
            return self._standing(stored.record, peer.incarnation) or (
                await self._volume_refusal(caller, stored.record.tenant, peer)
            )
        except VerificationError as error:
            return UNKNOWN if error.reason == "certificate.profile" else error.reason

    async def _volume_refusal(self, caller: Subject, tenant: str, peer: PeerIncarnation) -> str:
        """Return why a gateway of `tenant` may not use a volume of the caller; empty: it may.

        The reason is the same for all cases, whether the volume exists or not.
        """
        if not peer.volume_id:
            return ""
        if not _is_uuid(peer.volume_id):
            return NO_VOLUME
        stored = await self._registry.volumes.get(peer.volume_id)
        if (
            stored is None
            or stored.record.is_deleted
            or stored.record.target_node != caller.node
            or not stored.record.allows(tenant, writing=not peer.is_read_only)
        ):
            return NO_VOLUME
        return ""

    def _standing(self, record: NodeRecord, incarnation: bytes) -> str:
        """Return why this incarnation may not act; VerificationError: its policy is too old."""
        if record.revocation is not None:
            return REVOKED
        if record.incarnation != incarnation:
            return SUPERSEDED
        if _state(record, self._now()) != NodeState.ACTIVE:
            return EXPIRED
        self._check_policy(record.policy_version, now_ns=monotonic_ns())
        _check_not_refused(record, record.policy_version)
        return ""

    async def _is_lagging(self, stored: Stored[NodeRecord]) -> bool:
        """Return whether a node should attest again because the authority is being replaced."""
        authorities, now = self._registry.authorities, self._now()
        if not authorities.is_changing(now):
            return False
        said = await self._registry.stated.get(stored.name)
        stated = stated_by(stored.record, said)
        return should_attest_again(stored.record, stated, authorities, now=now)

    async def _is_revoked(self, node: str, role: str) -> bool:
        stored = await self._stored(node, role)
        return stored is not None and stored.record.revocation is not None

    async def _stored(self, node: str, role: str) -> Stored[NodeRecord] | None:
        return await self._registry.nodes.get(_name(node, role))

    async def _change(self, node: str, role: str, update: dict[str, object]) -> None:
        name = _name(node, role)
        nodes = self._registry.nodes

        async def attempt() -> int | None:
            stored = await nodes.get(name)
            before = stored.record if stored else NodeRecord(node=node, role=role)
            changed = nodes.sealed(name, before.model_copy(update=update))
            return await self._registry.commit([nodes.unchanged(name, stored)], changed)

        # A rolled-back store must not undo a revocation.
        await self._cover(await self._registry.settle(attempt))


def unseen_node(node: str, roles: Sequence[str]) -> UsageError:
    """Return the error for a node that never attested."""
    return UsageError(
        "node.not_found",
        f"no node {node!r} has attested as {' or '.join(roles)} at these brokers: sealanectl node "
        "list shows those that have; --unseen accepts one that has not attested yet",
    )


def _name(node: str, role: str) -> str:
    return f"{role}/{node}"


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def _roles(node: str, role: str) -> Sequence[str]:
    if NAME_PATTERN.fullmatch(node) is None or role not in {"", *NODE_ROLES}:
        raise UsageError(
            "node.malformed",
            f"role {role[:80]!r} of node {node[:80]!r}; allowed: a node's name, and one of "
            f"{', '.join(NODE_ROLES)} or an empty role for all",
        )
    return (role,) if role else NODE_ROLES


def _check_not_revoked(record: NodeRecord | None, *, issued: dt.datetime) -> None:
    if record is None:
        return
    is_old = record.restored_at is not None and issued <= record.restored_at
    if record.revocation is not None or is_old:
        raise VerificationError(
            REVOKED, f"{spiffe_id(record.node, record.role)} was revoked by an operator"
        )


def _check_signing(record: AuthorityRecord, leaf: x509.Certificate) -> None:
    """Raise UnavailableError unless the authority that signs now issued a leaf."""
    if not issued_by(leaf, x509.load_der_x509_certificate(record.certificate)):
        raise UnavailableError(
            "attestation.authority.changed",
            "the authority was replaced during the attestation: attest again",
        )


def _check_not_refused(record: NodeRecord, policy_version: int) -> None:
    if record.refused_version > policy_version:
        raise VerificationError(
            CHANGED,
            f"policy version {record.refused_version} refuses this node, which version "
            f"{policy_version} accepted",
        )


def _member(
    record: NodeRecord,
    said: Stored[StatedRecord] | None,
    where: Stored[WhereaboutsRecord] | None,
    now: dt.datetime,
) -> Member:
    """Return a node; without what a broker of an earlier version didn't record of this process."""
    stated, call_address = stated_by(record, said), ""
    if where is not None and where.record.incarnation == record.incarnation:
        stated = replace(stated, addresses=where.record.addresses)
        call_address = where.record.call_address
    return Member(
        record=record, state=_state(record, now), stated=stated, call_address=call_address
    )


def _state(record: NodeRecord, now: dt.datetime) -> NodeState:
    if record.revocation is not None:
        return NodeState.REVOKED
    if not record.leaf:
        return NodeState.EXPIRED
    leaf = x509.load_der_x509_certificate(record.leaf)
    is_old = record.restored_at is not None and (
        leaf.not_valid_before_utc + SKEW <= record.restored_at
    )
    is_over = is_old or leaf.not_valid_after_utc <= now
    return NodeState.EXPIRED if is_over else NodeState.ACTIVE
