"""The verifier service around appraisal: limits, threads, audit, certificates, results.

Order of checks for a stranger's call: rate of its address, size, single-use challenge, then
verification on a few threads of its own. A refusal is recorded with the rule that decided and its
class; the stranger gets one fixed text, after a time that does not reveal which rule it was.
"""

import asyncio
import datetime as dt
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol, TypeVar

from cryptography import x509

from sealane.crypto.anchors import Succession
from sealane.crypto.attestation.appraisal import Finding, PolicyViolationError
from sealane.crypto.attestation.challenge import Challenge
from sealane.crypto.attestation.ear import ResultSigner
from sealane.crypto.attestation.verifier import Verified, Verifier
from sealane.crypto.audit import Detail
from sealane.crypto.certificates import Subject, spiffe_id
from sealane.crypto.evidence.claims import HardwareClock
from sealane.crypto.evidence.cmw import EVIDENCE_BYTES_MAX, PRIMARY
from sealane.crypto.evidence.software import SOFTWARE
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.peers import RateLimiter, prefix_of
from sealane.daemon.broker.records import ClockRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.stated import Stated
from sealane.daemon.runtime.authorizers import UNKNOWN_CALLER
from sealane.daemon.runtime.clock import monotonic_ns, utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import Error, UnavailableError, UsageError, VerificationError

# A verification takes milliseconds of CPU: with two at a time the event loop stays responsive.
VERIFICATIONS_AT_ONCE: Final = 2
# Verifications that may wait: at most 64 MiB of evidence.
VERIFICATIONS_WAITING_MAX: Final = 256

NAME_CHARACTERS_MAX: Final = 128
"""Length limit of the names in a challenge request: node, role, types of evidence."""
EVIDENCE_TYPES_MAX: Final = 8
"""Types of evidence that a node may offer."""
INTRODUCTION_BYTES_MAX: Final = 80 << 10
"""Size limit of a challenge request's introduction, as for the certificates of a TPM."""

BROKEN_EVIDENCE: Final = "broken_evidence"
POLICY_VIOLATION: Final = "policy_violation"
REFUSED: Final = "attestation.refused"
STALE: Final = "attestation.nonce.stale"

# Refusals are sent at a multiple of this after the call arrived; a whole verification fits into
# one.
_REFUSAL_STEP_SECONDS: Final = 0.1

_Result = TypeVar("_Result")


class Books(Protocol):
    """The node records (sealane.daemon.broker.membership)."""

    async def attested(
        self,
        subject: Subject,
        leaf: x509.Certificate,
        *,
        policy_version: int,
        hardware_sha256: bytes,
        stated: Stated,
        call_address: str,
    ) -> None:
        """Record an issued leaf; VerificationError if the node must not have it."""

    async def refused(
        self,
        node: str,
        role: str,
        *,
        incarnation: bytes,
        policy_version: int,
        hardware_sha256: bytes,
    ) -> None:
        """Record that the policy refused genuine evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """What an accepted node receives."""

    verified: Verified
    certificate: x509.Certificate
    token: str
    verifier_certificate: x509.Certificate
    authority: x509.Certificate
    succession: Succession | None
    retired: Sequence[x509.Certificate]


class VerifierService:
    """Challenges nodes, and certifies those whose evidence the policy accepts.

    `refresh` reads which authority signs now.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        books: Books,
        authorities: Authorities,
        refresh: Callable[[], Awaitable[object]],
        broker: str,
        audit: Audit,
        clocks: "Clocks",
        metrics: Metrics,
    ) -> None:
        self.verifier = verifier
        self._authorities = authorities
        self._refresh = refresh
        self._signer = ResultSigner(authorities.signing, broker=broker, now=utc_now())
        self._signing = authorities.signing
        self._audit = audit
        self._metrics = metrics
        self._limiter = RateLimiter()
        self._threads = ThreadPoolExecutor(VERIFICATIONS_AT_ONCE, thread_name_prefix="verifier")
        self._waiting = 0
        self._clocks = clocks
        self._books = books

    def close(self) -> None:
        """Wait for verifications in progress."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def challenge(
        self,
        *,
        node: str,
        role: str,
        evidence_types: Sequence[str],
        introduction: bytes,
        address: str,
    ) -> Challenge:
        """Open a challenge for a caller at `address`.

        UsageError for malformed names; VerificationError `attestation.refused`; UnavailableError
        `attestation.rate.limit`, `.busy` or `.challenge.limit`.
        """
        started = monotonic_ns()
        try:
            self._limiter.take(address, now_ns=started)
            _check_request(node, role, evidence_types, introduction)
            introduced = await self._on_thread(
                lambda: self.verifier.prepare(
                    node=node,
                    role=role,
                    evidence_types=evidence_types,
                    introduction=introduction,
                    now=utc_now(),
                )
            )
        except VerificationError as error:
            await self._refuse(
                "attestation.challenge",
                error,
                subject=_named(node, role),
                started=started,
                address=address,
                evidence_types=list(evidence_types),
            )
        except (UsageError, UnavailableError) as error:
            await self._note("attestation.challenge", error, address=address)
            raise
        return self.verifier.open(
            node=node,
            role=role,
            evidence_type=evidence_types[0],
            peer=prefix_of(address),
            introduced=introduced,
            now_ns=monotonic_ns(),
        )

    async def attest(
        self,
        *,
        session_id: bytes,
        runtime_data: bytes,
        evidence: bytes,
        address: str,
        state: Callable[[], Stated] = Stated,
    ) -> Issued:
        """Verify, appraise, certify and record; `state` returns what the node states of itself.

        VerificationError `attestation.nonce.stale` or `attestation.refused`; UnavailableError
        `attestation.rate.limit` or `.busy`.
        """
        started = monotonic_ns()
        try:
            self._limiter.take(address, now_ns=started)
            _check_evidence(evidence)
            stated = state()
        except (UsageError, UnavailableError) as error:
            await self._note("attestation.attest", error, address=address)
            raise
        challenge: Challenge | None = None
        verified: Verified | None = None
        try:
            # Evidence names an authority, perhaps one that this broker hasn't heard of.
            await self._refresh()
            challenge = spent = self.verifier.take(session_id, now_ns=started)
            verified = await self._on_thread(
                lambda: self.verifier.verify(
                    spent, runtime_data=runtime_data, evidence=evidence, now=utc_now()
                )
            )
            await self._check_clock(verified)
            issued = self._issue(verified, challenge, now=utc_now())
            # Only after the evidence has proved who asks: revocations are nobody else's business.
            await self._books.attested(
                verified.subject(),
                issued.certificate,
                policy_version=verified.appraisal.policy.version,
                hardware_sha256=_hardware_sha256(verified),
                stated=stated,
                call_address=address,
            )
        except VerificationError as error:
            if verified is not None and isinstance(error, PolicyViolationError):
                await self._books.refused(
                    verified.data.node,
                    verified.data.role,
                    incarnation=verified.data.incarnation,
                    policy_version=verified.appraisal.policy.version,
                    hardware_sha256=_hardware_sha256(verified),
                )
            subject = "unknown" if challenge is None else spiffe_id(challenge.node, challenge.role)
            await self._refuse(
                "attestation.attest",
                error,
                subject=subject,
                started=started,
                address=address,
                evidence_sha256=hashlib.sha256(evidence).digest(),
                **({} if verified is None else _facts(verified)),
            )
        await self._record(issued, evidence, address)
        return issued

    async def _on_thread(self, work: Callable[[], _Result]) -> _Result:
        if self._waiting >= VERIFICATIONS_WAITING_MAX:
            raise UnavailableError(
                "attestation.busy", f"{self._waiting} verifications are waiting: try again later"
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    async def _check_clock(self, verified: Verified) -> None:
        """Refuse hardware whose clock has gone back: its state was rolled back."""
        claims = verified.appraisal.items[PRIMARY].claims
        if claims.clock is not None and verified.appraisal.is_accepted:
            await self._clocks.advance(claims.hardware_id, claims.clock)

    def _issue(self, verified: Verified, challenge: Challenge, *, now: dt.datetime) -> Issued:
        signing = self._authorities.signing
        if signing is not self._signing:
            self._signer.succeed(signing, now=now)
            self._signing = signing
        subject = verified.subject()
        items = verified.appraisal.items.values()
        leaf = signing.issue(
            subject,
            verified.tls_public_key,
            now=now,
            valid_until=min(item.claims.valid_until for item in items),
        )
        token = self._signer.sign(
            verified.appraisal,
            leaf=leaf,
            subject=subject.spiffe_id,
            nonce=challenge.nonce,
            now=now,
        )
        return Issued(
            verified=verified,
            certificate=leaf,
            token=token,
            verifier_certificate=self._signer.certificate(now=now),
            authority=signing.certificate,
            succession=self._authorities.succession,
            retired=self._authorities.retired,
        )

    async def _record(self, issued: Issued, evidence: bytes, address: str) -> None:
        subject = issued.verified.subject()
        evidence_type = issued.verified.data.evidence_type
        await self._audit.record(
            "attestation.attest",
            subject=subject.spiffe_id,
            outcome="granted",
            reason="",
            address=address,
            incarnation=subject.incarnation,
            tenant=subject.tenant,
            serial=f"{issued.certificate.serial_number:x}",
            evidence_sha256=hashlib.sha256(evidence).digest(),
            **_facts(issued.verified),
        )
        self._metrics.broker.attestations.labels("granted", "").inc()
        get_logger().info(
            "node_attested",
            recipient=subject.spiffe_id,
            tenant=subject.tenant,
            incarnation=subject.incarnation.hex(),
            evidence=evidence_type,
            status=issued.verified.appraisal.status.label,
            development=evidence_type == SOFTWARE,
            serial=f"{issued.certificate.serial_number:x}",
        )

    async def _note(self, kind: str, error: Error, *, address: str) -> None:
        """Record a refusal that reveals nothing about evidence, and so is answered at once."""
        self._metrics.broker.attestations.labels("refused", error.reason).inc()
        await self._audit.record(
            kind,
            subject=UNKNOWN_CALLER,
            outcome="refused",
            reason=error.reason,
            message=str(error.args[0]),
            address=address,
        )

    async def _refuse(
        self, kind: str, error: VerificationError, *, subject: str, started: int, **detail: Detail
    ) -> NoReturn:
        """Record a refusal and its reason, and raise what the caller may learn of it."""
        refusal = POLICY_VIOLATION if isinstance(error, PolicyViolationError) else BROKEN_EVIDENCE
        self._metrics.broker.attestations.labels("refused", error.reason).inc()
        get_logger().warning("attestation_refused", reason=error.reason, message=error.args[0])
        await self._audit.record(
            kind,
            subject=subject,
            outcome="refused",
            reason=error.reason,
            refusal=refusal,
            message=str(error.args[0]),
            **{"policy": self.verifier.policy.policy_id, **detail},
        )
        elapsed = (monotonic_ns() - started) / 1e9
        await asyncio.sleep(_REFUSAL_STEP_SECONDS - elapsed % _REFUSAL_STEP_SECONDS)
        if error.reason == STALE:
            raise error
        raise VerificationError(
            REFUSED, "the verifier refused this node; the broker's audit log says why"
        ) from None


class Clocks:
    """The last known clocks of machines, in records of the broker's store."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def advance(self, hardware_id: str, clock: HardwareClock) -> None:
        """Store `clock`; VerificationError `attestation.clock.went_back`."""
        table = self._registry.clocks
        name = hashlib.sha256(hardware_id.encode()).hexdigest()

        async def attempt() -> int | None:
            stored = await table.get(name)
            if stored is not None:
                last = HardwareClock(**stored.record.model_dump())
                if clock.has_gone_back(last):
                    raise VerificationError(
                        "attestation.clock.went_back",
                        f"the clock of {hardware_id} shows {clock}, but showed {last} before",
                    )
            record = ClockRecord(
                reset_count=clock.reset_count,
                restart_count=clock.restart_count,
                millis=clock.millis,
            )
            return await self._registry.commit(
                [table.unchanged(name, stored)], table.sealed(name, record)
            )

        await self._registry.settle(attempt)


def _check_request(
    node: str, role: str, evidence_types: Sequence[str], introduction: bytes
) -> None:
    """UsageError `attestation.challenge.size` unless the request is within its limits.

    Checked before anything else: a stranger's request may be as large as a gRPC message.
    """
    sizes = {
        "node": (len(node), NAME_CHARACTERS_MAX),
        "role": (len(role), NAME_CHARACTERS_MAX),
        "evidence_types": (len(evidence_types), EVIDENCE_TYPES_MAX),
        "evidence type": (max(map(len, evidence_types), default=0), NAME_CHARACTERS_MAX),
        "introduction": (len(introduction), INTRODUCTION_BYTES_MAX),
    }
    for what, (size, limit) in sizes.items():
        if size > limit:
            raise UsageError(
                "attestation.challenge.size", f"{what} of size {size}; allowed: {limit}"
            )


def _check_evidence(evidence: bytes) -> None:
    if len(evidence) > EVIDENCE_BYTES_MAX:
        raise UsageError(
            "attestation.evidence.size",
            f"evidence of {len(evidence)} bytes; allowed: {EVIDENCE_BYTES_MAX}",
        )


def _named(node: str, role: str) -> str:
    return spiffe_id(node[:80], role[:20])


def _hardware_sha256(verified: Verified) -> bytes:
    hardware_id = verified.appraisal.items[PRIMARY].claims.hardware_id
    return hashlib.sha256(hardware_id.encode()).digest()


def _facts(verified: Verified) -> dict[str, Detail]:
    """Return the facts of an appraisal for the audit log."""
    appraisal = verified.appraisal
    primary = appraisal.items[PRIMARY]
    decided: Finding = appraisal.decided
    return {
        "evidence_type": primary.claims.evidence_type,
        "hardware_id": primary.claims.hardware_id,
        "devices": [i.claims.hardware_id for n, i in appraisal.items.items() if n != PRIMARY],
        "reference": primary.reference,
        "status": appraisal.status.label,
        "rule": f"{decided.item}: {decided.rule}",
        "policy": appraisal.policy.policy_id,
    }
