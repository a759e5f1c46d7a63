"""Replaces the brokers' authority by a new one, while brokers and nodes run.

The order of events (docs/operate/authority.md; tests/broker/test_succession_model.py):

1. **Announced**: one commit stores the successor's key and certificate. Each node learns it with
   its next certificate, signed by the present authority, and says with the one after that that its
   server accepts it.
2. **Switched**: one commit makes the successor sign. It is refused while a node with a valid
   certificate hasn't said so. The listener for attestation still shows a certificate of the
   predecessor, so that nodes that were away learn the successor.
3. **Retired**: one commit ends the trust in the predecessor and deletes its key. It is refused
   while a node needs it: has a valid certificate of it, or never said that it trusts the successor.

Each certificate is recorded in a commit that compares the authority's record: after a switch no
certificate of the predecessor is added. Heads cover all three commits.
"""

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509

from sealane.crypto.anchors import RETIRED_MAX, Succession, digest
from sealane.crypto.certificates import LIFETIME
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.authority import authority_entry, new_signer, same_authority
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.records import (
    AuthorityRecord,
    NodeRecord,
    Stored,
    SuccessionRecord,
)
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.stated import Stated, stated_by
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UsageError
from sealane.protocol.kinds import AuthorityLag, AuthorityStage
from sealane.reasons import ReasonId

REFRESH_SECONDS: Final = 2.0
"""How often each broker looks whether the authorities have changed."""
AGAIN_SECONDS: Final = 5.0
"""A node that lags isn't asked to attest again before its certificate is this old."""
_NAMED_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingNode:
    """A role of a node that keeps the next step from being taken, or a retired authority trusted.

    `is_active`: it has a certificate that hasn't expired.
    """

    node: str
    role: str
    lag: AuthorityLag
    is_active: bool


def lag_of(
    record: NodeRecord, stated: Stated, authorities: Authorities, *, now: dt.datetime
) -> AuthorityLag | None:
    """Return how a role of a node lags, by what it stated last; None: it doesn't."""
    succession, stage = authorities.succession, authorities.stage
    if succession is None:
        return None
    successor = authorities.anchors.digests[-1]
    if stage == AuthorityStage.RETIRED:
        # A node that was named as gone has not said that it trusts the successor.
        if successor not in stated.trusted:
            return AuthorityLag.NOT_TRUSTING
        return AuthorityLag.TRUSTING if succession.predecessor in stated.trusted else None
    if successor not in stated.trusted:
        return AuthorityLag.NOT_TRUSTING
    # What it shows, and not what was recorded last: the answer to it may have been lost.
    is_certified = stage == AuthorityStage.SWITCHED and stated.certified_by != successor
    return AuthorityLag.CERTIFIED if is_certified and _is_active(record, now) else None


def issued_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether the authority's key signed a leaf that a broker recorded."""
    named = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return named.key_identifier == own.digest


class AuthoritySuccession:
    """Takes the steps of a replacement of the authority, as one of the store's brokers."""

    def __init__(
        self,
        registry: Registry,
        *,
        node: str,
        cover: Cover,
        audit: Audit,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        self._registry = registry
        self._node = node
        self._cover = cover
        self._audit = audit
        self._now = now

    async def announce(self, authority: bytes = b"") -> None:
        """Make a successor of the authority with this digest (empty: whichever signs); idempotent.

        UsageError `authority.stage`: another replacement has not ended; `authority.other`: another
        one signs.
        """
        await self._step(
            AuthorityStage.ANNOUNCED, after=(None, AuthorityStage.RETIRED), authority=authority
        )

    async def switch(self) -> None:
        """Let the successor sign from now on; idempotent.

        UsageError `authority.stage`: none was announced; `authority.unready`: a node that has a
        valid certificate hasn't said that it trusts the successor.
        """
        await self._step(AuthorityStage.SWITCHED, after=(AuthorityStage.ANNOUNCED,))

    async def retire(self, *, gone: Collection[str] = ()) -> None:
        """End the trust in the predecessor and delete its key; idempotent.

        Nodes that are `gone` need not trust the successor. UsageError `authority.stage`: the
        successor doesn't sign yet; `authority.needed`: a node needs the predecessor.
        """
        await self._step(
            AuthorityStage.RETIRED, after=(AuthorityStage.SWITCHED,), gone=frozenset(gone)
        )

    async def _step(
        self,
        stage: AuthorityStage,
        *,
        after: Sequence[AuthorityStage | None],
        gone: Collection[str] = (),
        authority: bytes = b"",
    ) -> None:
        is_repeated = False

        async def attempt() -> int | None:
            nonlocal is_repeated
            stored = await self._registry.authority_record()
            record = stored.record
            present = None if record.succession is None else record.succession.stage
            if present == stage:
                is_repeated = True
                return stored.revision
            if present not in after:
                raise UsageError("authority.stage", _OUT_OF_ORDER[stage])
            signing = digest(x509.load_der_x509_certificate(record.certificate))
            if authority not in {b"", signing}:
                raise UsageError(
                    "authority.other",
                    f"the authority is {signing.hex()} now, not {authority.hex()}: it was replaced "
                    "meanwhile",
                )
            await self._registry.refresh_authorities()
            authorities = self._registry.authorities
            if not authorities.is_of(record):
                return None
            changed = await self._changed(stage, stored, authorities, gone)
            # Recorded first: no step without a record, after a conflict or crash again.
            await self._audit.record(
                "authority.replace",
                subject="operator",
                outcome="done",
                stage=stage,
                authority=digest(x509.load_der_x509_certificate(changed.certificate)),
                other=digest(_other(changed)),
                gone=sorted(gone),
            )
            return await self._registry.commit([same_authority(stored)], authority_entry(changed))

        revision = await self._registry.settle(attempt)
        if not is_repeated:
            get_logger().warning("authority_replacement", stage=stage)
        # Of a repeated one, too: the broker that took it may not have lived to do that.
        await self._cover(revision)
        await self._registry.refresh_authorities()

    async def _changed(
        self,
        stage: AuthorityStage,
        stored: Stored[AuthorityRecord],
        authorities: Authorities,
        gone: Collection[str],
    ) -> AuthorityRecord:
        record = stored.record
        if stage == AuthorityStage.ANNOUNCED:
            return await asyncio.to_thread(self._announced, record, authorities)
        lagging = await self._lagging(authorities)
        if stage == AuthorityStage.SWITCHED:
            _check_none(
                "authority.unready",
                [each for each in lagging if each.is_active],
                "have a valid certificate and have not said that they trust the successor: wait "
                "until they have attested again (sealanectl authority status), or stop them and "
                "wait until their certificates have expired",
            )
            return self._switched(record)
        _check_none(
            "authority.needed",
            [each for each in lagging if each.node not in gone],
            "still need the authority before: start those that are away, so that they attest; "
            "those that never will are named by --gone, and need a new trust anchor by hand",
        )
        return self._retired(record, authorities)

    def _announced(self, record: AuthorityRecord, authorities: Authorities) -> AuthorityRecord:
        wrapping = self._registry.keys.key(self._registry.current_key(record))
        made, wrapped = new_signer(wrapping, self._node)
        statement = Succession.announce(authorities.signing, made.certificate)
        succession = SuccessionRecord(
            stage=AuthorityStage.ANNOUNCED,
            began_at=self._now(),
            certificate=statement.certificate,
            wrapped_key=wrapped,
            signature=statement.signature,
        )
        return record.model_copy(update={"succession": succession})

    def _switched(self, record: AuthorityRecord) -> AuthorityRecord:
        before = record.succession
        assert before is not None  # noqa: S101 - announced
        succession = before.model_copy(
            update={
                "stage": AuthorityStage.SWITCHED,
                "began_at": self._now(),
                "certificate": record.certificate,
                "wrapped_key": record.wrapped_key,
            }
        )
        return record.model_copy(
            update={
                "certificate": before.certificate,
                "wrapped_key": before.wrapped_key,
                "succession": succession,
            }
        )

    def _retired(self, record: AuthorityRecord, authorities: Authorities) -> AuthorityRecord:
        before, statement = record.succession, authorities.succession
        assert before is not None  # noqa: S101 - switched
        assert statement is not None  # noqa: S101 - the same
        succession = before.model_copy(
            update={
                "stage": AuthorityStage.RETIRED,
                "began_at": self._now(),
                "wrapped_key": b"",
                "retirement": statement.retired(authorities.signing).retirement,
            }
        )
        retired = (*record.retired_certificates, before.certificate)[-RETIRED_MAX:]
        return record.model_copy(update={"succession": succession, "retired_certificates": retired})

    async def progress(self) -> tuple[Authorities, list[LaggingNode]]:
        """Return the authorities as they are now, and the nodes that lag."""
        await self._registry.refresh_authorities()
        authorities = self._registry.authorities
        return authorities, await self._lagging(authorities)

    async def _lagging(self, authorities: Authorities) -> list[LaggingNode]:
        now = self._now()
        found = []
        async for stored in self._registry.nodes.records():
            record = stored.record
            if record.revocation is not None or not record.leaf:
                continue
            said = await self._registry.stated.get(stored.name)
            lag = lag_of(record, stated_by(record, said), authorities, now=now)
            if lag is not None:
                found.append(
                    LaggingNode(
                        node=record.node,
                        role=record.role,
                        lag=lag,
                        is_active=_is_active(record, now),
                    )
                )
        return found

    async def keep(
        self,
        write: Callable[[], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Follow the steps that other brokers take, and `write` what couldn't be written.

        Raises the errors of `opened_signer`: this broker must not go on with a key of before.
        """
        while True:
            await sleep(REFRESH_SECONDS)
            try:
                await self._registry.refresh_authorities()
            except Error as error:
                get_logger().error(
                    "authorities_unread", reason=error.reason, message=str(error.args[0])
                )
                if self._registry.is_behind:
                    raise
            write()


_OUT_OF_ORDER: Final = {
    AuthorityStage.ANNOUNCED: "a replacement of the authority is in progress: end it by "
    "sealanectl authority retire",
    AuthorityStage.SWITCHED: "no successor of the authority is announced: sealanectl authority "
    "announce makes one",
    AuthorityStage.RETIRED: "the successor of the authority does not sign yet: sealanectl "
    "authority announce, then switch",
}


def should_attest_again(
    record: NodeRecord, stated: Stated, authorities: Authorities, *, now: dt.datetime
) -> bool:
    """Return whether a new certificate would bring a node up to date."""
    leaf = x509.load_der_x509_certificate(record.leaf)
    is_new = now < leaf.not_valid_after_utc - LIFETIME + dt.timedelta(seconds=AGAIN_SECONDS)
    return not is_new and lag_of(record, stated, authorities, now=now) is not None


def _check_none(reason: ReasonId, lagging: Sequence[LaggingNode], what: str) -> None:
    if not lagging:
        return
    named = [f"{each.role} {each.node} ({each.lag})" for each in lagging[:_NAMED_MAX]]
    more = f" and {len(lagging) - _NAMED_MAX} more" if len(lagging) > _NAMED_MAX else ""
    raise UsageError(reason, f"{', '.join(named)}{more} {what}")


def _is_active(record: NodeRecord, now: dt.datetime) -> bool:
    """Return whether a certificate of this role is valid."""
    recorded = (record.leaf, record.previous_leaf)
    return any(
        x509.load_der_x509_certificate(der).not_valid_after_utc > now for der in recorded if der
    )


def _other(record: AuthorityRecord) -> x509.Certificate:
    assert record.succession is not None  # noqa: S101 - every step leaves one
    return x509.load_der_x509_certificate(record.succession.certificate)
