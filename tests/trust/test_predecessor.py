"""A node that has a certificate of the successor, and who has the predecessor's key."""

from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import CertificateAuthority
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.node.trust_client import TrustClient
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import VerificationError
from sealane.protocol.v1 import trust_pb2

BEFORE, AFTER = (CertificateAuthority.create(broker="b", now=utc_now()) for _ in range(2))


@pytest.fixture
def identity() -> Identity:
    async def nothing(_keys: Keys) -> Issued:
        raise AssertionError

    anchors = TrustAnchors(BEFORE.certificate, AFTER.certificate)
    anchors.issuer = AFTER.certificate
    return Identity(node="g", role="gateway", anchors=anchors, obtain=nothing, metrics=Metrics())


def test_no_secret_by_the_predecessor_is_accepted(identity: Identity) -> None:
    for authority in (BEFORE, AFTER):
        signature = authority.signing_key.sign(b"x", ec.ECDSA(SHA256()))
        if authority is AFTER:
            identity.broker_key.verify(signature, b"x", ec.ECDSA(SHA256()))
            continue
        with pytest.raises(InvalidSignature):
            identity.broker_key.verify(signature, b"x", ec.ECDSA(SHA256()))


async def test_no_authorization_by_the_predecessor_is_accepted(identity: Identity) -> None:
    async def answer(_call: Any) -> trust_pb2.SignedAuthorization:
        content = b"x"
        return trust_pb2.SignedAuthorization(
            authorization=content, signature=BEFORE.sign_authorization(content)
        )

    client = TrustClient(SimpleNamespace(brokers=[]), identity)  # type: ignore[arg-type]
    client._brokers = SimpleNamespace(call=answer)  # type: ignore[assignment]
    with pytest.raises(VerificationError) as refused:
        await client.authorize(bytes(32), [])
    assert refused.value.reason == "authorization.signature"
