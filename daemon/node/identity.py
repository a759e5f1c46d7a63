"""The identity of one role of this node: keys, certificate, renewal, mutual-TLS channels.

The TLS and KEM keys are created in memory at start and never stored. The certificate is valid for
ten minutes. It is renewed by a new attestation at half of that, or at once if a peer reports that
it is no longer accepted. Servers use the new one from the next handshake, channels are replaced. A
role whose attestation is refused is barred: it has no certificate and no channel until it attests
again, and everything that depends on it is ended. If the certificate expires because no broker can
be reached, the role only can't call or be called: what it serves lasts as long as its peers'
authorizations.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.anchors import AnyKey, TrustAnchors
from sealane.crypto.certificates import LIFETIME, Subject, spiffe_id, verify_leaf
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.kem import KemKey, X25519KemKey
from sealane.crypto.private_keys import private_key_pem
from sealane.crypto.roles import Role
from sealane.daemon.node.call_proofs import CallProofs
from sealane.daemon.node.channels import Channels, Connection, FindPeer, Own
from sealane.daemon.node.server_certificates import CertificateFeed
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import Error, UnavailableError, VerificationError

RENEW_SECONDS: Final = LIFETIME.total_seconds() / 2
RETRY_SECONDS: Final = 5.0
_SPACING_SECONDS: Final = 1.0

REVOKED: Final = "node.revoked"
POLICY_CHANGED: Final = "attestation.policy.changed"
SUPERSEDED: Final = "node.superseded"
OUTDATED: Final = frozenset(
    {
        REVOKED,
        POLICY_CHANGED,
        SUPERSEDED,
        "certificate.expired",
        "node.unknown",
        "token.expired",
    }
)
"""Peers that answer like this know something newer than our certificate: attest again."""
# Not this node's fault: the challenge expired in transit.
STALE: Final = "attestation.nonce.stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The private keys of one role of one start."""

    tls: ec.EllipticCurvePrivateKey
    kem: KemKey
    incarnation: bytes

    @classmethod
    def create(cls, *, kem: KemKey | None = None) -> "Keys":
        """Create new keys; `kem` was created by the hardware where that is possible."""
        return cls(
            tls=ec.generate_private_key(ec.SECP256R1()),
            kem=kem or X25519KemKey.create(),
            incarnation=secrets.token_bytes(16),
        )

    @property
    def tls_public(self) -> bytes:
        """SubjectPublicKeyInfo of the TLS key, DER."""
        return self.tls.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def kem_public(self) -> bytes:
        """Public KEM key, serialized as in RFC 9180."""
        return self.kem.public_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Result of an attestation: a leaf for the attested key, and the metadata for every call.

    `devices` are the items of secondary evidence that the policy asked for and accepted, by label;
    `silent` are the labels of those that it asked for and that didn't answer.
    `is_to_be_told`: the broker waits to hear that this role uses what it was just given.
    """

    leaf: x509.Certificate
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    devices: Mapping[str, Item] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    is_to_be_told: bool = False


Obtain = Callable[[Keys], Awaitable[Issued]]


class Identity:
    """A role of this node. `obtain` gets a certificate: by attestation, or from the authority."""

    def __init__(
        self,
        *,
        node: str,
        role: str,
        anchors: TrustAnchors,
        obtain: Obtain,
        metrics: Metrics,
        kem: KemKey | None = None,
    ) -> None:
        self.node = node
        self.role = role
        self.anchors = anchors
        self.keys = Keys.create(kem=kem)
        self.find_peer: FindPeer = _no_peers
        """Looks up leaves of peers; set by roles that have a broker to ask."""
        self.on_barred: list[Callable[[str], None]] = []
        """Called with the reason each time the verifier refuses this role."""
        self.proofs = CallProofs(
            caller=self.spiffe_id, incarnation=self.keys.incarnation, kem=self.keys.kem
        )
        self.channels = Channels(
            self._current, anchors=anchors, find_peer=self._find_peer, proofs=self.proofs
        )
        self._obtain = obtain
        self._metrics = metrics
        self._own: Own | None = None
        self._devices: Mapping[str, Item] = {}
        self.silent: frozenset[str] = frozenset()
        """Labels of devices that didn't answer while this role last attested."""
        self._outdated = asyncio.Event()
        self._begun = 0
        self._ended: tuple[int, Error | None] = 0, None
        """Number of the last attestation that ended, and why it failed."""
        self._replaced = asyncio.Condition()
        self._server_configuration: grpc.ServerCertificateConfiguration | None = None
        self._key_pem = private_key_pem(self.keys.tls)

    @property
    def spiffe_id(self) -> str:
        """Name of this role for its peers."""
        return spiffe_id(self.node, self.role)

    @property
    def broker_key(self) -> AnyKey:
        """Broker keys that sign descriptors and sealed secrets."""
        return self.anchors.issuing.key

    @property
    def own(self) -> Own:
        """Leaf, key, metadata of this end; UnavailableError before enrolment and while barred."""
        return self._current()

    @property
    def certificate(self) -> x509.Certificate:
        """Current leaf; UnavailableError before the first enrolment and while barred."""
        return self._current().leaf

    @property
    def metadata(self) -> Mapping[str, str | bytes]:
        """Metadata of every call: the attestation result and its verifier's certificate."""
        return dict(self._current().metadata)

    @property
    def has_certificate(self) -> bool:
        """Whether it has enrolled and isn't barred."""
        return self._own is not None

    @property
    def devices(self) -> Mapping[str, Item]:
        """Evidence of devices, by label, with which it is attested; none while barred."""
        return self._devices if self._own is not None else {}

    @property
    def subject(self) -> Subject:
        """Subject of the current certificate; VerificationError once that has expired."""
        return self.verified(self.certificate)

    def verified(self, leaf: x509.Certificate) -> Subject:
        """Return the subject of a leaf that is valid now; errors of `verify_leaf`."""
        return self.anchors.checked(lambda anchor: verify_leaf(leaf, anchor=anchor, now=utc_now()))

    async def renew(self) -> None:
        """Get a certificate and check that it is for this role's keys, node and role."""
        self._outdated.clear()
        self._begun += 1
        number = self._begun
        try:
            issued = await self._obtain(self.keys)
            self._check(issued.leaf)
        except Error as error:
            self._metrics.enrolments.labels("failed").inc()
            async with self._replaced:
                self._ended = number, error
                self._replaced.notify_all()
            raise
        chain = issued.leaf.public_bytes(serialization.Encoding.PEM)
        self._server_configuration = grpc.ssl_server_certificate_configuration(
            [(self._key_pem, chain)], root_certificates=self.anchors.pem
        )
        self._own = Own(
            leaf=issued.leaf,
            certificate_pem=chain,
            key_pem=self._key_pem,
            metadata=issued.metadata,
        )
        self._devices, self.silent = issued.devices, issued.silent
        if issued.is_to_be_told:
            self.outdate()
        async with self._replaced:
            self._ended = number, None
            self._replaced.notify_all()
        self._metrics.enrolments.labels("succeeded").inc()
        expires = issued.leaf.not_valid_after_utc
        self._metrics.certificate_expiry.labels(self.role).set(expires.timestamp())

    async def keep_renewed(self) -> None:
        """Renew at half the lifetime or when outdated; retry until the broker is back."""
        delay = RENEW_SECONDS
        while True:
            # However often peers refuse this role, the verifier isn't asked more often than this.
            await asyncio.sleep(_SPACING_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay - _SPACING_SECONDS):
                    await self._outdated.wait()
            try:
                await self.renew()
            except Error as error:
                get_logger().error(
                    "certificate_renewal_failed",
                    role=self.role,
                    reason=error.reason,
                    message=str(error),
                )
                if _is_refusal(error):
                    await self.bar(error.reason)
                elif self._has_expired():
                    await self._drop()
                delay = RETRY_SECONDS
            else:
                get_logger().info("certificate_renewed", role=self.role)
                delay = RENEW_SECONDS

    async def bar(self, reason: str) -> None:
        """Give up certificate and channels, and end everything that depends on them."""
        if self._own is None:
            return
        self._metrics.barred.labels(self.role, reason).inc()
        get_logger().error("role_barred", role=self.role, reason=reason)
        for tell in self.on_barred:
            tell(reason)
        await self._drop()

    async def _drop(self) -> None:
        self._own = None
        await self.channels.close()

    def outdate(self) -> None:
        """Attest again soon."""
        self._outdated.set()

    async def attest_again(self, *, seconds: float) -> None:
        """Return once an attestation that began after this call has succeeded; raises why not.

        UnavailableError `attestation.timeout` after that time; `keep_renewed` must be running.
        """
        begun = self._begun
        self.outdate()
        try:
            async with asyncio.timeout(seconds), self._replaced:
                await self._replaced.wait_for(lambda: self._ended[0] > begun)
                _, failed = self._ended
        except TimeoutError as error:
            raise UnavailableError(
                "attestation.timeout", f"{self.role} {self.node}: no result within {seconds:g} s"
            ) from error
        if failed is not None:
            raise failed

    async def wait_replaced(self, leaf: x509.Certificate, *, seconds: float) -> bool:
        """Wait until another certificate has replaced `leaf`; False: not within that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.replaced(leaf)
                return True
        return False

    async def replaced(self, leaf: x509.Certificate) -> None:
        """Return when another certificate has replaced `leaf`."""
        async with self._replaced:
            await self._replaced.wait_for(lambda: self._own is not None and self._own.leaf != leaf)

    def note(self, error: Error) -> None:
        """Attest again soon if a peer's refusal says that the certificate is no longer accepted."""
        if error.reason in OUTDATED:
            self.outdate()

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Return credentials that follow renewals; `mutual` requires a client certificate."""
        return CertificateFeed(self._current_configuration).credentials(mutual=mutual)

    @contextlib.asynccontextmanager
    async def channel(self, address: str, node: str, role: str) -> AsyncIterator[grpc.aio.Channel]:
        """Use the mutual-TLS channel to `role` of `node` at `address` (host:port).

        A failed call inside the block is raised as a Sealane error.
        """
        async with self.connection(address, node, role) as connection:
            yield connection.channel

    @contextlib.asynccontextmanager
    async def stream_channel(
        self, address: str, node: str, role: str
    ) -> AsyncIterator[tuple[grpc.aio.Channel, asyncio.Future[None]]]:
        """Use the channel for a stream that may outlast the current certificate.

        Servers end a call when the leaf that it began with expires. The returned future is done
        when another certificate has replaced that leaf: then the stream should be opened again.
        """
        async with self.connection(address, node, role) as connection:
            renewed = asyncio.ensure_future(self.replaced(connection.own.leaf))
            try:
                yield connection.channel, renewed
            finally:
                renewed.cancel()

    @contextlib.asynccontextmanager
    async def connection(self, address: str, node: str, role: str) -> AsyncIterator[Connection]:
        """Use the same channel, with access to the leaves at its ends."""
        try:
            async with self.channels.use(address, node, role) as connection:
                yield connection
        except Error as error:
            self.note(error)
            raise

    def _current(self) -> Own:
        if self._own is None:
            raise UnavailableError(
                "certificate.missing", f"{self.role} {self.node} has no certificate"
            )
        return self._own

    async def _find_peer(self, node: str, role: str) -> Sequence[x509.Certificate]:
        # All certificates with the broker's role are the broker's own.
        return () if role == Role.BROKER else await self.find_peer(node, role)

    def _has_expired(self) -> bool:
        return self._own is not None and self._own.leaf.not_valid_after_utc <= utc_now()

    def _current_configuration(self) -> grpc.ServerCertificateConfiguration:
        # Called from gRPC's threads, so it reads one attribute only.
        if self._server_configuration is None:
            raise UnavailableError("certificate.missing", f"{self.role} has no certificate yet")
        return self._server_configuration

    def _check(self, leaf: x509.Certificate) -> None:
        subject = self.verified(leaf)
        if leaf.public_key() != self.keys.tls.public_key():
            raise VerificationError(
                "certificate.key.mismatch", "the broker certified a key that is not this node's"
            )
        expected = Subject(
            node=self.node,
            role=self.role,
            tenant=subject.tenant,
            incarnation=self.keys.incarnation,
            kem_public_key=self.keys.kem_public,
            kem_algorithm=self.keys.kem.algorithm,
        )
        if subject != expected:
            raise VerificationError(
                "certificate.subject.mismatch",
                f"the broker certified {subject.spiffe_id}, not this {self.role} {self.node}",
            )


async def _no_peers(node: str, role: str) -> Sequence[x509.Certificate]:
    raise UnavailableError(
        "peer.unattested", f"the certificate of {role} {node} can't be looked up without a broker"
    )


def _is_refusal(error: Error) -> bool:
    """Return whether the verifier refused this role, rather than not being reached."""
    return (
        isinstance(error, VerificationError)
        and error.reason.startswith(("attestation.", "node."))
        and error.reason != STALE
    )
