"""One role of this node towards the others: keys, certificate, renewal, mutual-TLS channels.

The TLS and KEM keys are made in memory at start and never stored. The certificate lives ten
minutes and is renewed at half of that by a fresh attestation; servers pick the new one up at the
next handshake, channels are opened per use with the current one.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.certificates import LIFETIME, Subject, anchor_key, server_name, verify_leaf
from sealane.crypto.kem import KemKey, X25519KemKey
from sealane.daemon.calls import CorrelationInterceptor
from sealane.daemon.clock import utc_now
from sealane.daemon.logs import get_logger
from sealane.daemon.metrics import Metrics
from sealane.daemon.server_certificates import CertificateFeed
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.status import error_of

CONNECT_SECONDS: Final = 5.0
_RENEW_AFTER_SECONDS: Final = LIFETIME.total_seconds() / 2
_RETRY_SECONDS: Final = 5.0

CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 1 << 20),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The private keys of one role of one start."""

    tls: ec.EllipticCurvePrivateKey
    kem: KemKey
    incarnation: bytes

    @classmethod
    def create(cls, *, kem: KemKey | None = None) -> "Keys":
        """Make fresh keys; `kem` is one that hardware has made."""
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
        """The public KEM key, as RFC 9180 serializes it."""
        return self.kem.public_key


Obtain = Callable[[Keys], Awaitable[x509.Certificate]]


class Identity:
    """A role of this node. `obtain` gets a certificate: by attestation, or from the authority."""

    def __init__(
        self,
        *,
        node: str,
        role: str,
        anchor: x509.Certificate,
        obtain: Obtain,
        metrics: Metrics,
        kem: KemKey | None = None,
    ) -> None:
        self.node = node
        self.role = role
        self.anchor = anchor
        self.keys = Keys.create(kem=kem)
        self._obtain = obtain
        self._metrics = metrics
        self._leaf: x509.Certificate | None = None
        self._server_configuration: grpc.ServerCertificateConfiguration | None = None
        self._anchor_pem = anchor.public_bytes(serialization.Encoding.PEM)
        self._key_pem = self.keys.tls.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def broker_key(self) -> ec.EllipticCurvePublicKey:
        """The key that signs descriptors and sealed secrets."""
        return anchor_key(self.anchor)

    @property
    def certificate(self) -> x509.Certificate:
        """The current leaf; UnavailableError before the first enrolment."""
        if self._leaf is None:
            raise UnavailableError(
                "certificate.missing", f"{self.role} {self.node} has no certificate yet"
            )
        return self._leaf

    @property
    def subject(self) -> Subject:
        """What the current certificate says; VerificationError once it has expired."""
        return verify_leaf(self.certificate, anchor=self.anchor, now=utc_now())

    async def renew(self) -> None:
        """Get a certificate and check that it is for our keys, node and role."""
        try:
            leaf = await self._obtain(self.keys)
            self._check(leaf)
        except Error:
            self._metrics.enrolments.labels("failed").inc()
            raise
        chain = leaf.public_bytes(serialization.Encoding.PEM)
        self._server_configuration = grpc.ssl_server_certificate_configuration(
            [(self._key_pem, chain)], root_certificates=self._anchor_pem
        )
        self._leaf = leaf
        self._metrics.enrolments.labels("succeeded").inc()
        self._metrics.certificate_expiry.labels(self.role).set(leaf.not_valid_after_utc.timestamp())

    async def keep_renewed(self) -> None:
        """Renew at half the lifetime; on failure try again until the broker is back."""
        delay = _RENEW_AFTER_SECONDS
        while True:
            await asyncio.sleep(delay)
            try:
                await self.renew()
            except Error as error:
                delay = _RETRY_SECONDS
                get_logger().error(
                    "certificate_renewal_failed",
                    role=self.role,
                    reason=error.reason,
                    message=str(error),
                    expires=self.certificate.not_valid_after_utc.isoformat(),
                )
            else:
                delay = _RENEW_AFTER_SECONDS
                get_logger().info("certificate_renewed", role=self.role)

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Credentials that follow renewals; `mutual` demands a client certificate."""
        return CertificateFeed(self._current_configuration).credentials(mutual=mutual)

    @contextlib.asynccontextmanager
    async def channel(self, address: str, node: str, role: str) -> AsyncIterator[grpc.aio.Channel]:
        """Open a mutual-TLS channel to `role` of `node` at `address` (host:port).

        A failed call inside the block leaves it as the Sealane error it stands for.
        """
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self._anchor_pem,
            private_key=self._key_pem,
            certificate_chain=self.certificate.public_bytes(serialization.Encoding.PEM),
        )
        async with open_channel(address, node, role, credentials) as channel:
            yield channel

    def _current_configuration(self) -> grpc.ServerCertificateConfiguration:
        # Called from gRPC's threads; one attribute read.
        if self._server_configuration is None:
            raise UnavailableError("certificate.missing", f"{self.role} has no certificate yet")
        return self._server_configuration

    def _check(self, leaf: x509.Certificate) -> None:
        subject = verify_leaf(leaf, anchor=self.anchor, now=utc_now())
        if leaf.public_key() != self.keys.tls.public_key():
            raise VerificationError(
                "certificate.key.mismatch", "the broker certified a key that is not ours"
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


@contextlib.asynccontextmanager
async def open_channel(
    address: str, node: str, role: str, credentials: grpc.ChannelCredentials
) -> AsyncIterator[grpc.aio.Channel]:
    """Open a TLS channel whose server must be certified as `role` of `node`."""
    options = [
        *CHANNEL_OPTIONS,
        ("grpc.ssl_target_name_override", server_name(node, role)),
        ("grpc.default_authority", server_name(node, role)),
    ]
    async with grpc.aio.secure_channel(
        address, credentials, options=options, interceptors=[CorrelationInterceptor()]
    ) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            raise error_of(error, peer=f"{role} {node} at {address}") from error
