"""The authorities of a trust domain, as the store last said: one, or two during a replacement."""

import datetime as dt
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.anchors import AnyKey, Succession, TrustAnchors, digest
from sealane.crypto.certificates import LIFETIME, CertificateAuthority, anchor_key
from sealane.daemon.broker.authority import opened_signer
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.broker.records import AuthorityRecord
from sealane.protocol.kinds import AuthorityStage


class Authorities:
    """The authority that signs, and the other one; those who share the object see each change."""

    signing: CertificateAuthority
    """Signs certificates of nodes and of brokers, descriptors, authorizations and secrets."""
    attesting: CertificateAuthority
    """Certifies the listener for attestation: nodes that were away trust only the predecessor."""
    succession: Succession | None
    """What nodes are told; None: the authority was never replaced."""

    def __init__(
        self, record: AuthorityRecord, keys: Keyring, signing: CertificateAuthority | None = None
    ) -> None:
        """Open the keys of `record`; `signing` is that of its first authority, if it is open.

        Blocks as long as a token does. Errors of `opened_signer`.
        """
        self.anchors = TrustAnchors()
        self.named = _named(record)
        """What tells this state from others."""
        self.on_change: list[Callable[[], None]] = []
        """Called after each change; must not fail."""
        if signing is None:
            signing, _ = opened_signer(
                record.wrapped_key, record.certificate, keys, key_id=record.key_id
            )
        self.signing = self.attesting = signing
        self.succession = None
        self.stage: AuthorityStage | None = None
        self.other = b""
        """Digest of the other authority of the present or last replacement."""
        self.began_at: dt.datetime | None = None
        self.trust(record)
        change = record.succession
        if change is not None:
            self.stage, self.began_at = change.stage, change.began_at
            other = x509.load_der_x509_certificate(change.certificate)
            is_announced = change.stage == AuthorityStage.ANNOUNCED
            present = signing.certificate
            before, after = (present, other) if is_announced else (other, present)
            if change.stage == AuthorityStage.SWITCHED:
                self.attesting, _ = opened_signer(
                    change.wrapped_key, change.certificate, keys, key_id=record.key_id
                )
            self.other = digest(other)
            self.succession = Succession(
                predecessor=digest(before),
                certificate=after.public_bytes(Encoding.DER),
                signature=change.signature,
                retirement=change.retirement,
            )
        self.retired = tuple(map(x509.load_der_x509_certificate, record.retired_certificates))
        """Certificates of those that are no longer trusted, oldest first."""

    def trust(self, record: AuthorityRecord) -> None:
        """Trust the authorities that `record` names, and no other; needs none of their keys."""
        present = x509.load_der_x509_certificate(record.certificate)
        change = record.succession
        if change is None or change.stage == AuthorityStage.RETIRED:
            self.anchors.certificates = (present,)
            return
        other = x509.load_der_x509_certificate(change.certificate)
        is_announced = change.stage == AuthorityStage.ANNOUNCED
        self.anchors.certificates = (present, other) if is_announced else (other, present)

    def is_of(self, record: AuthorityRecord) -> bool:
        """Return whether `record` names the same authorities in the same stage."""
        return self.named == _named(record)

    def is_changing(self, now: dt.datetime) -> bool:
        """Return whether nodes that lag should attest again.

        After a retirement only as long as the certificates that they had then.
        """
        if self.stage == AuthorityStage.RETIRED and self.began_at is not None:
            return now < self.began_at + LIFETIME
        return self.stage is not None

    def become(self, other: "Authorities") -> None:
        """Take over the state of `other`."""
        self.signing, self.attesting = other.signing, other.attesting
        self.stage, self.began_at, self.other = other.stage, other.began_at, other.other
        self.succession, self.retired = other.succession, other.retired
        self.anchors.certificates = other.anchors.certificates
        for tell in self.on_change:
            tell()
        # Last: a change that was only half made is made again.
        self.named = other.named

    @property
    def ever(self) -> tuple[x509.Certificate, ...]:
        """Certificates of all authorities that audit logs may be signed by, oldest first."""
        return (*self.retired, *self.anchors.certificates)

    @property
    def audit_key(self) -> AnyKey:
        """Accepts the signatures in audit logs."""
        return AnyKey(map(anchor_key, self.ever))


def _named(record: AuthorityRecord) -> tuple[object, ...]:
    # Without wrapped keys: to wrap them again changes nothing here.
    change = record.succession
    return (record.certificate, None if change is None else (change.stage, change.certificate))
